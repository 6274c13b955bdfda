"""The lock's books: leases, the queue, and who may enter next. Deadlines are the manager's business."""

from collections.abc import Mapping

from rlinf_plugins.core.errors import HoldAndWaitError, NotOwnerError, StaleTokenError
from rlinf_plugins.scheduler.lock.occupancy import Occupancy
from rlinf_plugins.scheduler.lock.records import Claim, Fairness, Held
from rlinf_plugins.scheduler.lock.types import Event, Granted, Lease, Revoked, Withdrawn


class LeaseTable:
    """Leases by owner and token, waiting claims by arrival, and what has happened to them.

    Args:
        capacity: Bytes of memory of each device, by name.
        fairness: When a waiting claim stops being overtaken.
        first_token: Smallest token to grant.
    """

    __slots__ = ("devices", "events", "fairness", "held", "next_arrival", "next_token", "open", "tokens", "waits")

    def __init__(self, capacity: Mapping[str, int], fairness: Fairness, first_token: int) -> None:
        self.devices = Occupancy(capacity)
        self.fairness = fairness
        self.next_token = first_token
        self.next_arrival = 1
        self.held: dict[str, Held] = {}
        self.tokens: dict[int, Held] = {}
        self.waits: dict[int, Claim] = {}
        self.events: list[Event] = []
        self.open = True

    def enter_again(self, held: Held, claim: Claim) -> Lease:
        """Count one more entry into a lease that covers ``claim``.

        Raises:
            HoldAndWaitError: It does not cover it.
        """
        lease = held.lease
        if claim.mask & ~held.mask or (lease.shared and (not claim.shared or claim.nbytes > lease.nbytes)):
            raise HoldAndWaitError(
                f"{lease.owner} holds {', '.join(sorted(lease.devices))} (token {lease.token}) and asks for more; "
                "release first and acquire the whole set at once"
            )
        held.count += 1
        return lease

    def may_enter(self, claim: Claim, now: float) -> bool:
        """Say whether a new claim can be granted at once; the waiting ones cannot be, or they would not wait."""
        if not self.open or not self.devices.fits(claim):
            return False
        return not self.waits or not claim.mask & self.fairness.reserved(self.waits.values(), now)

    def grant(self, claim: Claim, now: float) -> Lease:
        """Turn a claim that may enter into a lease."""
        lease = Lease(self.next_token, claim.owner, claim.session, claim.devices, claim.shared, claim.nbytes)
        self.next_token += 1
        self.install(lease, claim, now, 1)
        for wait in self.waits.values():
            if wait.arrival < claim.arrival and wait.mask & claim.mask:
                wait.bypassed += 1
        return lease

    def install(self, lease: Lease, claim: Claim, now: float, count: int) -> None:
        """Book a lease."""
        self.devices.take(claim)
        self.held[lease.owner] = self.tokens[lease.token] = Held(lease, claim, now, count)

    def drop(self, held: Held) -> None:
        """Take a lease off the books."""
        lease = held.lease
        del self.held[lease.owner], self.tokens[lease.token]
        self.devices.give(held.claim)

    def unheard_of(self, token: int) -> bool:
        """Say whether ``token`` may be of a lock before this one: not known here, and smaller than any to come."""
        return token not in self.tokens and token < self.next_token

    def owned(self, token: int, owner: str) -> Held:
        """Return the lease ``token`` of ``owner``.

        Raises:
            StaleTokenError: It has ended.
            NotOwnerError: It is somebody else's, or there never was one.
        """
        held = self.tokens.get(token)
        if held is not None and held.lease.owner == owner:
            return held
        if held is not None:
            raise NotOwnerError(f"{owner} cannot release lease {token}: it belongs to {held.lease.owner}")
        if token < self.next_token:
            raise StaleTokenError(f"lease {token} of {owner} has ended: released before, or its session went silent")
        raise NotOwnerError(f"{owner} cannot release lease {token}: no such lease was ever granted")

    def waits_already(self, owner: str) -> bool:
        """Say whether ``owner`` has a claim in the queue."""
        return any(wait.owner == owner for wait in self.waits.values())

    def serve(self, now: float) -> None:
        """Grant what can be granted, in order."""
        # One at a time: each grant may starve a claim that was overtaken by it, which then keeps its devices.
        while self.open and (claim := self._next_to_enter(now)) is not None:
            del self.waits[claim.arrival]
            self.events.append(Granted(claim.arrival, self.grant(claim, now)))

    def _next_to_enter(self, now: float) -> Claim | None:
        kept = 0
        for wait in self.fairness.order(self.waits.values(), now):
            if not wait.mask & kept and self.devices.fits(wait):
                return wait
            if self.fairness.starved(wait, now):
                kept |= wait.mask
        return None

    def revoke(self, held: Held, reason: str) -> None:
        """End a lease that was not released."""
        self.drop(held)
        self.events.append(Revoked(held.lease, reason))

    def withdraw(self, claim: Claim, reason: str) -> None:
        """Take a claim out of the queue."""
        del self.waits[claim.arrival]
        self.events.append(Withdrawn(claim.arrival, reason))

    def end_session(self, session: str, reason: str) -> None:
        """End all leases and claims of a session."""
        for held in [held for held in self.tokens.values() if held.lease.session == session]:
            self.revoke(held, reason)
        for wait in [wait for wait in self.waits.values() if wait.session == session]:
            self.withdraw(wait, reason)
