"""All hybrid rollout replicas as one resident: what naive weight sync allows, since it wakes them together."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_verl.trainer import worker_side
from rlinf_verl.trainer.ranks import call_all, ranks_of, seal


class AllReplicas:
    """Every replica of a trainer's checkpoint manager, asleep or awake together.

    Waking them is veRL's weight sync, so they come back with the weights of ``global_steps()``. The sync reads the
    actor's engine, which fetches and drops its own weights for it (``param_offload``) or is on the devices as well.

    Args:
        name: Its name.
        manager: The trainer's ``CheckpointEngineManager``.
        workers: The actor group's workers in the order of their ranks; the replicas live on their devices.
        devices: Name of each rank's device.
        nbytes: Bytes that weights and cache take on each device.
        global_steps: Gives the version of the actor's weights.
        fence_folder: Where the device fences of every machine are.
        awake: Whether the replicas are awake when this is made.
        fetches_actor: The sync brings the actor's shard to its device (FSDP1, LoRA); it is put back where it was.
    """

    def __init__(
        self,
        name: str,
        manager: Any,
        workers: Sequence[Any],
        devices: Sequence[str],
        nbytes: int,
        global_steps: Callable[[], int],
        *,
        fence_folder: str,
        awake: bool = True,
        fetches_actor: bool = False,
    ) -> None:
        self.name = name
        self._manager = manager
        self._ranks = ranks_of(name, workers, devices)
        self._nbytes = nbytes
        self._global_steps = global_steps
        self._folder = fence_folder
        self._awake = awake
        self._fetches_actor = fetches_actor

    @property
    def footprint(self) -> Mapping[str, int]:
        """Bytes on each device."""
        return {device: self._nbytes for _, device in self._ranks}

    async def drain(self) -> None:
        """Nothing to do: veRL's servers let their requests end before they sleep, and a step's are over by then."""

    async def offload(self, permit: Permit) -> None:
        """``CheckpointEngineManager.sleep_replicas``."""
        await seal(self._ranks, permit, self._folder)
        # In a thread: veRL's decorator starts an event loop of its own where none runs.
        await asyncio.to_thread(self._manager.sleep_replicas)
        self._awake = False

    async def onload(self, permit: Permit) -> None:
        """``CheckpointEngineManager.update_weights``."""
        await seal(self._ranks, permit, self._folder)
        await asyncio.to_thread(self.refresh)
        if self._fetches_actor:
            await call_all(worker.__ray_call__.remote(worker_side.put_back, "actor") for worker, _ in self._ranks)
        self._awake = True

    def refresh(self) -> None:
        """Bring the actor's weights to replicas that are awake, or wake them with these."""
        self._manager.update_weights(self._global_steps())

    async def resident_bytes(self) -> Mapping[str, int]:
        """As declared: the replicas share their devices with the actor, whose bytes cannot be told from theirs."""
        return dict.fromkeys(self.footprint, self._nbytes if self._awake else 0)

    async def resume(self) -> None:
        """Nothing to do: they serve when they are awake."""
