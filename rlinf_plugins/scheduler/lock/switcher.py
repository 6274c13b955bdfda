"""The context switcher: brings to the devices what is needed there next, and takes off what costs least."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.spans import SpanRecorder
from rlinf_plugins.scheduler.lock.budget import DEFAULT_BYTES_PER_S, Budget, MoveCosts
from rlinf_plugins.scheduler.lock.demand import Demand, Demands
from rlinf_plugins.scheduler.lock.manager import INF
from rlinf_plugins.scheduler.lock.mover import Mover
from rlinf_plugins.scheduler.lock.prefetch import Prefetcher
from rlinf_plugins.scheduler.lock.registry import Registry
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.swaps import Swaps, SwitcherLock
from rlinf_plugins.scheduler.lock.types import Lease


class Switcher:
    """Shares devices among residents over time. One switcher governs the memory of its devices.

    Args:
        lock: The device lock.
        capacity: Bytes of each device that residents may occupy, by name.
        recorder: Takes a span ``"switch"`` per switch and one per step of it.
        clock: Source of monotonic time.
        used_bytes: Measures all bytes in use on a device, whoever's they are; see :class:`Mover`.
        bytes_per_s: Bandwidth assumed for a move that was not measured yet.
        patience_s: How long a resident may take to drain, and its bytes to be gone.
        slack: Bytes of a resident that may stay behind, or exceed its declared footprint.
        prefetch: Bring the next resident while the current one works, where memory allows.
        anticipation: How long a use that would displace one expected before it waits for that one to be asked for, as
            a multiple of the seconds of the moves this may save. 1 never wastes more than it could have saved.

    Attributes:
        budget: What is booked on each device.
        recorder: Where the spans are.
    """

    def __init__(
        self,
        lock: SwitcherLock,
        capacity: Mapping[str, int],
        *,
        recorder: SpanRecorder | None = None,
        clock: Clock = monotonic,
        used_bytes: Callable[[str], int] | None = None,
        bytes_per_s: float = DEFAULT_BYTES_PER_S,
        patience_s: float = 60.0,
        slack: int = 0,
        prefetch: bool = True,
        anticipation: float = 1.0,
    ) -> None:
        self.budget = Budget(capacity)
        self.recorder = recorder or SpanRecorder("switcher", clock)
        costs = MoveCosts(bytes_per_s)
        self._costs = costs
        self._lock = lock
        self._anticipation = anticipation
        self._registry = Registry()
        self._demands = Demands()
        self._mover = Mover(self.budget, costs, self.recorder, clock, used_bytes, patience_s, slack)
        self._swaps = Swaps(lock, self._registry, self._demands, self.budget, costs, self._mover, self.recorder, clock)
        self._prefetcher = Prefetcher(lock, self._registry, self._demands, self._mover, self._swaps, prefetch)

    async def add(self, resident: Resident, *, after: Sequence[str] = ()) -> None:
        """Take charge of ``resident``, wherever it is now.

        Args:
            resident: What to move.
            after: Residents it builds on: they come before it and leave after it (a KV cache after its weights).

        Raises:
            ConfigError: The name is taken, or the resident has no devices.
            UnknownNameError: ``after`` names a resident that was not added.
            UnknownDeviceError: It has a device the switcher does not.
            ExceedsCapacityError: It can never fit, or is on a device that is full.
        """
        self._registry.add(resident, after)
        try:
            self.check_plan({resident.name: [resident.name]})
            await self._mover.adopt(resident)
        except BaseException:
            self._registry.remove(resident.name)
            raise

    def check_plan(self, stages: Mapping[str, Sequence[str]]) -> None:
        """Refuse a plan with a stage whose residents can never be on their devices together.

        Args:
            stages: Residents each stage needs at the same time, by the stage's name.

        Raises:
            UnknownNameError: A resident was not added.
            ExceedsCapacityError: With the stage, the device and the numbers.
        """
        for stage, names in stages.items():
            needed = self._registry.with_bases(names)
            self.budget.check_fits(stage, {name: self._registry.footprint(name) for name in needed})

    def expect(self, uses: Iterable[str | tuple[str, str]]) -> None:
        """Say which uses the flow brings next, in order: residents, or pairs of a resident and its stage.

        Guides order, eviction and prefetch: uses are granted in this order as far as they are asked for. Replaces what
        was said before; a use that begins is taken off the list.

        Raises:
            UnknownNameError: A resident was not added.
        """
        pairs = [(use, "") if isinstance(use, str) else use for use in uses]
        for name, _ in pairs:
            self._registry.get(name)
        self._demands.expect(pairs)
        self._prefetcher.look()

    @asynccontextmanager
    async def use(
        self,
        *names: str,
        ready: bool = True,
        urgency: float = 0.0,
        shared: bool = False,
        timeout_s: float = INF,
        stage: str = "",
    ) -> AsyncIterator[Lease]:
        """Hold the residents' devices, with the residents on them, for the length of a block.

        At the end nothing is moved: a resident stays until somebody else needs the room.

        Args:
            names: Residents that are needed together; those they build on come too.
            ready: Whether the inputs of the work are there; one that is not lets the others go first.
            urgency: Seconds of work on the longest path of the flow that waits behind this use.
            shared: Let other shared users compute on the same devices, as far as all fit in memory together.
            timeout_s: Longest wait for the devices.
            stage: Which of the expected uses of the resident this is, if they were told apart.

        Raises:
            UnknownNameError: A resident was not added.
            ExceedsCapacityError: They can never be on their devices together.
            LockTimeoutError: The devices were not free in time.
            NotFreedError: Someone who had to leave did not.
            ResidentBytesError: A resident takes other than it declared.
        """
        needed = self._registry.with_bases(names)
        self.check_plan({"+".join(names): needed})
        demand = self._demands.announce(needed, self._registry.devices(needed), ready, urgency, stage)
        try:
            await self._anticipate(demand)
            lease = await self._acquire(demand, shared, timeout_s)
            try:
                self._demands.start(demand, lease)
                self._swaps.granted(lease)
                for name in needed:
                    reason = f"{demand.owner} runs next"
                    await self._swaps.bring(name, reason, lambda: self._demands.in_use, urgent=True)
                self._prefetcher.look()
                yield lease
            finally:
                self._demands.end(demand)
                await asyncio.sleep(0)  # whoever waited for this work's result can now queue for the devices
                await self._lock.arelease(lease)
        finally:
            self._demands.end(demand)
            self._prefetcher.look()

    def assume(self, name: str, move_s: float, *, for_good: bool = False) -> None:
        """Tell what an onload or offload of a resident takes, in seconds, before it was measured.

        Args:
            name: The resident.
            move_s: Seconds of one move.
            for_good: Do not learn from its moves: part of what they take would have to be done anyway.
        """
        resident = self._registry.get(name).name
        if for_good:
            self._costs.settle(resident, move_s)
        else:
            for move in ("onload", "offload"):
                self._costs.measured(move, resident, move_s)

    async def evict(self, name: str) -> None:
        """Take a resident off its devices now, with those that build on it.

        Raises:
            UnknownNameError: It was not added.
            ResidentStateError: It is being used.
            NotFreedError: It did not leave.
        """
        await self._swaps.send_off(self._registry.get(name).name, "asked to leave")

    def is_on(self, name: str) -> bool:
        """Whether a resident is on its devices."""
        return self._mover.is_on(self._registry.get(name).name)

    async def close(self) -> None:
        """Stop prefetching; residents stay where they are."""
        await self._prefetcher.close()
        self._swaps.close()

    async def _anticipate(self, demand: Demand) -> None:
        """Let a use go first that is expected before ``demand`` and would have to be brought back because of it."""
        displaced = self._swaps.displaced_by(demand.names, self._demands.ahead_of(demand))
        if not displaced:
            return
        saved = sum(self._swaps.seconds(move, name) for name in displaced for move in ("offload", "onload"))
        saved += sum(self._swaps.seconds("onload", name) for name in demand.names)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(saved * self._anticipation):
                await self._demands.expected_before(
                    demand, lambda: self._swaps.displaced_by(demand.names, self._demands.ahead_of(demand))
                )

    async def _acquire(self, demand: Demand, shared: bool, timeout_s: float) -> Lease:
        self._prefetcher.look()
        nbytes = 0
        if shared:
            footprints = [self._registry.footprint(name) for name in demand.names]
            nbytes = max(sum(footprint.get(device, 0) for footprint in footprints) for device in demand.devices)
        return await self._lock.aacquire(
            demand.devices,
            owner=demand.owner,
            shared=shared,
            nbytes=nbytes,
            priority=demand.priority(self._prefetcher.onload_s(demand)),
            timeout_s=timeout_s,
        )
