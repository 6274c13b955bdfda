"""Calls to a pool as coroutines: the event loop reads the workers' answers, no thread waits for them."""

import asyncio
import threading
from collections.abc import Callable

from rlinf_plugins.envs.crew import Crew
from rlinf_plugins.envs.slot import Call


class Coroutines:
    """Waits for calls in an event loop.

    Args:
        crew: Whose answers.
    """

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._reader: asyncio.AbstractEventLoop | None = None

    async def run(self, begin: Callable[[], Call]) -> Call:
        """Begin a call under the crew's lock and wait for its end; if cancelled, nobody waits for the answer."""
        loop = asyncio.get_running_loop()
        self._attach(loop)
        future: asyncio.Future[None] = loop.create_future()
        thread = threading.get_ident()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: Call) -> None:
            if threading.get_ident() == thread:
                settle()
            else:
                loop.call_soon_threadsafe(settle)

        with self._crew.lock:
            call = begin()
            if not call.done:
                call.callback = wake
        if not call.done:
            try:
                await future
            except asyncio.CancelledError:
                with self._crew.lock:
                    call.callback, call.abandoned = None, True
                raise
        return call

    def detach(self) -> None:
        """Have no event loop read answers any more."""
        if self._reader is not None and not self._reader.is_closed():
            self._reader.remove_reader(self._crew.fileno())
        self._reader = None

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._reader is not loop:
            self.detach()
            loop.add_reader(self._crew.fileno(), self._crew.pump, 0)
            self._reader = loop
