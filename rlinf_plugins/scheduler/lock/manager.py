"""The device lock's state machine. It has no clock, thread or transport: a host drives it and sends its events.

Rules it keeps, whatever the order of calls:

* a set of devices is granted at once or not at all, and an owner that holds or awaits devices may not wait for others,
  so that no cycle of waits can form;
* exclusive leases on a device never overlap in time; shared ones only while their bytes fit its memory;
* every grant carries a larger fencing token than the one before;
* a session (a process, usually) that misses its heartbeats for ``ttl_s`` loses its leases and its place in the queue;
* a request is overtaken at most ``max_bypass`` times, and not at all once it has waited ``starvation_s``; it then waits
  only for those who already hold its devices and for starved requests older than itself.
"""

from collections.abc import Iterable, Mapping

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import (
    DeviceSetError,
    HoldAndWaitError,
    LockTimeoutError,
    NotOwnerError,
    StaleTokenError,
)
from rlinf_plugins.scheduler.lock import introspect
from rlinf_plugins.scheduler.lock.occupancy import Occupancy
from rlinf_plugins.scheduler.lock.records import Claim, Fairness, Held
from rlinf_plugins.scheduler.lock.types import (
    Event,
    Granted,
    Lease,
    LockState,
    Priority,
    Revoked,
    Ticket,
    TimedOut,
    Withdrawn,
)

PLAIN = Priority()
INF = float("inf")


class LockManager:
    """Grants leases on sets of devices.

    Args:
        capacity: Bytes of memory of each device, by name.
        clock: Monotonic time in seconds.
        ttl_s: Seconds after its last heartbeat at which a session is taken for dead.
        max_bypass: How many later grants of the same devices a request lets pass.
        starvation_s: Seconds after which a request lets none pass.
        first_token: Smallest token to grant; a restarted lock starts above its predecessor's.
        recovery_s: Seconds, from now, in which nothing is granted and earlier holders may come forward.
    """

    def __init__(
        self,
        capacity: Mapping[str, int],
        *,
        clock: Clock = monotonic,
        ttl_s: float = 10.0,
        max_bypass: int = 16,
        starvation_s: float = 60.0,
        first_token: int = 1,
        recovery_s: float = 0.0,
    ) -> None:
        self._devices = Occupancy(capacity)
        self._clock = clock
        self._ttl = ttl_s
        self._fairness = Fairness(max_bypass=max_bypass, starvation_s=starvation_s)
        self._next_token = first_token
        self._next_arrival = 1
        self._recovered_at = clock() + recovery_s
        self._recovering = recovery_s > 0
        self._sessions: dict[str, float] = {}
        self._held: dict[str, Held] = {}
        self._tokens: dict[int, Held] = {}
        self._waits: dict[int, Claim] = {}
        self._events: list[Event] = []
        self._wake = self._recovered_at if recovery_s > 0 else INF

    def acquire(
        self,
        owner: str,
        devices: Iterable[str],
        *,
        shared: bool = False,
        nbytes: int = 0,
        priority: Priority = PLAIN,
        timeout_s: float = INF,
        session: str = "",
    ) -> Lease | Ticket:
        """Ask for ``devices``, all at once.

        Args:
            owner: Who asks: one thread of control, unique in the cluster. It may enter a lease it holds again, for
                the same devices or some of them; each entry needs its own release.
            devices: Names of devices.
            shared: Allow others on the devices as long as everybody's bytes fit.
            nbytes: Bytes a shared claim takes on each device.
            priority: Place in the queue.
            timeout_s: Longest wait; infinite as long as the session lives, 0 does not wait.
            session: Whose heartbeats keep the claim alive; the owner's own if empty. Asking counts as a heartbeat.

        Returns:
            The lease if it could be granted now, else a ticket that a later event refers to.

        Raises:
            UnknownDeviceError: A device is not in the cluster.
            DeviceSetError: The set is empty, or a shared claim gives no bytes.
            ExceedsCapacityError: A shared claim is larger than a device.
            HoldAndWaitError: The owner holds or awaits other devices already.
            LockTimeoutError: ``timeout_s`` is 0 and the devices are taken.
        """
        now = self._clock()
        if now >= self._wake:
            self._sweep(now)
        if type(devices) is not frozenset:
            devices = frozenset(devices)
        mask = self._devices.mask_of(devices)
        if shared:
            self._devices.check_share(devices, nbytes)
        elif nbytes:
            raise DeviceSetError("an exclusive claim has its devices to itself: nbytes is for shared claims")
        session = session or owner
        self._beat(session, now)
        claim = Claim(self._next_arrival, owner, session, devices, mask, shared, nbytes, priority, now, now + timeout_s)
        held = self._held.get(owner)
        if held is not None:
            return self._enter_again(held, claim)
        if any(wait.owner == owner for wait in self._waits.values()):
            raise HoldAndWaitError(f"{owner} already waits for devices; an owner waits for one set at a time")
        if self._may_enter(claim, now):
            return self._grant(claim, now)
        if timeout_s <= 0:
            raise LockTimeoutError(f"{owner} did not wait: {self._why(claim, now)}")
        self._next_arrival += 1
        self._waits[claim.arrival] = claim
        self._wake = min(self._wake, claim.deadline)
        return Ticket(claim.arrival, owner)

    def release(self, token: int, owner: str) -> bool:
        """Leave a lease once.

        Returns:
            Whether the devices are free again; False while the owner is still in it from an outer entry.

        Raises:
            StaleTokenError: The lease ended before, by release or because its session died.
            NotOwnerError: The lease is somebody else's, or there never was one.
        """
        now = self._clock()
        if now >= self._wake:
            self._sweep(now)
        held = self._owned(token, owner)
        held.count -= 1
        if held.count:
            return False
        self._drop(held)
        if self._waits:
            self._serve(now)
        return True

    def renew(self, session: str) -> frozenset[int]:
        """Record a heartbeat and return the tokens of the session's leases; what is missing there has been lost."""
        now = self._clock()
        if now >= self._wake:
            self._sweep(now)
        self._beat(session, now)
        return frozenset(token for token, held in self._tokens.items() if held.lease.session == session)

    def end_session(self, session: str, reason: str) -> None:
        """Take a session for dead at once: its leases end and its requests leave the queue."""
        now = self._clock()
        self._sweep(now)
        self._sessions.pop(session, None)
        self._end(session, reason)
        self._serve(now)

    def cancel(self, ticket: int, reason: str = "cancelled") -> bool:
        """Withdraw a waiting request. False if it does not wait any more: granted, timed out or withdrawn."""
        now = self._clock()
        self._sweep(now)
        wait = self._waits.pop(ticket, None)
        if wait is None:
            return False
        self._events.append(Withdrawn(wait.arrival, reason))
        self._serve(now)
        return True

    def reprioritise(self, owner: str, priority: Priority) -> bool:
        """Give the request of ``owner`` a new place in the queue. False if it does not wait."""
        for wait in self._waits.values():
            if wait.owner == owner:
                wait.priority = priority
                return True
        return False

    def reassert(self, lease: Lease, count: int = 1) -> None:
        """Let a holder from before a restart keep its lease; only while recovering.

        Raises:
            StaleTokenError: The time for it is over, or the devices are taken.
        """
        now = self._clock()
        self._sweep(now)
        if lease.token in self._tokens:
            self._beat(lease.session, now)
            return
        if not self._recovering:
            raise StaleTokenError(f"lease {lease.token} of {lease.owner} was not renewed in time after a restart")
        mask = self._devices.mask_of(lease.devices)
        claim = Claim(0, lease.owner, lease.session, lease.devices, mask, lease.shared, lease.nbytes, PLAIN, now, INF)
        if lease.owner in self._held or not self._devices.fits(claim):
            raise StaleTokenError(f"lease {lease.token} of {lease.owner}: its devices were claimed by another holder")
        self._next_token = max(self._next_token, lease.token + 1)
        self._beat(lease.session, now)
        self._install(lease, claim, now, count)

    def tick(self) -> None:
        """Act on deadlines that have passed. A host calls this at ``next_deadline``."""
        self._sweep(self._clock())

    def next_deadline(self) -> float | None:
        """Time at which ``tick`` is next needed, if ever."""
        return None if self._wake == INF else self._wake

    def drain_events(self) -> list[Event]:
        """Return what has happened to tickets and leases since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def state(self) -> LockState:
        """Return who holds what, who waits for what and why."""
        now = self._clock()
        self._sweep(now)
        recovering_s = self._recovered_at - now if self._recovering else 0.0
        return introspect.describe(
            self._devices,
            self._tokens.values(),
            self._waits.values(),
            self._sessions,
            self._fairness,
            now,
            recovering_s,
        )

    # --- internals ----------------------------------------------------------------------------------------------

    def _enter_again(self, held: Held, claim: Claim) -> Lease:
        lease = held.lease
        if claim.mask & ~held.mask or (lease.shared and (not claim.shared or claim.nbytes > lease.nbytes)):
            raise HoldAndWaitError(
                f"{lease.owner} holds {', '.join(sorted(lease.devices))} (token {lease.token}) and asks for more; "
                "release first and acquire the whole set at once"
            )
        held.count += 1
        return lease

    def _may_enter(self, claim: Claim, now: float) -> bool:
        if self._recovering or not self._devices.fits(claim):
            return False
        return not self._waits or not claim.mask & self._fairness.reserved(self._waits.values(), now)

    def _grant(self, claim: Claim, now: float) -> Lease:
        lease = Lease(self._next_token, claim.owner, claim.session, claim.devices, claim.shared, claim.nbytes)
        self._next_token += 1
        self._install(lease, claim, now)
        for wait in self._waits.values():
            if wait.arrival < claim.arrival and wait.mask & claim.mask:
                wait.bypassed += 1
        return lease

    def _install(self, lease: Lease, claim: Claim, now: float, count: int = 1) -> None:
        self._devices.take(claim)
        self._held[lease.owner] = self._tokens[lease.token] = Held(lease, claim, now, count)

    def _drop(self, held: Held) -> None:
        lease = held.lease
        del self._held[lease.owner], self._tokens[lease.token]
        self._devices.give(held.claim)

    def _owned(self, token: int, owner: str) -> Held:
        held = self._tokens.get(token)
        if held is not None and held.lease.owner == owner:
            return held
        if held is not None:
            raise NotOwnerError(f"{owner} cannot release lease {token}: it belongs to {held.lease.owner}")
        if token < self._next_token:
            raise StaleTokenError(
                f"lease {token} of {owner} has ended: released before, or its session missed its beats"
            )
        raise NotOwnerError(f"{owner} cannot release lease {token}: no such lease was ever granted")

    def _serve(self, now: float) -> None:
        # One grant at a time: each may starve a request that was overtaken by it, which then keeps its devices.
        while not self._recovering and (claim := self._next_to_enter(now)) is not None:
            del self._waits[claim.arrival]
            self._events.append(Granted(claim.arrival, self._grant(claim, now)))

    def _next_to_enter(self, now: float) -> Claim | None:
        kept = 0
        for wait in self._fairness.order(self._waits.values(), now):
            if not wait.mask & kept and self._devices.fits(wait):
                return wait
            if self._fairness.starved(wait, now):
                kept |= wait.mask
        return None

    def _beat(self, session: str, now: float) -> None:
        self._sessions[session] = deadline = now + self._ttl
        if deadline < self._wake:
            self._wake = deadline

    def _sweep(self, now: float) -> None:
        if now < self._wake:
            return
        if self._recovering and now >= self._recovered_at:
            self._recovering = False
        for session in [name for name, deadline in self._sessions.items() if deadline <= now]:
            del self._sessions[session]
            self._end(session, f"no heartbeat from {session} for {self._ttl:g} s")
        for wait in [w for w in self._waits.values() if w.deadline <= now]:
            reason = self._why(wait, now)
            del self._waits[wait.arrival]
            self._events.append(TimedOut(wait.arrival, reason))
        self._serve(now)
        recovered_at = self._recovered_at if self._recovering else INF
        deadlines = (wait.deadline for wait in self._waits.values())
        self._wake = min(recovered_at, *deadlines, *self._sessions.values(), INF)

    def _end(self, session: str, reason: str) -> None:
        for held in [held for held in self._tokens.values() if held.lease.session == session]:
            self._drop(held)
            self._events.append(Revoked(held.lease, reason))
        for wait in [wait for wait in self._waits.values() if wait.session == session]:
            del self._waits[wait.arrival]
            self._events.append(Withdrawn(wait.arrival, reason))

    def _why(self, wait: Claim, now: float) -> str:
        if self._recovering:
            return f"the lock restarted and waits {self._recovered_at - now:.3g} s more for earlier holders"
        return introspect.why(wait, self._devices, self._tokens.values(), self._waits.values(), self._fairness, now)
