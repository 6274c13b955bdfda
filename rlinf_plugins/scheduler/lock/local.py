"""The device lock within one process: the same rules, no actor and no heartbeats."""

from collections.abc import Iterable, Mapping

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import StaleTokenError
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_plugins.scheduler.lock.manager import INF, PLAIN, LockManager
from rlinf_plugins.scheduler.lock.service import LockService
from rlinf_plugins.scheduler.lock.types import Lease, LockState, Priority

_SESSION = "local"


class LocalLock:
    """What :class:`~rlinf_plugins.scheduler.lock.client.DeviceLock` is awaited for, on one event loop.

    Args:
        capacity: Bytes of memory of each device, by name.
        clock: Source of monotonic time.
        max_bypass: As in :class:`LockManager`.
        starvation_s: As in :class:`LockManager`.
    """

    def __init__(
        self,
        capacity: Mapping[str, int],
        *,
        clock: Clock = monotonic,
        max_bypass: int = 16,
        starvation_s: float = 60.0,
    ) -> None:
        manager = LockManager(capacity, clock=clock, ttl_s=INF, max_bypass=max_bypass, starvation_s=starvation_s)
        self._service = LockService(manager)
        self._live: set[int] = set()

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
        """Acquire ``devices`` all at once; as :meth:`LockManager.acquire`."""
        lease = await self._service.acquire(
            owner,
            devices,
            shared=shared,
            nbytes=nbytes,
            priority=priority,
            timeout_s=timeout_s,
            session=_SESSION,
        )
        self._live.add(lease.token)
        return lease

    async def arelease(self, lease: Lease) -> bool:
        """Leave ``lease`` once; as :meth:`LockManager.release`."""
        freed = self._service.release(lease.token, lease.owner)
        if freed:
            self._live.discard(lease.token)
        return freed

    def permit(self, lease: Lease) -> Permit:
        """Return what a resource asks to see before it moves bytes.

        Raises:
            StaleTokenError: The lease was released.
        """
        if lease.token not in self._live:
            raise StaleTokenError(f"{lease.owner} does not hold lease {lease.token} any more")
        return Permit(dict.fromkeys(lease.devices, lease.token), lease.owner)

    def reprioritise(self, owner: str, priority: Priority) -> None:
        """Give the waiting request of ``owner`` a new place in the queue."""
        self._service.reprioritise(owner, priority)

    async def astate(self) -> LockState:
        """Return who holds what, who waits for what and why."""
        return self._service.state()

    def close(self) -> None:
        """Refuse all who wait."""
        self._service.close()
