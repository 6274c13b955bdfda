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
from rlinf_plugins.core.errors import DeviceSetError, HoldAndWaitError, LockTimeoutError
from rlinf_plugins.scheduler.lock import introspect
from rlinf_plugins.scheduler.lock.records import Claim, Fairness
from rlinf_plugins.scheduler.lock.table import LeaseTable
from rlinf_plugins.scheduler.lock.types import Event, Lease, LockState, Priority, Ticket, TimedOut

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
        stall_s: If the lock was not driven for this long while sessions lived, it was suspended itself and could not
            hear their heartbeats, so all get a new time to live. It then asks to be driven twice as often as this.
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
        stall_s: float = INF,
    ) -> None:
        self._table = LeaseTable(capacity, Fairness(max_bypass=max_bypass, starvation_s=starvation_s), first_token)
        self._clock = clock
        self._ttl = ttl_s
        self._stall = stall_s
        self._swept = INF
        self._sessions: dict[str, float] = {}
        self._opens_at = clock() + recovery_s
        self._table.open = recovery_s <= 0
        self._wake = INF if self._table.open else self._opens_at

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
        table, now = self._table, self._sweep()
        if type(devices) is not frozenset:
            devices = frozenset(devices)
        mask = table.devices.mask_of(devices)
        if shared:
            table.devices.check_share(devices, nbytes)
        elif nbytes:
            raise DeviceSetError("an exclusive claim has its devices to itself: nbytes is for shared claims")
        session = session or owner
        self._beat(session, now)
        arrival, deadline = table.next_arrival, now + timeout_s
        claim = Claim(arrival, owner, session, devices, mask, shared, nbytes, priority, now, deadline)
        held = table.held.get(owner)
        if held is not None:
            return table.enter_again(held, claim)
        if table.waits_already(owner):
            raise HoldAndWaitError(f"{owner} already waits for devices; an owner waits for one set at a time")
        if table.may_enter(claim, now):
            return table.grant(claim, now)
        if timeout_s <= 0:
            raise LockTimeoutError(f"{owner} did not wait: {self._why(claim, now)}")
        table.next_arrival += 1
        table.waits[arrival] = claim
        self._wake = min(self._wake, deadline)
        return Ticket(arrival, owner)

    def release(self, token: int, owner: str) -> bool:
        """Leave a lease once.

        Returns:
            Whether the devices are free again; False while the owner is still in it from an outer entry.
            A restarted lock that has not heard of the lease yet has nothing to free, and takes it for free.

        Raises:
            StaleTokenError: The lease ended before, by release or because its session died.
            NotOwnerError: The lease is somebody else's, or there never was one.
        """
        table, now = self._table, self._sweep()
        if not table.open and table.unheard_of(token):
            return True  # the holder was faster than its next heartbeat
        held = table.owned(token, owner)
        held.count -= 1
        if held.count:
            return False
        table.drop(held)
        if table.waits:
            table.serve(now)
        return True

    def leave_to(self, owner: str, entries: int) -> None:
        """Undo the entries of ``owner`` beyond ``entries``: grants it never learnt of, because it stopped waiting."""
        now = self._sweep()
        held = self._table.held.get(owner)
        if held is not None and held.count > entries:
            held.count = entries
            if not entries:
                self._table.drop(held)
                self._table.serve(now)

    def revoke(self, token: int, reason: str) -> None:
        """End a lease without its owner; nothing happens if it has ended already."""
        now = self._sweep()
        if token in self._table.tokens:
            self._table.revoke(self._table.tokens[token], reason)
            self._table.serve(now)

    def renew(self, session: str) -> frozenset[int]:
        """Record a heartbeat and return the tokens of the session's leases; what is missing there has been lost."""
        self._beat(session, self._sweep())
        return frozenset(token for token, held in self._table.tokens.items() if held.lease.session == session)

    def end_session(self, session: str, reason: str) -> None:
        """Take a session for dead at once: its leases end and its requests leave the queue."""
        now = self._sweep()
        self._sessions.pop(session, None)
        self._table.end_session(session, reason)
        self._table.serve(now)

    def cancel(self, ticket: int, reason: str = "cancelled") -> bool:
        """Withdraw a waiting request. False if it does not wait any more: granted, timed out or withdrawn."""
        now = self._sweep()
        claim = self._table.waits.get(ticket)
        if claim is None:
            return False
        self._table.withdraw(claim, reason)
        self._table.serve(now)
        return True

    def reprioritise(self, owner: str, priority: Priority) -> bool:
        """Give the request of ``owner`` a new place in the queue. False if it does not wait."""
        for wait in self._table.waits.values():
            if wait.owner == owner:
                wait.priority = priority
                return True
        return False

    @property
    def recovering(self) -> bool:
        """Whether the lock still waits for holders from before its restart."""
        self._sweep()
        return not self._table.open

    def reassert(self, lease: Lease, count: int = 1) -> bool:
        """Let a holder from before a restart keep its lease. False if it came too late or its devices are taken."""
        table, now = self._table, self._sweep()
        if lease.token in table.tokens:
            return True
        mask = table.devices.mask_of(lease.devices)
        claim = Claim(0, lease.owner, lease.session, lease.devices, mask, lease.shared, lease.nbytes, PLAIN, now, INF)
        if table.open or lease.owner in table.held or not table.devices.fits(claim):
            return False
        table.next_token = max(table.next_token, lease.token + 1)
        table.install(lease, claim, now, count)
        self._beat(lease.session, now)
        return True

    def tick(self) -> None:
        """Act on deadlines that have passed. A host calls this at ``next_deadline``."""
        self._sweep()

    def now(self) -> float:
        """Time on the lock's clock."""
        return self._clock()

    def next_deadline(self) -> float | None:
        """Time at which ``tick`` is next needed, if ever."""
        return None if self._wake == INF else self._wake

    def drain_events(self) -> list[Event]:
        """Return what has happened to tickets and leases since the last call, oldest first."""
        events = self._table.events
        if events:
            self._table.events = []
        return events

    def state(self) -> LockState:
        """Return who holds what, who waits for what and why."""
        now = self._sweep()
        return introspect.describe(self._table, self._sessions, now, 0.0 if self._table.open else self._opens_at - now)

    # --- internals ----------------------------------------------------------------------------------------------

    def _beat(self, session: str, now: float) -> None:
        if not self._sessions:
            self._swept = now
            self._wake = min(self._wake, now + self._stall / 2)
        self._sessions[session] = deadline = now + self._ttl
        if deadline < self._wake:
            self._wake = deadline

    def _sweep(self) -> float:
        """Act on what is due and return the time."""
        now = self._clock()
        if now < self._wake:
            return now
        table = self._table
        if now - self._swept > self._stall:
            self._sessions = dict.fromkeys(self._sessions, now + self._ttl)
        if not table.open and now >= self._opens_at:
            table.open = True
        for session in [name for name, deadline in self._sessions.items() if deadline <= now]:
            del self._sessions[session]
            table.end_session(session, f"no heartbeat from {session} for {self._ttl:g} s")
        for wait in [wait for wait in table.waits.values() if wait.deadline <= now]:
            reason = self._why(wait, now)
            del table.waits[wait.arrival]
            table.events.append(TimedOut(wait.arrival, reason))
        table.serve(now)
        opens_at = INF if table.open else self._opens_at
        waits = (wait.deadline for wait in table.waits.values())
        self._swept = now if self._sessions else INF
        self._wake = min(opens_at, *waits, *self._sessions.values(), self._swept + self._stall / 2)
        return now

    def _why(self, claim: Claim, now: float) -> str:
        if not self._table.open:
            return f"the lock restarted and waits {self._opens_at - now:.3g} s more for earlier holders"
        return introspect.why(claim, self._table, now)
