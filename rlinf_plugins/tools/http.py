"""The asynchronous client of ``/retrieve`` and ``/access`` servers: users' own, Search-R1's, RLinf's and ours."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time

import aiohttp

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools import protocol
from rlinf_plugins.tools.queries import QueryConfig, QueryTool
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome, Passages, Query
from rlinf_plugins.tools.tool import Tool

_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_ONLY_BUSY = frozenset({429, 503})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_KEEP_S = 4.0
"""Seconds an unused connection is kept: less than uvicorn's 5, so that no query is sent into a closing one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpConfig:
    """Where a retrieval server is.

    Attributes:
        url: Its base, e.g. ``"http://127.0.0.1:8000"``; a trailing ``/retrieve`` is accepted as launchers write it.
        connections: Sockets kept open at most.
        connect_s: Seconds a connection may take to open.
        max_reply_bytes: Larger replies are refused.
    """

    url: str
    connections: int = 8
    connect_s: float = 3.0
    max_reply_bytes: int = 64 * 1024**2

    def validate(self, where: str) -> None:
        """Reject what is not an http URL."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{where}.url must begin with http:// or https://, got {self.url!r}")
        if self.connections < 1:
            raise ConfigError(f"{where}.connections must be at least 1, got {self.connections}")


class _HttpEndpoint:
    """One kept-alive session; every way a request can go wrong becomes a failure."""

    def __init__(self, config: HttpConfig, path: str) -> None:
        base = config.url.rstrip("/").removesuffix("/retrieve").removesuffix("/access")
        self.url = f"{base}/{path}"
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes, timeout_s: float) -> bytes | Failure:
        if self._session is None:
            self._session = self._open()
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._config.connect_s)
        try:
            async with self._session.post(self.url, data=body, timeout=limits, allow_redirects=False) as response:
                if response.status != 200:
                    return self._status_failure(response)
                return await self._read(response)
        except TimeoutError as error:
            return self._failure(FailureKind.TIMEOUT, _named(error) if str(error) else f"no reply in {timeout_s:.2f} s")
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientResponseError) as error:
            # closed in the middle of a reply, or not HTTP at all
            return self._failure(FailureKind.BAD_REPLY, f"the reply broke off: {_named(error)}")
        except aiohttp.ClientError as error:
            return self._failure(FailureKind.UNAVAILABLE, _named(error))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        """Open the session, which must happen inside the event loop that uses it."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._config.connections, keepalive_timeout=_KEEP_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"content-type": "application/json"},
            trust_env=False,  # retrieval servers are local, and a proxy from the environment would see every query
        )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes | Failure:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > self._config.max_reply_bytes:
                return self._failure(FailureKind.BAD_REPLY, f"the reply exceeds {self._config.max_reply_bytes} bytes")
        return b"".join(chunks)

    def _status_failure(self, response: aiohttp.ClientResponse) -> Failure:
        status = response.status
        if status in _REDIRECTS:
            target = response.headers.get("location", "nowhere")
            return Failure(
                kind=FailureKind.STATUS,
                message=f"{self.url} redirects to {target!r} ({status}); configure the final address",
                whole_batch=True,
            )
        kind = FailureKind.OVERLOADED if status in _ONLY_BUSY else FailureKind.STATUS
        return Failure(
            kind=kind,
            message=f"{self.url} answered {status} {response.reason}",
            retryable=status in _RETRYABLE_STATUS,
            retry_after_s=_retry_after(response.headers.get("retry-after")),
            whole_batch=True,
        )

    def _failure(self, kind: FailureKind, message: str) -> Failure:
        return Failure(kind=kind, message=f"{self.url}: {message}", retryable=True, whole_batch=True)


class HttpSearchTool(QueryTool):
    """Searches a ``/retrieve`` server.

    Args:
        config: Where it is.
        queries: What counts as a query, and which queries are equal.
        version: Index version of the server where it is known, else empty.
    """

    def __init__(self, config: HttpConfig, queries: QueryConfig | None = None, version: str = "") -> None:
        self.name = "http-search"
        self.version = version
        super().__init__(queries)
        self._endpoint = _HttpEndpoint(config, "retrieve")

    async def run(self, requests: Sequence[Query], timeout_s: float) -> Sequence[Outcome[Passages]]:
        """Send all queries in one request, with the largest ``topk`` among them."""
        topk = max(request.topk for request in requests)
        reply = await self._endpoint.post(protocol.encode_retrieve([r.text for r in requests], topk), timeout_s)
        if isinstance(reply, Failure):
            return [reply] * len(requests)
        outcomes = protocol.decode_retrieve(reply, len(requests), topk)
        return [self._rules.cut(outcome, request) for outcome, request in zip(outcomes, requests, strict=True)]

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


class HttpAccessTool(Tool[str, Passages]):
    """Fetches pages through an ``/access`` server; a request is a URL."""

    def __init__(self, config: HttpConfig) -> None:
        self.name = "http-access"
        self._endpoint = _HttpEndpoint(config, "access")

    def key(self, request: str) -> Hashable:
        """The URL."""
        return request

    def check(self, request: str) -> Failure | None:
        """Refuse what is not an http URL."""
        if request.startswith(("http://", "https://")):
            return None
        return Failure(kind=FailureKind.INVALID_REQUEST, message=f"not an http URL: {request[:80]!r}")

    async def run(self, requests: Sequence[str], timeout_s: float) -> Sequence[Outcome[Passages]]:
        """Send all URLs in one request."""
        reply = await self._endpoint.post(protocol.encode_access(requests), timeout_s)
        if isinstance(reply, Failure):
            return [reply] * len(requests)
        return protocol.decode_access(reply, len(requests))

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _retry_after(header: str | None) -> float | None:
    """Return the seconds a ``Retry-After`` header asks for: a number or an HTTP date; None where unusable."""
    if header is None:
        return None
    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time())
    except ValueError:
        return None
