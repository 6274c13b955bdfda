"""The device lock as workers see it: blocking or awaited, with heartbeats in the background."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import DeviceSetError, LockServiceError, LockTimeoutError
from rlinf_plugins.scheduler.lock.fence import Fence, Permit
from rlinf_plugins.scheduler.lock.manager import INF, PLAIN
from rlinf_plugins.scheduler.lock.ray_host import LockOptions
from rlinf_plugins.scheduler.lock.service import Held
from rlinf_plugins.scheduler.lock.session import Session
from rlinf_plugins.scheduler.lock.types import Lease, LockState, Priority


class DeviceLock:
    """One process's access to the cluster's device lock.

    Every method has an awaitable twin whose name starts with ``a``. An *owner* is one thread of control: threads or
    tasks of a process that lock independently of each other pass different ``owner`` names.

    Args:
        actor: Handle from :func:`~rlinf_plugins.scheduler.lock.ray_host.start_lock`.
        name: What this process is called in introspection, e.g. ``"rollout/0"``.
        fence: This machine's fence; each new lease is shown to it before it is returned, so that an earlier holder
            is refused from then on. None if the holder's devices are on other machines: then it is shown there.
        on_lost: Called from the heartbeat thread for each lease that the lock has taken away.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        *,
        fence: Fence | None = None,
        on_lost: Callable[[Lease], None] | None = None,
    ) -> None:
        self._actor = actor
        self._fence = fence
        options: LockOptions
        options, names = _get(actor.introduce.remote())
        self._bits = {name: 1 << index for index, name in enumerate(names)}
        self._sets: dict[frozenset[str], int] = {}
        self._ttl = options.ttl_s
        self._session = Session(name, options.ttl_s, self._beat, on_lost)

    @property
    def session(self) -> str:
        """Name under which this process's heartbeats run."""
        return self._session.id

    # --- blocking -----------------------------------------------------------------------------------------------

    def acquire(
        self,
        devices: Iterable[str],
        *,
        owner: str = "",
        shared: bool = False,
        nbytes: int = 0,
        priority: Priority = PLAIN,
        timeout_s: float = INF,
    ) -> Lease:
        """Acquire ``devices`` all at once; arguments as in :meth:`LockManager.acquire`.

        Raises:
            LockTimeoutError: They were not free in time; the message says who holds them.
            LockCancelledError: The request was withdrawn, or the lock took this process for dead.
            LockServiceError: The lock cannot be reached.
            NotFreedError: Another process is in the middle of a move on a device and does not finish.
            UnknownDeviceError, DeviceSetError, ExceedsCapacityError, HoldAndWaitError: The request is refused.
        """
        claim, sent, ref = self._ask(devices, owner, shared, nbytes, priority, timeout_s)
        try:
            token: int = _get(ref, None if timeout_s == INF else timeout_s + self._ttl)
        except (KeyboardInterrupt, LockServiceError):
            self._actor.withdraw.remote(claim.owner, self._session.entries(claim.owner))
            raise
        lease = self._enter(claim, token, sent)
        if self._fence is not None:
            try:
                self._fence.seal(_permit_of(lease))
            except BaseException:
                self.release(lease)
                raise
        return lease

    def release(self, lease: Lease) -> bool:
        """Leave ``lease`` once; True if its devices are free again.

        Raises:
            StaleTokenError: It had ended before.
            NotOwnerError: It belongs to somebody else.
            LockServiceError: The lock cannot be reached; the lease ends by itself within one TTL.
        """
        self._session.left(lease)
        freed: bool = _get(self._actor.release.remote(lease.token, lease.owner))
        return freed

    @contextmanager
    def hold(self, devices: Iterable[str], **options: Any) -> Iterator[Lease]:
        """Hold ``devices`` for the length of a block; options as in :meth:`acquire`."""
        lease = self.acquire(devices, **options)
        try:
            yield lease
        finally:
            self.release(lease)

    def state(self) -> LockState:
        """Return who holds what, who waits for what and why."""
        state: LockState = _get(self._actor.state.remote())
        return state

    # --- awaited ------------------------------------------------------------------------------------------------

    async def aacquire(
        self,
        devices: Iterable[str],
        *,
        owner: str = "",
        shared: bool = False,
        nbytes: int = 0,
        priority: Priority = PLAIN,
        timeout_s: float = INF,
    ) -> Lease:
        """As :meth:`acquire`. A cancelled wait leaves no trace in the queue."""
        claim, sent, ref = self._ask(devices, owner, shared, nbytes, priority, timeout_s)
        try:
            token: int = await _aget(ref, None if timeout_s == INF else timeout_s + self._ttl)
        except (asyncio.CancelledError, LockServiceError):
            self._actor.withdraw.remote(claim.owner, self._session.entries(claim.owner))
            raise
        lease = self._enter(claim, token, sent)
        if self._fence is not None:
            try:
                await asyncio.to_thread(self._fence.seal, _permit_of(lease))  # may wait for another process's move
            except BaseException:
                await self.arelease(lease)
                raise
        return lease

    async def arelease(self, lease: Lease) -> bool:
        """As :meth:`release`."""
        self._session.left(lease)
        freed: bool = await _aget(self._actor.release.remote(lease.token, lease.owner))
        return freed

    @asynccontextmanager
    async def ahold(self, devices: Iterable[str], **options: Any) -> AsyncIterator[Lease]:
        """As :meth:`hold`."""
        lease = await self.aacquire(devices, **options)
        try:
            yield lease
        finally:
            await self.arelease(lease)

    async def astate(self) -> LockState:
        """As :meth:`state`."""
        state: LockState = await _aget(self._actor.state.remote())
        return state

    # --- either -------------------------------------------------------------------------------------------------

    def permit(self, lease: Lease) -> Permit:
        """Return what a resource asks to see before it moves bytes; errors as in :meth:`Session.permit`."""
        return self._session.permit(lease)

    def reprioritise(self, owner: str, priority: Priority) -> None:
        """Give the waiting request of ``owner`` a new place in the queue; takes effect soon, not at once."""
        self._actor.reprioritise.remote(self._session.owner(owner), priority)

    def report_death(self, session: str, reason: str) -> None:
        """Tell the lock that another process is dead, so that it need not wait for the TTL.

        Only for a supervisor that knows: a process that is alive loses its leases by this.
        """
        _get(self._actor.end_session.remote(session, reason))

    def close(self) -> None:
        """Give up everything and stop the heartbeats."""
        self._session.close()
        with contextlib.suppress(LockServiceError):
            _get(self._actor.end_session.remote(self._session.id, "closed"), self._ttl)

    def _ask(
        self, devices: Iterable[str], owner: str, shared: bool, nbytes: int, priority: Priority, timeout_s: float
    ) -> tuple[Lease, float, Any]:
        """Send a request. Returns the lease it will be, without its token; the time of sending; the reply to come."""
        if nbytes and not shared:
            raise DeviceSetError("an exclusive claim has its devices to itself: nbytes is for shared claims")
        self._session.start()
        names = devices if isinstance(devices, frozenset) else frozenset(devices)
        claim = Lease(0, self._session.owner(owner), self._session.id, names, shared, nbytes)
        sent = monotonic()
        ref = self._actor.acquire.remote(
            claim.owner,
            claim.session,
            self._encoded(names),
            nbytes if shared else None,
            None if priority is PLAIN else priority,
            timeout_s,
        )
        return claim, sent, ref

    def _encoded(self, names: frozenset[str]) -> int | frozenset[str]:
        bits = self._sets.get(names)
        if bits is None:
            if not names or not names <= self._bits.keys():
                return names  # the lock's refusal says what is wrong with it
            bits = self._sets[names] = sum(self._bits[name] for name in names)
        return bits

    def _enter(self, claim: Lease, token: int, sent: float) -> Lease:
        # An inner entry has the token, and the devices, of the outer one.
        lease = self._session.held(token) or msgspec.structs.replace(claim, token=token)
        self._session.heard(sent)
        self._session.entered(lease)
        return lease

    def _beat(self, session: str, held: list[Held]) -> frozenset[int]:
        alive: frozenset[int] = _get(self._actor.beat.remote(session, held), self._ttl)
        return alive


def _permit_of(lease: Lease) -> Permit:
    return Permit(dict.fromkeys(lease.devices, lease.token), lease.owner)


def _get(ref: Any, timeout_s: float | None = None) -> Any:
    with _plain_errors(timeout_s):
        return ray.get(ref, timeout=timeout_s)


async def _aget(ref: Any, timeout_s: float | None = None) -> Any:
    with _plain_errors(timeout_s):
        return await asyncio.wait_for(ref, timeout_s)


@contextmanager
def _plain_errors(timeout_s: float | None) -> Iterator[None]:
    """Raise the lock's own error instead of Ray's wrapping, which carries the actor's traceback as its text."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise LockServiceError(f"the device lock's actor is gone: {error}") from error
    except LockTimeoutError:
        raise
    except (GetTimeoutError, TimeoutError) as error:
        raise LockServiceError(f"the device lock did not answer within {timeout_s:g} s") from error
