"""Hosts the lock's state machine on an asyncio loop: futures for waiting requests, one timer for the next deadline."""

import asyncio
from collections.abc import Callable, Iterable

from rlinf_plugins.core.errors import LockCancelledError, LockTimeoutError
from rlinf_plugins.scheduler.lock.manager import INF, PLAIN, LockManager
from rlinf_plugins.scheduler.lock.types import (
    Granted,
    Lease,
    LockState,
    Priority,
    Revoked,
    Ticket,
    TimedOut,
    Withdrawn,
)

Held = tuple[Lease, int]
"""A lease and how often its owner is in it."""


class LockService:
    """The lock as coroutines. All methods belong to one event loop.

    Args:
        manager: The state machine; nobody else may drive it.
        on_revoked: Called when a lease ends without a release.
    """

    def __init__(self, manager: LockManager, on_revoked: Callable[[Lease, str], None] | None = None) -> None:
        self._manager = manager
        self._on_revoked = on_revoked
        self._waiting: dict[int, asyncio.Future[Lease]] = {}
        self._tickets: dict[str, int] = {}
        self._came_forward: dict[int, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = INF

    async def acquire(
        self,
        owner: str,
        devices: Iterable[str],
        *,
        shared: bool = False,
        nbytes: int = 0,
        priority: Priority = PLAIN,
        timeout_s: float = INF,
        session: str = "",
    ) -> Lease:
        """Acquire ``devices`` all at once; arguments and refusals as in :meth:`LockManager.acquire`.

        Raises:
            LockTimeoutError: They were not free in time.
            LockCancelledError: The request was withdrawn, or its session died.
        """
        answer = self._manager.acquire(
            owner,
            devices,
            shared=shared,
            nbytes=nbytes,
            priority=priority,
            timeout_s=timeout_s,
            session=session,
        )
        self._settle()
        if isinstance(answer, Lease):
            return answer
        return await self._wait(answer)

    async def _wait(self, ticket: Ticket) -> Lease:
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._waiting[ticket.number] = future
        self._tickets[ticket.owner] = ticket.number
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result().token, ticket.owner)  # granted, but nobody is there to use it
            else:
                self._manager.cancel(ticket.number)
            raise
        finally:
            self._waiting.pop(ticket.number, None)
            self._tickets.pop(ticket.owner, None)
            self._settle()

    def release(self, token: int, owner: str) -> bool:
        """Leave a lease once; as :meth:`LockManager.release`."""
        try:
            return self._manager.release(token, owner)
        finally:
            self._settle()

    def beat(self, session: str, held: Iterable[Held]) -> frozenset[int]:
        """Record a heartbeat.

        Args:
            session: Who is alive.
            held: What it believes to hold. After a restart of the lock this is how earlier leases come forward.

        Returns:
            Tokens of the leases it does hold; what is missing has been lost.
        """
        held = list(held)
        believed = {lease.token for lease, _ in held}
        alive = self._manager.renew(session)
        # A lease that was released while its heartbeat was on the way would otherwise be revived by it for ever.
        for token in [t for t, owner in self._came_forward.items() if t in alive and t not in believed]:
            self._manager.revoke(token, "came forward after a restart, then was not held any more")
            del self._came_forward[token]
        for lease, count in held:
            if lease.token not in alive and self._manager.recovering and self._manager.reassert(lease, count):
                self._came_forward[lease.token] = lease.owner
        self._settle()
        return self._manager.renew(session)

    def withdraw(self, owner: str, entries: int) -> None:
        """Undo a request whose caller does not wait for it any more.

        Args:
            owner: Who asked.
            entries: How often it is in its lease as far as it knows; an entry beyond that is left again.
        """
        number = self._tickets.get(owner)
        if number is not None:
            self._manager.cancel(number)
        else:
            self._manager.leave_to(owner, entries)
        self._settle()

    def end_session(self, session: str, reason: str) -> None:
        """Take a session for dead at once; as :meth:`LockManager.end_session`."""
        self._manager.end_session(session, reason)
        self._settle()

    def reprioritise(self, owner: str, priority: Priority) -> bool:
        """Give a waiting request a new place; as :meth:`LockManager.reprioritise`."""
        return self._manager.reprioritise(owner, priority)

    def state(self) -> LockState:
        """Return who holds what, who waits for what and why."""
        state = self._manager.state()
        self._settle()
        return state

    def close(self) -> None:
        """Stop the timer and refuse all who wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LockCancelledError("the lock was closed"))

    # --- internals ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        for event in self._manager.drain_events():
            if isinstance(event, Revoked):
                if self._on_revoked is not None:
                    self._on_revoked(event.lease, event.reason)
                continue
            future = self._waiting.get(event.ticket)
            if future is None or future.done():
                if isinstance(event, Granted):  # its caller was cancelled in this very moment
                    self.release(event.lease.token, event.lease.owner)
                continue
            if isinstance(event, Granted):
                future.set_result(event.lease)
            elif isinstance(event, TimedOut):
                future.set_exception(LockTimeoutError(f"not granted in time: {event.reason}"))
            elif isinstance(event, Withdrawn):
                future.set_exception(LockCancelledError(f"request withdrawn: {event.reason}"))
        self._set_timer()

    def _set_timer(self) -> None:
        deadline = self._manager.next_deadline()
        # An earlier timer does no harm: it finds nothing to do and sets the next. So renewals cost no timers.
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer_at = deadline
        self._timer = loop.call_later(max(0.0, deadline - self._manager.now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._manager.tick()
        self._settle()
