"""Requests over a Unix socket, for clients on the broker's node: a round trip costs a tenth of a Ray actor call.

The socket carries what the actor call would carry. Whoever cannot use it, or loses it, uses the actor call.
"""

import asyncio
import functools
import itertools
import os
import pickle
import shutil
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from rlinf_plugins.core.errors import ChannelError
from rlinf_plugins.scheduler.channel.segments import make_directory

_HEAD = struct.Struct("<QQ")  # number of the request, bytes that follow
_RECEIVE = 1 << 18
_LONGEST_PATH = 107  # of a Unix socket on Linux
_CONNECT_SECONDS = 5.0

Call = Callable[..., Awaitable[Any]]


class _Frames:
    """Cuts a stream of bytes into numbered messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Take what came; give the messages that are complete."""
        self._data += data
        at = 0
        while len(self._data) - at >= _HEAD.size:
            number, length = _HEAD.unpack_from(self._data, at)
            end = at + _HEAD.size + length
            if len(self._data) < end:
                break
            yield number, bytes(memoryview(self._data)[at + _HEAD.size : end])
            at = end
        del self._data[:at]


class _Connection(asyncio.Protocol):
    """The broker's end of one client's connection."""

    def __init__(self, call: Call, tasks: "set[asyncio.Task[None]]") -> None:
        self._call = call
        self._tasks = tasks
        self._frames = _Frames()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for number, body in self._frames.feed(data):
            task = asyncio.get_running_loop().create_task(self._answer(number, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, body: bytes) -> None:
        try:
            answer = pickle.dumps(await self._call(*pickle.loads(body)), protocol=5)
        except Exception as error:  # the boundary: unpickling runs foreign constructors
            answer = pickle.dumps(ChannelError(f"the broker cannot read or answer a request: {error!r}"))
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEAD.pack(number, len(answer)) + answer)


class Port:
    """Listens for clients on this machine; belongs to the broker's event loop.

    Only this user can reach it: requests are pickles, and the socket lies in a folder that nobody else may enter.

    Args:
        call: Does a request, given operation and arguments.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._directory = ""

    async def open(self) -> str:
        """Start to listen, unless this was done; return the path, empty where it would be too long for a socket."""
        if self._server is None:
            self._directory = self._directory or make_directory("port")
            path = os.path.join(self._directory, "s")
            if len(path) > _LONGEST_PATH:
                return ""
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: _Connection(self._call, self._tasks), path)
        return os.path.join(self._directory, "s")

    async def close(self) -> None:
        """Stop listening, and send the answers that are ready; connections stay until either end goes."""
        await asyncio.sleep(0)  # answers become ready
        await asyncio.sleep(0)  # and are sent
        if self._server is not None:
            self._server.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)


class Request(NamedTuple):
    """A request on its way.

    Attributes:
        future: Takes the answer.
        operation: What is asked for.
        arguments: Its arguments.
        otherwise: Called with this request, from some thread, if the connection is lost before the answer is here.
    """

    future: "Future[Any]"
    operation: str
    arguments: tuple[Any, ...]
    otherwise: "Callable[[Request], None]"


class Line:
    """A client's connection; safe to use from several threads, and never blocks the caller. Obtained from :func:`dial`.

    Args:
        path: Where the broker listens.

    Raises:
        OSError: Nobody listens there.
    """

    def __init__(self, path: str) -> None:
        self.gone = False
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Request] = {}
        self._backlog = bytearray()
        self._frames = _Frames()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(_CONNECT_SECONDS)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._loop = _loop(os.getpid())
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._socket, self._read)

    def submit(self, operation: str, arguments: tuple[Any, ...], otherwise: Callable[[Request], None]) -> "Future[Any]":
        """Send a request; ``otherwise`` takes it over if the connection is lost before the answer is here."""
        body = pickle.dumps((operation, arguments), protocol=5)
        request = Request(Future(), operation, arguments, otherwise)
        with self._lock:
            gone = self.gone
            if not gone:
                number = next(self._numbers)
                self._pending[number] = request
                self._send(_HEAD.pack(number, len(body)) + body)
        if gone:
            otherwise(request)
        return request.future

    def _send(self, frame: bytes) -> None:
        """Send now what the socket takes, and have the loop send the rest: a stopped broker must not stop us."""
        if not self._backlog:
            try:
                frame = frame[self._socket.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                self._loop.call_soon_threadsafe(self._fail)
                return
            if not frame:
                return
            self._loop.call_soon_threadsafe(self._watch_writable)
        self._backlog += frame

    def _watch_writable(self) -> None:
        if not self.gone:
            self._loop.add_writer(self._socket, self._flush)

    def _flush(self) -> None:
        with self._lock:
            try:
                del self._backlog[: self._socket.send(self._backlog)]
            except BlockingIOError:
                return
            except OSError:
                self._backlog.clear()  # the reader finds out
            if not self._backlog:
                self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail()
            return
        for number, body in self._frames.feed(data):
            with self._lock:
                request = self._pending.pop(number)
            try:
                request.future.set_result(pickle.loads(body))
            except Exception as error:  # unpickling runs foreign constructors
                request.future.set_exception(ChannelError(f"the broker's answer cannot be read: {error!r}"))

    def _fail(self) -> None:
        with self._lock:
            if self.gone:
                return
            self.gone = True
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            unanswered = list(self._pending.values())
            self._pending.clear()
        for request in unanswered:
            request.otherwise(request)


_lines: dict[tuple[int, str], Line] = {}
_dialling = threading.Lock()


def dial(path: str) -> Line | None:
    """This process's line to the broker that listens at ``path``; ``None`` if nobody does."""
    key = os.getpid(), path  # a child that was forked shares no line with its parent
    with _dialling:
        line = _lines.get(key)
        if line is None or line.gone:
            _lines.pop(key, None)
            try:
                line = _lines[key] = Line(path)
            except OSError:
                return None
        return line


@functools.lru_cache(maxsize=1)
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="channel-lines", daemon=True).start()
    return loop
