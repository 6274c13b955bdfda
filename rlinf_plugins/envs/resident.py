"""A pool of GPU simulators as a resident: what the context switcher moves off a device and brings back.

It satisfies the switcher's protocol by its shape alone; nothing of the scheduler is imported.
"""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rlinf_plugins.envs.pool import EnvPool
from rlinf_plugins.envs.slot import Status

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


class DeviceFence(Protocol):
    """What guards the devices of this machine: refuses a permit that is not valid any more."""

    def admit(self, permit: Any, devices: Iterable[str]) -> AbstractContextManager[None]:
        """Enter with ``permit``."""
        ...


class EnvPoolResident:
    """The processes of an :class:`EnvPool`. They leave by ending, after their episodes were saved, and come back anew.

    Args:
        name: Name, unique among the residents of a switcher.
        pool: The pool. Whoever steps it holds the resident's devices meanwhile.
        footprint: Most bytes its simulators take together on each device.
        fence: Guards the devices.
    """

    def __init__(self, name: str, pool: EnvPool, footprint: Mapping[str, int], fence: DeviceFence) -> None:
        self.name = name
        self.footprint: Mapping[str, int] = dict(footprint)
        self._pool = pool
        self._fence = fence

    async def drain(self) -> None:
        """Wait until no environment executes a command. Whoever sent it takes the answer in."""
        pause = _FIRST_PAUSE_S
        while self._any(lambda slot: slot.status is Status.BUSY):
            await asyncio.sleep(pause)  # answers are read by the thread that waits for them, which tells nobody else
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def offload(self, permit: Any) -> None:
        """:meth:`EnvPool.offload`, under the fence.

        Raises:
            StaleTokenError: The permit is not valid any more; nothing was ended.
            SnapshotError: A running episode cannot be saved; nothing was ended.
        """
        with self._fence.admit(permit, self.footprint):
            await asyncio.to_thread(self._pool.offload)

    async def onload(self, permit: Any) -> None:
        """:meth:`EnvPool.onload`, under the fence.

        Raises:
            StaleTokenError: The permit is not valid any more; nothing was started.
            EnvStartError: A process cannot be started again.
        """
        with self._fence.admit(permit, self.footprint):
            await asyncio.to_thread(self._pool.onload)

    async def resident_bytes(self) -> Mapping[str, int]:
        """What was declared while a process lives: a driver frees a simulator's memory when its process is gone."""
        alive = self._any(lambda slot: slot.worker is not None)
        return dict.fromkeys(self.footprint, 0) if not alive else self.footprint

    async def resume(self) -> None:
        """Nothing to do: episodes go on with their next step."""

    def _any(self, condition: Any) -> bool:
        crew = self._pool._desk.crew
        with crew.lock:
            return any(condition(slot) for slot in crew.slots)
