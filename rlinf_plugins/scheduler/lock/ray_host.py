"""The device lock as a Ray actor, one per cluster."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import ray

from rlinf_plugins.scheduler.lock.manager import PLAIN, LockManager
from rlinf_plugins.scheduler.lock.service import Held, LockService
from rlinf_plugins.scheduler.lock.types import LockState, Priority

ACTOR_NAME = "rlinf-device-lock"
_STALL_FRACTION = 0.25
_CACHED_SETS = 4096


class LockOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a hosted lock behaves; meaning as in :class:`LockManager`."""

    ttl_s: float = 10.0
    max_bypass: int = 16
    starvation_s: float = 60.0


class LockActor:
    """What runs in the actor. Made by :func:`start_lock`.

    A restarted actor has forgotten its leases: for one ``ttl_s`` it grants nothing and lets holders come forward with
    their heartbeats. Tokens start at the wall clock in microseconds, so that they grow over restarts and over jobs.
    """

    def __init__(self, capacity: Mapping[str, int], options: LockOptions) -> None:
        restarted = ray.get_runtime_context().was_current_actor_reconstructed
        self._options = options
        self._names = tuple(capacity)
        self._sets: dict[int, frozenset[str]] = {}
        self._service = LockService(
            LockManager(
                capacity,
                ttl_s=options.ttl_s,
                max_bypass=options.max_bypass,
                starvation_s=options.starvation_s,
                first_token=time.time_ns() // 1000,
                recovery_s=options.ttl_s if restarted else 0.0,
                stall_s=options.ttl_s * _STALL_FRACTION,
            )
        )

    async def introduce(self) -> tuple[LockOptions, tuple[str, ...]]:
        """Return how the lock behaves and the devices in the order of their bits."""
        return self._options, self._names

    async def acquire(
        self,
        owner: str,
        session: str,
        devices: int | frozenset[str],
        shared_nbytes: int | None,
        priority: Priority | None,
        timeout_s: float,
    ) -> int:
        """See :meth:`LockService.acquire`. Everything is as small as it can be, since pickling is most of a call.

        Args:
            owner: Who asks.
            session: Whose heartbeats keep the claim alive.
            devices: A bit for each device, or names if some are not devices of this lock.
            shared_nbytes: Bytes of a shared claim; None for an exclusive one.
            priority: Place in the queue; None for the plain one.
            timeout_s: Longest wait.

        Returns:
            The lease's token; the rest the caller knows.
        """
        lease = await self._service.acquire(
            owner,
            devices if isinstance(devices, frozenset) else self._set_of(devices),
            shared=shared_nbytes is not None,
            nbytes=shared_nbytes or 0,
            priority=priority or PLAIN,
            timeout_s=timeout_s,
            session=session,
        )
        return lease.token

    def _set_of(self, bits: int) -> frozenset[str]:
        devices = self._sets.get(bits)
        if devices is None:
            devices = frozenset(name for index, name in enumerate(self._names) if bits >> index & 1)
            if len(self._sets) >= _CACHED_SETS:
                self._sets.clear()
            self._sets[bits] = devices
        return devices

    async def release(self, token: int, owner: str) -> bool:
        """See :meth:`LockService.release`."""
        return self._service.release(token, owner)

    async def beat(self, session: str, held: Iterable[Held]) -> frozenset[int]:
        """See :meth:`LockService.beat`."""
        return self._service.beat(session, held)

    async def withdraw(self, owner: str, entries: int) -> None:
        """See :meth:`LockService.withdraw`."""
        self._service.withdraw(owner, entries)

    async def end_session(self, session: str, reason: str) -> None:
        """See :meth:`LockService.end_session`."""
        self._service.end_session(session, reason)

    async def reprioritise(self, owner: str, priority: Priority) -> bool:
        """See :meth:`LockService.reprioritise`."""
        return self._service.reprioritise(owner, priority)

    async def state(self) -> LockState:
        """See :meth:`LockService.state`."""
        return self._service.state()


def start_lock(
    capacity: Mapping[str, int],
    *,
    options: LockOptions | None = None,
    name: str = ACTOR_NAME,
    namespace: str | None = None,
) -> Any:
    """Start the cluster's lock, or return the handle of the one that runs.

    Args:
        capacity: Bytes of memory of each device, by name; names are unique in the cluster, e.g. ``"node0/gpu:3"``.
        options: How the lock behaves.
        name: Name of the actor.
        namespace: Ray namespace; the current one if None.

    Returns:
        The actor's handle; give it to :class:`~rlinf_plugins.scheduler.lock.client.DeviceLock`.
    """
    LockManager(capacity)  # refuse a bad cluster here, not in an actor that restarts for ever
    actor = ray.remote(LockActor)
    return actor.options(
        name=name,
        namespace=namespace,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=100_000,
    ).remote(dict(capacity), options or LockOptions())
