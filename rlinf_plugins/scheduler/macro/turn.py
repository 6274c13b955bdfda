"""A worker's turn on its devices, as the worker sees it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turn:
    """Takes and gives back a worker's devices; both may be called again without effect.

    Args:
        enter: Blocks until the worker has its devices and is on them.
        leave: Gives them back.
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave
        self._blocks = 0
        self.held = False

    def take(self) -> None:
        """Have the devices."""
        if not self.held:
            self._enter()
            self.held = True

    def give(self) -> None:
        """Let others have them."""
        if self.held:
            self.held = False
            self._leave()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Have the devices for a block."""
        self.take()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self.give()

    def settle(self) -> None:
        """Be where the open blocks want it, after a wait during which the devices were given back."""
        if self._blocks:
            self.take()
        else:
            self.give()

    @contextmanager
    def work(self) -> Iterator[None]:
        """As :meth:`hold`, but the devices are kept at the end: the next batch may be there already."""
        self.take()
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
