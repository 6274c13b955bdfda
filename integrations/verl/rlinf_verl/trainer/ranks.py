"""A process group's workers and their devices, and calls to all of them."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_verl.trainer import worker_side

Ranks = list[tuple[Any, str]]
"""A worker's handle and the name of its device, by rank."""


def ranks_of(name: str, workers: Sequence[Any], devices: Sequence[str]) -> Ranks:
    """Pair the workers of ``name`` with their devices.

    Raises:
        ConfigError: There is not one device name per rank.
    """
    if len(workers) != len(devices):
        raise ConfigError(f"{name} has {len(workers)} workers and {len(devices)} devices; one name per rank is needed")
    return list(zip(workers, devices, strict=True))


async def seal(ranks: Ranks, permit: Permit, folder: str) -> None:
    """Show ``permit`` to the fence of every rank's device.

    Raises:
        StaleTokenError: One of them has seen a newer token.
    """
    await call_all(worker.__ray_call__.remote(worker_side.seal, permit, folder, device) for worker, device in ranks)


async def call_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Wait for all calls, then raise the first failure as it was raised; Ray wraps errors of its workers."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise getattr(result, "cause", None) or result
    return results
