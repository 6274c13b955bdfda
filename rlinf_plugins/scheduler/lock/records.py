"""What the lock manager remembers of a lease and of a waiting request; mutable, never leaves the manager."""

from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_plugins.scheduler.lock.types import Lease, Priority


@dataclass(slots=True, eq=False)
class Claim:
    """What an owner asks for. ``arrival`` grows with the requests; ``mask`` is ``devices`` as bits."""

    arrival: int
    owner: str
    session: str
    devices: frozenset[str]
    mask: int
    shared: bool
    nbytes: int
    priority: Priority
    since: float
    deadline: float
    bypassed: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """A lease and how many times its owner has entered it."""

    lease: Lease
    claim: Claim
    since: float
    count: int

    @property
    def mask(self) -> int:
        """The lease's devices as bits."""
        return self.claim.mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Fairness:
    """When a waiting request stops being overtaken.

    Attributes:
        max_bypass: Grants of later requests for some of the same devices that a request lets pass.
        starvation_s: Seconds after which it lets none pass, whatever the count.
    """

    max_bypass: int
    starvation_s: float

    def starved(self, wait: Claim, now: float) -> bool:
        """Say whether nobody may overtake ``wait`` any more."""
        return wait.bypassed >= self.max_bypass or now - wait.since >= self.starvation_s

    def order(self, waits: Iterable[Claim], now: float) -> list[Claim]:
        """Return the requests in the order in which they are to be served: the starved by age, then by priority."""

        def key(wait: Claim) -> tuple[bool, tuple[bool, float, bool], int]:
            if self.starved(wait, now):
                return (False, (False, 0.0, False), wait.arrival)
            return (True, wait.priority.key(), wait.arrival)

        return sorted(waits, key=key)

    def reserved(self, waits: Iterable[Claim], now: float) -> int:
        """Return the mask of the devices kept free for starved requests."""
        mask = 0
        for wait in waits:
            if self.starved(wait, now):
                mask |= wait.mask
        return mask
