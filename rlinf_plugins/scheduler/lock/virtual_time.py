"""An event loop whose time jumps to the next deadline, so that hours of waiting run in milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Reports what is ready and, where nothing is, lets the loop's time jump instead of waiting."""

    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no deadline is ahead")
        self.loop.now += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on simulated time. Not for code that waits for threads or sockets.

    Attributes:
        now: Simulated seconds; also the clock to inject: ``loop.time``.
    """

    now = 0.0

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the simulated time in seconds."""
        return self.now


def run(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    """Run ``main`` on simulated time and return its result and the seconds it took.

    Raises:
        RuntimeError: Every task waits and no deadline is ahead.
    """
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main), loop.now
    finally:
        loop.close()
