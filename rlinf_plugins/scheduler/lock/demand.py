"""Who needs which residents: running, waiting, and expected from the flow."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rlinf_plugins.scheduler.lock.types import Lease, Priority


@dataclass(slots=True, eq=False)
class Demand:
    """One use of residents, from its announcement to its end.

    Attributes:
        number: Order of arrival.
        owner: Name under which it holds the lock.
        names: The residents, each after those it builds on.
        devices: All of their devices.
        ready: Whether its inputs are there.
        urgency: Seconds of work on the longest path that waits behind it.
        rank: Its place in the order the flow was expected in; None if it was not expected.
        lease: The lock's lease once granted.
    """

    number: int
    owner: str
    names: tuple[str, ...]
    devices: frozenset[str]
    ready: bool
    urgency: float
    rank: int | None = None
    lease: Lease | None = None

    def priority(self, onload_s: float) -> Priority:
        """Place in the lock's queue, given the seconds its onload would take now.

        An expected use has the place it was expected in. Without that, urgency and onload are both seconds, so a
        resident that is on the devices goes before one that would have to come, unless more than its onload waits
        behind the latter.
        """
        if self.rank is not None:
            return Priority(ready=self.ready, urgency=-float(self.rank), resident=onload_s == 0)
        return Priority(ready=self.ready, urgency=self.urgency - onload_s, resident=onload_s == 0)


class Demands:
    """The uses of a switcher's residents."""

    def __init__(self) -> None:
        self._number = 0
        self._waiting: dict[int, Demand] = {}
        self._active: dict[int, Demand] = {}
        self._expected: list[tuple[int, str, str]] = []
        self._next_rank = 0
        self._changed: set[asyncio.Event] = set()

    def announce(
        self, names: Sequence[str], devices: frozenset[str], ready: bool, urgency: float, stage: str = ""
    ) -> Demand:
        """Add a use that begins to wait."""
        self._number += 1
        owner = f"{'+'.join(names)}#{self._number}"
        demand = Demand(self._number, owner, tuple(names), devices, ready, urgency)
        self._waiting[demand.number] = demand
        for name in names:
            found = next((entry for entry in self._expected if entry[1:] == (name, stage)), None)
            if found is not None:
                self._expected.remove(found)
                demand.rank = found[0]  # the last one is what was asked for; those before are what it builds on
        for event in self._changed:
            event.set()
        return demand

    async def expected_before(self, demand: Demand, rivals: Callable[[], Collection[str]]) -> None:
        """Wait until no use that is expected before ``demand`` is one of ``rivals()``; re-examined at every change."""
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while set(self.ahead_of(demand)) & set(rivals()):
                changed.clear()
                await changed.wait()
        finally:
            self._changed.discard(changed)

    def ahead_of(self, demand: Demand) -> list[str]:
        """Names expected before ``demand`` and not announced yet."""
        return [] if demand.rank is None else [name for rank, name, _ in self._expected if rank < demand.rank]

    def start(self, demand: Demand, lease: Lease) -> None:
        """Record that a use got its devices."""
        del self._waiting[demand.number]
        demand.lease = lease
        self._active[demand.number] = demand

    def end(self, demand: Demand) -> None:
        """Record that a use is over, or has given up waiting."""
        self._waiting.pop(demand.number, None)
        self._active.pop(demand.number, None)

    def expect(self, uses: Sequence[tuple[str, str]]) -> None:
        """Replace the expected uses, each a resident and the name of the stage that uses it."""
        self._expected = [(self._next_rank + index, name, stage) for index, (name, stage) in enumerate(uses)]
        self._next_rank += len(uses)
        for event in self._changed:
            event.set()

    @property
    def waiting(self) -> list[Demand]:
        """Uses that wait, in the order in which they will probably be served."""
        return sorted(self._waiting.values(), key=lambda d: (d.priority(0.0).key(), d.number))

    @property
    def expected(self) -> list[str]:
        """Residents whose uses are expected but not announced yet, next one first."""
        return [name for _, name, _ in self._expected]

    @property
    def future(self) -> list[str]:
        """Names in the order of their next uses."""
        return [name for demand in self.waiting for name in demand.names] + self.expected

    @property
    def in_use(self) -> set[str]:
        """Residents that are being used and must stay where they are."""
        return {name for demand in self._active.values() for name in demand.names}

    def lease_on(self, device: str) -> Lease | None:
        """The lease of a running use on ``device``, if any."""
        for demand in self._active.values():
            if device in demand.devices:
                return demand.lease
        return None
