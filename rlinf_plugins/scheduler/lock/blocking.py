"""The context switcher for code without an event loop, such as a trainer's step."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rlinf_plugins.core.errors import ResidentStateError
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.types import Lease

T = TypeVar("T")


class BlockingSwitcher:
    """Runs a switcher on an event loop in a thread of its own. Its methods may be called from any other thread.

    Prefetches go on while the caller works.

    Args:
        make: Makes the switcher and adds its residents; awaited on the loop.

    Attributes:
        switcher: The switcher; only its ``budget`` and ``recorder`` are for other threads.
    """

    def __init__(self, make: Callable[[], Awaitable[Switcher]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="switcher", daemon=True)
        self._thread.start()
        try:
            self.switcher: Switcher = self._run(_awaited(make))
        except BaseException:
            self._stop()
            raise

    @contextmanager
    def use(self, *names: str, **options: Any) -> Iterator[Lease]:
        """Hold residents' devices, with them there, for the length of a block; as :meth:`Switcher.use`."""
        block = self.switcher.use(*names, **options)
        lease = self._run(_awaited(block.__aenter__))
        try:
            yield lease
        finally:
            self._run(_awaited(lambda: block.__aexit__(None, None, None)))

    def expect(self, uses: Iterable[str | tuple[str, str]]) -> None:
        """Say which uses come next; as :meth:`Switcher.expect`."""

        async def expect() -> None:
            self.switcher.expect(uses)

        self._run(expect())

    def evict(self, name: str) -> None:
        """Take a resident off its devices now; as :meth:`Switcher.evict`."""
        self._run(self.switcher.evict(name))

    def is_on(self, name: str) -> bool:
        """Whether a resident is on its devices."""
        return self.switcher.is_on(name)

    def close(self) -> None:
        """Stop prefetching and end the thread; residents stay where they are."""
        with contextlib.suppress(ResidentStateError):
            self._run(self.switcher.close())
        self._stop()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise ResidentStateError("the switcher was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()  # a wait for devices that nobody will use
            raise

    def _stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _awaited(make: Callable[[], Awaitable[T]]) -> T:
    return await make()
