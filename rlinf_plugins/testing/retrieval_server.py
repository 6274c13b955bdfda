"""A scripted ``/retrieve`` server for tests and soaks: both layouts and every way such servers misbehave."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """What the server sends for one request.

    Attributes:
        status: HTTP status.
        body: Raw body.
        headers: Extra headers.
        delay_s: Seconds before anything is sent.
        never: Accept the request and send nothing, ever.
        cut_after: Send only so many bytes of the body, then close the connection.
    """

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    never: bool = False
    cut_after: int | None = None


Script = Callable[[list[str], int], Response]
"""Maps the queries of a request and the number of the request (from 0) to a response."""


def passages(queries: Sequence[str], topk: int = 3, *, scores: bool = True) -> bytes:
    """Return a well-formed reply whose passages name their query, so that crossed replies show."""
    rows = []
    for query in queries:
        documents = [{"id": f"{query}#{rank}", "contents": f'"T {rank}"\n{query}'} for rank in range(topk)]
        rows.append([{"document": d, "score": 1.0 / (1 + r)} for r, d in enumerate(documents)] if scores else documents)
    return json.dumps({"result": rows}).encode()


class ScriptedRetrievalServer:
    """Serves on a free loopback port inside an ``async with`` block.

    Args:
        script: Decides each response; by default every request is answered well.

    Attributes:
        requests: Queries of each request received, in order of arrival.
        open_connections: Connections open now.
        peak_connections: Most connections open at once.
    """

    def __init__(self, script: Script | None = None) -> None:
        self._script = script or (lambda queries, number: Response(body=passages(queries)))
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[list[str]] = []
        self.open_connections = 0
        self.peak_connections = 0

    @property
    def url(self) -> str:
        """Base address."""
        if self._server is None:
            raise RuntimeError("the server is not running: use it in an 'async with' block")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> "ScriptedRetrievalServer":
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.open_connections += 1
        self.peak_connections = max(self.peak_connections, self.open_connections)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away, which is its right
        except asyncio.CancelledError:
            pass  # the block ended while a response was withheld
        finally:
            self.open_connections -= 1
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0]) if "content-length:" in head else 0
        body = json.loads(await reader.readexactly(length)) if length else {}
        queries = body.get("queries") or body.get("urls") or []
        number = len(self.requests)
        self.requests.append(queries)
        response = self._script(queries, number)
        if response.never:
            await self._until_gone(reader)
            return False
        if response.delay_s:
            await asyncio.sleep(response.delay_s)
        headers = {"content-type": "application/json", "content-length": str(len(response.body)), **response.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {response.status} X\r\n{lines}\r\n".encode())
        writer.write(response.body if response.cut_after is None else response.body[: response.cut_after])
        await writer.drain()
        return response.cut_after is None

    @staticmethod
    async def _until_gone(reader: asyncio.StreamReader) -> None:
        read: Awaitable[bytes] = reader.read()
        await read
