"""How a client reaches a broker, in this process or elsewhere; operations are written once, for sync and async use."""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

from rlinf_plugins.core.errors import BrokerUnreachableError, ChannelClosedError
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.host import Host

T = TypeVar("T")

GRACE_SECONDS = 30.0
"""How much longer than its own time-out an operation waits for the broker to say so."""


class Reply(Protocol):
    """An answer that is on its way."""

    def wait(self, timeout: float | None) -> Any:
        """Block until it is here and return it; an error that the broker answered is returned too."""
        ...

    async def wait_async(self, timeout: float | None) -> Any:
        """As :meth:`wait`, without blocking the loop."""
        ...

    def ready(self) -> bool:
        """Whether it is here."""
        ...

    def then(self, call: Callable[[Any], None]) -> None:
        """Have ``call`` made with the answer or error, from some thread."""
        ...


class Link(Protocol):
    """A way to a broker."""

    name: str
    node: str
    """Node of the broker; the same text means shared memory works."""

    def submit(self, operation: str, arguments: tuple[Any, ...]) -> Reply:
        """Send a request without waiting."""
        ...


Steps = Generator[tuple[Reply, float | None], Any, T]
"""An operation: yields replies to wait for, with the operation's own time-out, and receives their answers."""


def drive(steps: Steps[T]) -> T:
    """Run an operation in this thread."""
    try:
        reply, timeout = next(steps)
        while True:
            try:
                answer = reply.wait(_guard(timeout))
            except BaseException as error:
                reply, timeout = steps.throw(error)
            else:
                reply, timeout = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def drive_async(steps: Steps[T]) -> T:
    """Run an operation on the current event loop."""
    try:
        reply, timeout = next(steps)
        while True:
            try:
                answer = await reply.wait_async(_guard(timeout))
            except BaseException as error:
                reply, timeout = steps.throw(error)
            else:
                reply, timeout = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _guard(timeout: float | None) -> float | None:
    return None if timeout is None else timeout + GRACE_SECONDS


class FutureReply:
    """A reply that is a future of this process."""

    def __init__(self, future: "Future[Any]", broker: str) -> None:
        self._future = future
        self._broker = broker

    def wait(self, timeout: float | None) -> Any:
        """Block until the answer is here."""
        try:
            return self._future.result(timeout)
        except FutureTimeoutError as error:
            raise _silent(self._broker, timeout) from error

    async def wait_async(self, timeout: float | None) -> Any:
        """Wait on the loop."""
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._future)), timeout)
        except TimeoutError as error:
            raise _silent(self._broker, timeout) from error

    def ready(self) -> bool:
        """Whether the answer is here."""
        return self._future.done()

    def then(self, call: Callable[[Any], None]) -> None:
        """Call back from the broker's thread."""
        self._future.add_done_callback(lambda future: call(future.exception() or future.result()))


class LocalLink:
    """Hosts the broker on a thread of this process; for tests, and for pipelines within one process."""

    def __init__(self, name: str, config: ChannelConfig) -> None:
        self.node = "local"
        self.name = name
        self._destroyed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"channel-{name}", daemon=True)
        self._thread.start()
        self._host = asyncio.run_coroutine_threadsafe(_make_host(name, config), self._loop).result()

    def submit(self, operation: str, arguments: tuple[Any, ...]) -> Reply:
        """Send a request to the broker's loop."""
        if self._destroyed:
            raise ChannelClosedError(f"channel {self.name!r} was destroyed")
        future = asyncio.run_coroutine_threadsafe(self._host.call(operation, arguments), self._loop)
        return FutureReply(future, self.name)

    def destroy(self) -> None:
        """Stop the broker; those who wait get an error."""
        self._destroyed = True
        self._loop.call_soon_threadsafe(self._host.shut_down)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make_host(name: str, config: ChannelConfig) -> Host:
    return Host(name, config)


def _silent(broker: str, timeout: float | None) -> BrokerUnreachableError:
    return BrokerUnreachableError(
        f"channel {broker!r} has not answered for {timeout:g} s; its process is stopped or overloaded"
    )
