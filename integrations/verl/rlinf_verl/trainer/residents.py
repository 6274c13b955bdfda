"""veRL's engines as residents of the context switcher, driven by veRL's own verbs.

Two kinds, by how veRL lets them move: :class:`EngineResident` for an engine that stays where it is put, and
:class:`WorkingRoom` for one that fetches its own weights for every call. Rollout replicas are in
:mod:`rlinf_verl.trainer.replica_residents`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_verl.trainer import worker_side
from rlinf_verl.trainer.ranks import call_all, ranks_of, seal
from rlinf_verl.trainer.worker_side import Part


class EngineResident:
    """An actor or critic engine over its whole process group.

    Args:
        name: Its name.
        workers: The group's workers in the order of their ranks (``RayWorkerGroup.workers``).
        part: Which engine of the workers.
        devices: Name of each rank's device.
        nbytes: Most bytes a rank has on its device between two stages.
        fence_folder: Where the device fences of every machine are.
        optimizer: Move the optimizer's state as well.
    """

    def __init__(
        self,
        name: str,
        workers: Sequence[Any],
        part: Part,
        devices: Sequence[str],
        nbytes: int,
        *,
        fence_folder: str,
        optimizer: bool = True,
    ) -> None:
        self.name = name
        self._ranks = ranks_of(name, workers, devices)
        self._part = part
        self._nbytes = nbytes
        self._folder = fence_folder
        self._optimizer = optimizer

    @property
    def footprint(self) -> Mapping[str, int]:
        """Bytes on each rank's device."""
        return {device: self._nbytes for _, device in self._ranks}

    async def drain(self) -> None:
        """Wait for the calls the group has accepted: a worker runs them in order, so this one comes after them."""
        await call_all(worker.__ray_call__.remote(worker_side.synchronise) for worker, _ in self._ranks)

    async def offload(self, permit: Permit) -> None:
        """``TrainingWorker.to("cpu")`` on every rank, under its device's fence."""
        await self._move(permit, onto_device=False)

    async def onload(self, permit: Permit) -> None:
        """``TrainingWorker.to("device")`` on every rank, under its device's fence."""
        await self._move(permit, onto_device=True)

    async def resident_bytes(self) -> Mapping[str, int]:
        """Measure on every rank."""
        found = await call_all(
            worker.__ray_call__.remote(worker_side.engine_bytes, self._part) for worker, _ in self._ranks
        )
        return {device: nbytes for (_, device), nbytes in zip(self._ranks, found, strict=True)}

    async def resume(self) -> None:
        """Nothing to do: an engine works when it is called."""

    async def _move(self, permit: Permit, onto_device: bool) -> None:
        await call_all(
            worker.__ray_call__.remote(
                worker_side.move_engine, self._part, onto_device, self._optimizer, permit, self._folder, device
            )
            for worker, device in self._ranks
        )


class WorkingRoom:
    """Room for an engine that brings its weights itself. "Resident" means that the room is kept free for it.

    That is a reference under FSDP's CPU offload policy (``TrainingWorker.to`` does nothing there) and any engine with
    ``param_offload``.

    Args:
        name: Its name.
        workers: The group's workers in the order of their ranks.
        devices: Name of each rank's device.
        nbytes: Most bytes a call takes on each device.
        fence_folder: Where the device fences of every machine are.
    """

    def __init__(
        self, name: str, workers: Sequence[Any], devices: Sequence[str], nbytes: int, *, fence_folder: str
    ) -> None:
        self.name = name
        self._ranks = ranks_of(name, workers, devices)
        self._nbytes = nbytes
        self._folder = fence_folder
        self._kept = False

    @property
    def footprint(self) -> Mapping[str, int]:
        """Bytes a call takes on each rank's device."""
        return {device: self._nbytes for _, device in self._ranks}

    async def drain(self) -> None:
        """Wait for the calls the group has accepted; each takes its weights away when it ends."""
        await call_all(worker.__ray_call__.remote(worker_side.synchronise) for worker, _ in self._ranks)

    async def offload(self, permit: Permit) -> None:
        """Give the room up."""
        await seal(self._ranks, permit, self._folder)
        self._kept = False

    async def onload(self, permit: Permit) -> None:
        """Take the room, if the permit still stands."""
        await seal(self._ranks, permit, self._folder)
        self._kept = True

    async def resident_bytes(self) -> Mapping[str, int]:
        """The room kept; it is empty between two calls."""
        return dict.fromkeys(self.footprint, self._nbytes if self._kept else 0)

    async def resume(self) -> None:
        """Nothing to do."""


def servable(freed: frozenset[str], groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the stages that devices which became free can serve while others still work.

    Every engine forward all-reduces over its process group, so a stage runs only where all of its group's devices are
    free; on a part of them it would wait for the rest.

    Args:
        freed: Devices whose rollout replica sleeps.
        groups: Devices of each stage's process group.
    """
    return tuple(stage for stage, devices in groups.items() if devices and set(devices) <= freed)
