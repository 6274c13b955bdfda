"""Finds a good order for the uses of a flow by playing it, switches and all, on virtual devices and simulated time.

What is played is the switcher itself, so there is no second model of it that could disagree.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlinf_plugins.core.errors import FlowError
from rlinf_plugins.scheduler.lock.fence import MemoryFence
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident
from rlinf_plugins.scheduler.lock.virtual_time import run


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedUse:
    """One stage of a flow, as far as the devices are concerned.

    Attributes:
        stage: Its name; what :meth:`Switcher.use` is given as ``stage``.
        resident: What it needs on the devices.
        seconds: How long it works there.
        after: Stages that must be over before.
    """

    stage: str
    resident: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedResident:
    """A resident as the rehearsal needs it.

    Attributes:
        footprint: Bytes on each device.
        move_s: Seconds of an onload or offload.
    """

    footprint: Mapping[str, int]
    move_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """An order and what it would cost.

    Attributes:
        order: Pairs of resident and stage, for :meth:`Switcher.expect`.
        seconds: Makespan, switches included.
        plays: How many orders were tried.
    """

    order: tuple[tuple[str, str], ...]
    seconds: float
    plays: int


class Rehearsal:
    """A flow on virtual devices.

    Args:
        capacity: Bytes of each device.
        residents: The residents, by name.
        uses: The flow, in any order.

    Raises:
        FlowError: A use waits for a stage that is not there, for itself, or in a circle.
    """

    def __init__(
        self, capacity: Mapping[str, int], residents: Mapping[str, PlannedResident], uses: Sequence[PlannedUse]
    ) -> None:
        self._capacity = dict(capacity)
        self._residents = dict(residents)
        self._uses = {use.stage: use for use in uses}
        self._tails = _tails(self._uses)

    def play(self, order: Sequence[str]) -> float:
        """Return the makespan in seconds when uses are expected in ``order`` (names of stages)."""
        seconds: list[float] = []
        # In a thread of its own: the caller's may be inside an event loop.
        thread = threading.Thread(target=lambda: seconds.append(run(self._play(order))[1]))
        thread.start()
        thread.join()
        return seconds[0]

    def best(self, plays: int = 200) -> Rehearsed:
        """Search for the order with the shortest makespan: two greedy ones, then moves of one use at a time.

        Args:
            plays: Most orders to try.
        """
        tried: dict[tuple[str, ...], float] = {}

        def cost(order: tuple[str, ...]) -> float:
            if order not in tried:
                tried[order] = self.play(order)
            return tried[order]

        best = min(self._greedy(stay=False), self._greedy(stay=True), key=cost)
        improved = True
        while improved and len(tried) < plays:
            improved = False
            for other in self._neighbours(best):
                if len(tried) >= plays:
                    break
                if cost(other) < cost(best) - 1e-9:
                    best, improved = other, True
                    break
        order = tuple((self._uses[stage].resident, stage) for stage in best)
        return Rehearsed(order=order, seconds=cost(best), plays=len(tried))

    async def _play(self, order: Sequence[str]) -> None:
        clock = asyncio.get_running_loop().time
        devices, fence = VirtualDevices(self._capacity), MemoryFence(clock)
        switcher = Switcher(LocalLock(self._capacity, clock=clock), self._capacity, clock=clock)
        for name, planned in self._residents.items():
            bytes_per_s = max(planned.footprint.values()) / max(planned.move_s, 1e-9)
            await switcher.add(VirtualResident(name, planned.footprint, devices, fence, bytes_per_s=bytes_per_s))
            switcher.assume(name, planned.move_s)
        over = {stage: asyncio.Event() for stage in self._uses}

        async def do(use: PlannedUse) -> None:
            for stage in use.after:
                await over[stage].wait()
            async with switcher.use(use.resident, stage=use.stage):
                await asyncio.sleep(use.seconds)
                over[use.stage].set()

        switcher.expect([(self._uses[stage].resident, stage) for stage in order])
        await asyncio.gather(*(do(self._uses[stage]) for stage in order))
        await switcher.close()

    def _greedy(self, stay: bool) -> tuple[str, ...]:
        """Longest path first; with ``stay``, the last resident's further uses before anybody else's."""
        order: list[str] = []
        while len(order) < len(self._uses):
            ready = [s for s, use in self._uses.items() if s not in order and set(use.after) <= set(order)]
            last = self._uses[order[-1]].resident if order else ""
            order.append(max(ready, key=lambda s: (stay and self._uses[s].resident == last, self._tails[s], s)))
        return tuple(order)

    def _neighbours(self, order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for start in range(len(order)):
            for end in range(len(order)):
                moved = [*order[:start], *order[start + 1 :]]
                moved.insert(end, order[start])
                if end != start and self._allowed(moved):
                    yield tuple(moved)

    def _allowed(self, order: Sequence[str]) -> bool:
        position = {stage: index for index, stage in enumerate(order)}
        return all(position[before] < position[s] for s, use in self._uses.items() for before in use.after)


def _tails(uses: Mapping[str, PlannedUse]) -> dict[str, float]:
    """Seconds from each use's start to the end of the flow along its longest path, moves left out."""
    for use in uses.values():
        for stage in use.after:
            if stage not in uses:
                raise FlowError(f"stage {use.stage!r} comes after {stage!r}, which is not in the flow")
    tails: dict[str, float] = {}
    while len(tails) < len(uses):
        known = [s for s in uses if s not in tails and all(b in tails for b, u in uses.items() if s in u.after)]
        if not known:
            raise FlowError(f"stages {', '.join(sorted(set(uses) - set(tails)))} wait for each other in a circle")
        for stage in known:
            behind = [tails[other] for other, use in uses.items() if stage in use.after]
            tails[stage] = uses[stage].seconds + max(behind, default=0.0)
    return tails
