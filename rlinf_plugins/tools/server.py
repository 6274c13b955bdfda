"""``rlinf-plugins serve-search``: an index behind ``POST /retrieve``, concurrent, with health, metrics and reload.

Speaks Search-R1's and RLinf's protocol in both layouts, so it takes the place of their servers. Requests that arrive
together are searched as one batch, in a thread; the event loop only moves bytes. A search of words takes 0.1 ms, so
HTTP is most of the work: aiohttp parses it in C, with about a fifth of the CPU time of a server in pure Python.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rlinf_plugins.core.errors import ConfigError, RlinfError
from rlinf_plugins.tools import protocol
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.queries import QueryConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Passages, Query
from rlinf_plugins.tools.retriever import Retriever, SearchTool

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(protocol.RetrieveRequest).decode

OpenIndex = Callable[[str | None], Retriever]
"""Opens an index, given a version or None for the corpus as it is now; runs in a thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What the server accepts.

    Attributes:
        topk: Passages for a request that names no number.
        max_queries: Queries in one request.
        max_body_bytes: Larger bodies are refused.
        queries: What counts as a query; one that does not gets no passages.
        pool: How requests are put together, cached and bounded.
    """

    topk: int = 3
    max_queries: int = 2048
    max_body_bytes: int = 8 * 1024**2
    queries: QueryConfig = field(default_factory=QueryConfig)
    pool: PoolConfig = field(
        default_factory=lambda: PoolConfig(batch=BatchConfig(max_batch=128, max_inflight=2), queue=50_000)
    )

    def validate(self, where: str) -> None:
        """Reject limits below 1."""
        if min(self.topk, self.max_queries, self.max_body_bytes) < 1:
            raise ConfigError(f"{where} needs topk, max_queries and max_body_bytes >= 1, got {self}")


class _Generation:
    """One opened index and the requests that use it."""

    def __init__(self, retriever: Retriever, config: ServerConfig) -> None:
        self.version = retriever.version
        self.passages = len(retriever)
        self.retriever = retriever.name
        tool = SearchTool(retriever, config.queries)
        self.pool: ToolPool[Query, Passages] = ToolPool(tool, config.pool, name=f"{retriever.name}:{retriever.version}")
        self.users = 0
        self.unused = asyncio.Event()

    async def retire(self) -> None:
        """Close the index once the last request that uses it has its reply."""
        if self.users:
            await self.unused.wait()
        await self.pool.close()


class SearchServer:
    """Holds the current index and answers requests; :meth:`app` is the application for aiohttp's runners.

    Until :meth:`reload` was called requests are answered with 503.

    Args:
        open_index: Opens indexes.
        config: Limits and batching.
    """

    def __init__(self, open_index: OpenIndex, config: ServerConfig | None = None) -> None:
        self._open = open_index
        self._config = config or ServerConfig()
        self._current: _Generation | None = None
        self._registry = CollectorRegistry()
        self._reloading = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Return the routes; whoever serves them calls :meth:`reload` before and :meth:`close` after."""
        app = web.Application(client_max_size=self._config.max_body_bytes)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/reload", self._reload)
        return app

    async def reload(self, version: str | None = None) -> str:
        """Open an index (built first if need be) and change over; requests under way finish on the old one.

        Returns:
            The version that is served now. Where opening fails, the old index stays.
        """
        async with self._reloading:
            retriever = await asyncio.to_thread(self._open, version)
            old = self._current
            if old is not None and old.version == retriever.version:
                await asyncio.to_thread(retriever.close)
                return old.version
            self._current = _Generation(retriever, self._config)
            self._registry.register(self._current.pool.metrics)
            if old is not None:
                self._registry.unregister(old.pool.metrics)
                task = asyncio.create_task(old.retire())
                self._retiring.add(task)
                task.add_done_callback(self._retiring.discard)
            _log.info("serving %s, %d passages", retriever.version, len(retriever))
            return retriever.version

    async def close(self) -> None:
        """Close all indexes."""
        await asyncio.gather(*self._retiring)
        if self._current is not None:
            await self._current.pool.close()

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if isinstance(body, web.Response):
            return body
        try:
            wanted = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _problem(400, f'expected {{"queries": [text], "topk": int, "return_scores": bool}}: {error}')
        topk = self._config.topk if wanted.topk is None else wanted.topk
        if not 1 <= topk <= self._config.queries.max_topk:
            return _problem(400, f"topk must be between 1 and {self._config.queries.max_topk}, got {topk}")
        if len(wanted.queries) > self._config.max_queries:
            return _problem(413, f"{len(wanted.queries)} queries, at most {self._config.max_queries} are taken at once")
        return await self._search(wanted, topk)

    async def _search(self, wanted: protocol.RetrieveRequest, topk: int) -> web.Response:
        generation = self._current
        if generation is None:
            return _problem(503, "the index is being opened", retry_after_s=1)
        generation.users += 1
        try:
            outcomes = await generation.pool.call_many([Query(text, topk) for text in wanted.queries])
        finally:
            generation.users -= 1
            if not generation.users:
                generation.unused.set()
        results: list[Passages] = []
        for outcome in outcomes:
            if not isinstance(outcome, Failure):
                results.append(outcome.value)
            elif outcome.kind is FailureKind.INVALID_REQUEST:
                results.append(())  # the protocol has no place for an error of one query; the metrics count it
            elif outcome.kind is FailureKind.TOOL_ERROR:
                return _problem(500, outcome.message)
            else:
                return _problem(503, outcome.message, retry_after_s=1)
        reply = protocol.encode_reply(results, scores=wanted.return_scores)
        return web.Response(body=reply, content_type="application/json")

    async def _body(self, request: web.Request) -> bytes | web.Response:
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _problem(413, f"the body exceeds {self._config.max_body_bytes} bytes")

    async def _health(self, _: web.Request) -> web.Response:
        generation = self._current
        if generation is None:
            return _problem(503, "the index is being opened", retry_after_s=1)
        return _json(
            200,
            {
                "status": "ok",
                "retriever": generation.retriever,
                "version": generation.version,
                "passages": generation.passages,
                "pool": generation.pool.snapshot(),
            },
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _reload(self, request: web.Request) -> web.Response:
        """Change over to the corpus as it is now, or to ``{"version": ...}``; opens only the configured folder."""
        body = await self._body(request)
        if isinstance(body, web.Response):
            return body
        try:
            wanted = msgspec.json.decode(body, type=dict[str, str]) if body.strip() else {}
            if not set(wanted) <= {"version"}:
                return _problem(400, f"only 'version' can be given, got {sorted(wanted)}")
            version = await self.reload(wanted.get("version"))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _problem(400, f'expected {{"version": text}} or nothing: {error}')
        except (RlinfError, OSError) as error:
            return _problem(409, f"the old index stays: {error}")
        return _json(200, {"version": version})


def _json(status: int, value: object, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _problem(status: int, message: str, retry_after_s: int | None = None) -> web.Response:
    headers = {"retry-after": str(retry_after_s)} if retry_after_s is not None else None
    return _json(status, {"detail": message}, headers)
