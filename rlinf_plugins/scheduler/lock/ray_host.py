"""The device lock as a Ray actor, one per cluster."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import ray

from rlinf_plugins.scheduler.lock.manager import LockManager
from rlinf_plugins.scheduler.lock.service import Held, LockService
from rlinf_plugins.scheduler.lock.types import Lease, LockState, Priority

ACTOR_NAME = "rlinf-device-lock"
_STALL_FRACTION = 0.25


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

    async def options(self) -> LockOptions:
        """Return how the lock behaves."""
        return self._options

    async def acquire(
        self,
        owner: str,
        session: str,
        devices: frozenset[str],
        shared: bool,
        nbytes: int,
        priority: Priority,
        timeout_s: float,
    ) -> Lease:
        """See :meth:`LockService.acquire`."""
        return await self._service.acquire(
            owner,
            devices,
            shared=shared,
            nbytes=nbytes,
            priority=priority,
            timeout_s=timeout_s,
            session=session,
        )

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
