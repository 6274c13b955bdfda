"""The devices of a job, shared by its stages through the device lock and the context switcher.

veRL's ``sync`` puts every rollout replica to sleep after generation and wakes all of them after the update, whether the
memory was needed or not. Here the replicas and the engines are residents: whoever works next is brought to the
devices, and somebody leaves only where the room is short.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

from rlinf_plugins.core.spans import Span, SpanRecorder
from rlinf_plugins.scheduler.lock.blocking import BlockingSwitcher
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.swaps import SwitcherLock
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_verl.trainer.all_replicas import AllReplicas
from rlinf_verl.trainer.residents import WorkingRoom, servable
from rlinf_verl.trainer.sharing_metrics import switch_lines, switch_metrics

logger = logging.getLogger(__name__)

ROLLOUT = "rollout"
_TTL_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenants:
    """Who shares the devices of a job.

    Attributes:
        capacity: Bytes of each device, by name.
        rollout: The rollout replicas.
        engines: The engines by name: ``"actor"``, and ``"ref"`` and ``"critic"`` where they exist.
        rollout_leaves: Replicas cannot be told to stay beside a stage, so they leave after every generation.
        rollout_fixed: Replicas never give their memory back (``free_cache_engine=False``).
        replicas: Devices of each rollout replica, by name.
    """

    capacity: Mapping[str, int]
    rollout: AllReplicas
    engines: Mapping[str, Resident]
    rollout_leaves: bool = False
    rollout_fixed: bool = False
    replicas: Mapping[str, frozenset[str]] = field(default_factory=dict)


class Sharing:
    """Brings to the devices what a stage needs. Made once the engines exist and the replicas sleep.

    Args:
        tenants: Who shares the devices.
        lock: The device lock.

    Raises:
        ExceedsCapacityError: A stage, or the weight sync, can never run; with the numbers.
    """

    def __init__(self, tenants: Tenants, lock: SwitcherLock) -> None:
        self._tenants = tenants
        self._recorder = SpanRecorder("sharing")
        self._waited = 0.0
        # Replicas come back by a weight sync, which must not happen before the update: nothing is fetched ahead. And
        # stages are asked for in the order of the step, so none has to be waited for.
        switcher = Switcher(
            lock, _left_beside_fixed(tenants), recorder=self._recorder, prefetch=False, anticipation=0.0
        )

        async def make() -> Switcher:
            if not tenants.rollout_fixed:
                await switcher.add(tenants.rollout)
                switcher.assume(ROLLOUT, 0.0, for_good=True)  # its return is the weight sync that every step ends with
            for engine in tenants.engines.values():
                await switcher.add(engine)
            return switcher

        self._switcher = BlockingSwitcher(make)

    def __contains__(self, name: object) -> bool:
        """Whether there is an engine of this name."""
        return name in self._tenants.engines

    def begin_step(self, uses: Sequence[str]) -> None:
        """Say which residents the step needs, in order, so that whoever is needed last leaves first."""
        self._switcher.expect(self._moving(uses))

    @contextmanager
    def use(self, *names: str) -> Iterator[None]:
        """Hold the devices of residents, with them there, for a block. Blocks may overlap where all fit together."""
        moving = self._moving(names)
        if not moving:
            yield
            return
        start = time.monotonic()
        block = self._switcher.use(*moving, shared=True)
        block.__enter__()
        self._waited += time.monotonic() - start
        try:
            yield
        finally:
            start = time.monotonic()
            block.__exit__(None, None, None)
            self._waited += time.monotonic() - start

    def generated(self) -> None:
        """Note that generation is over."""
        if self._tenants.rollout_leaves:
            self.rollout_away()

    def rollout_away(self) -> None:
        """Take the replicas off the devices, for somebody the switcher does not know (a colocated reward model)."""
        if not self._tenants.rollout_fixed and self._switcher.is_on(ROLLOUT):
            self._switcher.evict(ROLLOUT)

    def sync_weights(self) -> None:
        """Bring the actor's weights to the replicas: in place if they are awake, by waking them if not."""
        awake = self._tenants.rollout_fixed or self._switcher.is_on(ROLLOUT)
        with self.use(ROLLOUT):
            if awake:
                with self._recorder.span("refresh", resident=ROLLOUT):
                    self._tenants.rollout.refresh()

    def fit_together(self, *names: str) -> bool:
        """Whether residents can be on their devices at the same time."""
        footprints = [
            self._tenants.rollout.footprint if name == ROLLOUT else self._tenants.engines[name].footprint
            for name in names
        ]
        return all(
            sum(footprint.get(device, 0) for footprint in footprints) <= nbytes
            for device, nbytes in self._tenants.capacity.items()
        )

    @property
    def waited_s(self) -> float:
        """Seconds that stages have waited for devices since :meth:`take_metrics` was last called."""
        return self._waited

    def take_metrics(self) -> dict[str, float]:
        """Return what happened since the last call as metrics, and log each switch."""
        spans: list[Span] = self._recorder.drain()
        for line in switch_lines(spans):
            logger.info("device sharing: %s", line)
        waited, self._waited = self._waited, 0.0
        return {**switch_metrics(spans), "sharing/waited_s": waited}

    def describe(self) -> str:
        """Say who takes how much of which device, and what the devices of one replica alone could serve."""
        everyone: dict[str, Resident] = {ROLLOUT: self._tenants.rollout, **self._tenants.engines}
        return (
            "; ".join(
                f"{device} has {nbytes} bytes, "
                + ", ".join(
                    f"{name} {who.footprint[device]}" for name, who in everyone.items() if device in who.footprint
                )
                for device, nbytes in self._tenants.capacity.items()
            )
            + self._served_by_one_replica()
        )

    def _served_by_one_replica(self) -> str:
        """A replica that has finished could hand its devices on, if the process group of some stage lies on them."""
        devices = frozenset(self._tenants.capacity)
        groups = {name: tuple(engine.footprint) for name, engine in self._tenants.engines.items()}
        parts = {name: on for name, on in self._tenants.replicas.items() if on < devices}
        found = {name: servable(on, groups) for name, on in parts.items()}
        if not parts:
            return ""
        if not any(found.values()):
            return "; no stage's process group lies on the devices of one replica, so all replicas leave together"
        return "".join(f"; the devices of {name} hold all of {', '.join(able)}" for name, able in found.items() if able)

    @property
    def saved_together(self) -> tuple[str, ...]:
        """Engines that must be there while a checkpoint is written: those that fetch themselves come one by one."""
        trained = {name: engine for name, engine in self._tenants.engines.items() if name != "ref"}
        rooms = [name for name, engine in trained.items() if isinstance(engine, WorkingRoom)]
        largest = max(rooms, key=lambda name: max(trained[name].footprint.values()), default=None)
        return tuple(name for name in trained if name not in rooms or name == largest)

    def close(self) -> None:
        """Stop; residents stay where they are."""
        self._switcher.close()

    def _moving(self, names: Iterable[str]) -> list[str]:
        known = {*self._tenants.engines, *([] if self._tenants.rollout_fixed else [ROLLOUT])}
        return [name for name in names if name in known]


def _left_beside_fixed(tenants: Tenants) -> dict[str, int]:
    fixed = tenants.rollout.footprint if tenants.rollout_fixed else {}
    return {device: nbytes - fixed.get(device, 0) for device, nbytes in tenants.capacity.items()}


def ray_lock(capacity: Mapping[str, int]) -> SwitcherLock:
    """Return the job's device lock, hosted in Ray so that other processes can take turns with the trainer."""
    from rlinf_plugins.scheduler.lock.client import DeviceLock
    from rlinf_plugins.scheduler.lock.ray_host import LockOptions, start_lock

    return DeviceLock(start_lock(capacity, options=LockOptions(ttl_s=_TTL_S)), "trainer")


def fence_folder() -> str:
    """Folder of the device fences, the same for all jobs of a Ray cluster: an earlier job's straggler is refused.

    Another cluster on the same machine has devices of its own, whose names may be the same.
    """
    import ray

    cluster = quote(ray.get_runtime_context().gcs_address, safe="")
    return f"/dev/shm/rlinf-fences-{os.getuid()}/{cluster}"
