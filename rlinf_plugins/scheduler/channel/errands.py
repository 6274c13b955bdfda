"""What consumers want of producers that hold tensors: passed on by the broker, which never touches the tensors."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple


class Errand(NamedTuple):
    """A tensor to hand over.

    Attributes:
        number: Of the errand.
        tensor: Number under which the producer holds it.
        way: How the consumer wants it.
        place: Where to meet the consumer; empty where the answer is all it needs.
    """

    number: int
    tensor: int
    way: str
    place: tuple[Any, ...]


class Errands:
    """Errands by the handle of the producer that has to do them; belongs to the broker's loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._errands: dict[int, list[Errand]] = defaultdict(list)
        self._drops: dict[int, list[int]] = defaultdict(list)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._idle: dict[int, asyncio.Future[None]] = {}

    async def collect(self, handle: int) -> tuple[list[Errand], list[int]]:
        """Wait for something to do for a producer: errands, and numbers of tensors nobody needs any more."""
        if handle not in self._errands and handle not in self._drops:
            idle = self._idle[handle] = asyncio.get_running_loop().create_future()
            await idle
        return self._errands.pop(handle, []), self._drops.pop(handle, [])

    def ask(self, handle: int, tensor: int, way: str, place: tuple[Any, ...]) -> tuple[int, "asyncio.Future[Any]"]:
        """Have a producer hand a tensor over; return the errand's number and its answer to come."""
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._errands[handle].append(Errand(number, tensor, way, place))
        self._wake(handle)
        return number, future

    def done(self, number: int, answer: Any) -> None:
        """Take a producer's answer; one that comes too late is for nobody."""
        future = self._open.pop(number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def give_up(self, number: int) -> None:
        """Forget an errand."""
        self._open.pop(number, None)

    def drop(self, handle: int, tensor: int) -> None:
        """Tell a producer that nobody needs a tensor any more."""
        self._drops[handle].append(tensor)
        self._wake(handle)

    def keep_only(self, handles: Collection[int]) -> None:
        """Forget producers that are gone."""
        for handle in {*self._errands, *self._drops, *self._idle} - set(handles):
            self._errands.pop(handle, None)
            self._drops.pop(handle, None)
            self._wake(handle)

    def _wake(self, handle: int) -> None:
        idle = self._idle.pop(handle, None)
        if idle is not None and not idle.done():
            idle.set_result(None)
