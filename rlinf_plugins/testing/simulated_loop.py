"""An event loop whose time is simulated: timers fire in order, at once, at exactly their times."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Waits for no timer: its clock jumps to the next one. Network and other processes stay in real time."""

    def __init__(self) -> None:
        self._now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return simulated seconds since the loop was made; serves as an injected clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self._now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("the simulation waits for something that no timer will bring")
        self._loop.advance(timeout)
        return []


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end in simulated time; as :func:`asyncio.run`."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
