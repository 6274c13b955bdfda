"""The devices of a flow: who is on them, and whose turn it is."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.switcher import Switcher

T = TypeVar("T")

UNLIMITED = 1 << 62
"""Capacity of a device whose memory nobody has limited, in bytes."""

Move = Callable[[bool, Permit], Awaitable[None]]
"""Brings a worker to its devices (True) or takes it off them, under a permit that their fence asks for."""


class WorkerResident:
    """A worker as a resident of the context switcher.

    Args:
        name: ``stage/rank``.
        footprint: Bytes on each of its devices.
        move: Moves it.
    """

    def __init__(self, name: str, footprint: Mapping[str, int], move: Move) -> None:
        self.name = name
        self.footprint = dict(footprint)
        self._move = move
        self._there = False

    async def drain(self) -> None:
        """Nothing to do: it is moved only while it does not have its devices, so while it does not work."""

    async def offload(self, permit: Permit) -> None:
        """Call the worker's ``offload``."""
        await self._move(False, permit)
        self._there = False

    async def onload(self, permit: Permit) -> None:
        """Call the worker's ``onload``."""
        await self._move(True, permit)
        self._there = True

    async def resident_bytes(self) -> Mapping[str, int]:
        """As declared."""
        return {device: nbytes if self._there else 0 for device, nbytes in self.footprint.items()}

    async def resume(self) -> None:
        """Nothing to do: it goes on when its turn has come."""


class DeviceHost:
    """The switcher of a flow's devices, on one event loop: a thread's here, an actor's in Ray.

    Args:
        capacity: Bytes of each device, by name.
    """

    def __init__(self, capacity: Mapping[str, int]) -> None:
        capacity = capacity or {"none": 1}  # a flow without devices has nobody to switch
        self._switcher = Switcher(LocalLock(capacity), capacity)
        self._turns: dict[str, AbstractAsyncContextManager[Any]] = {}

    async def add(self, resident: WorkerResident) -> None:
        """Take charge of a worker; errors as in :meth:`Switcher.add`."""
        await self._switcher.add(resident)

    async def enter(self, name: str) -> None:
        """Wait for a worker's turn and bring it to its devices."""
        turn = self._switcher.use(name)
        await turn.__aenter__()
        self._turns[name] = turn

    async def leave(self, name: str) -> None:
        """End a worker's turn; it stays on its devices until somebody needs the room."""
        await self._turns.pop(name).__aexit__(None, None, None)

    async def spans(self) -> list[Span]:
        """Switches since last asked."""
        return self._switcher.recorder.drain()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and return its result; callable from any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Stop the loop; what still waits on it is cancelled."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
