"""The HTTP client: every way a server or a network fails has its type, ends in time and holds few sockets."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager, suppress

import pytest

from rlinf_plugins.testing.retrieval_server import Response, ScriptedRetrievalServer, passages
from rlinf_plugins.tools.http import HttpAccessTool, HttpConfig, HttpSearchTool
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import FailureKind, Query, Success
from rlinf_plugins.tools.retry import RetryConfig

STATUSES = [
    (Response(status=500), FailureKind.STATUS, True, None),
    (Response(status=500, headers={"retry-after": "7"}), FailureKind.STATUS, True, 7.0),
    (Response(status=503, headers={"retry-after": "soon"}), FailureKind.OVERLOADED, True, None),
    (Response(status=429, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}), FailureKind.OVERLOADED, True, 0.0),
    (Response(status=404), FailureKind.STATUS, False, None),
    (Response(status=422), FailureKind.STATUS, False, None),
    (Response(status=307, headers={"location": "http://127.0.0.1:1/x"}), FailureKind.STATUS, False, None),
    (Response(body=passages(["q"]), cut_after=30), FailureKind.BAD_REPLY, True, None),
    (Response(body=b"<html>"), FailureKind.BAD_REPLY, True, None),
    (Response(never=True), FailureKind.TIMEOUT, True, None),
]


@pytest.mark.parametrize(("response", "kind", "retryable", "retry_after"), STATUSES)
async def test_every_way_a_server_fails_has_its_type(response, kind, retryable, retry_after):
    async with ScriptedRetrievalServer(lambda queries, number: response) as server:
        tool = HttpSearchTool(HttpConfig(url=server.url))
        (failure,) = await tool.run([Query("q")], 0.3)
        assert (failure.kind, failure.retryable, failure.retry_after_s) == (kind, retryable, retry_after)
        await tool.close()


async def test_a_server_that_is_not_there_is_unavailable():
    tool = HttpSearchTool(HttpConfig(url="http://127.0.0.1:9"))
    (failure,) = await tool.run([Query("q")], 1.0)
    assert failure.kind is FailureKind.UNAVAILABLE
    await tool.close()


@asynccontextmanager
async def speaking(serve):
    """A server on a raw socket; ``serve(reader, writer)`` gets each connection after its first line came in."""

    async def connected(reader, writer):
        try:
            await reader.readline()
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_reply_that_drips_ends_at_the_deadline():
    async def drip(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        with suppress(ConnectionError):  # the client hangs up
            for _ in range(1000):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)

    async with speaking(drip) as url:
        tool = HttpSearchTool(HttpConfig(url=url))
        begin = time.monotonic()
        (failure,) = await tool.run([Query("q")], 0.3)
        assert failure.kind is FailureKind.TIMEOUT
        assert time.monotonic() - begin < 2.0
        await tool.close()


@pytest.mark.parametrize("sent", [b"", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"])
async def test_what_hangs_up_or_speaks_no_http_is_a_bad_reply(sent):
    async def serve(reader, writer):
        writer.write(sent)
        await writer.drain()

    async with speaking(serve) as url:
        tool = HttpSearchTool(HttpConfig(url=url))
        (failure,) = await tool.run([Query("q")], 2.0)
        assert (failure.kind, failure.retryable) == (FailureKind.BAD_REPLY, True)
        await tool.close()


async def test_a_connection_that_does_not_open_ends_before_the_call():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:  # the queue of the listener holds them, the next connection is not answered
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        tool = HttpSearchTool(HttpConfig(url=f"http://127.0.0.1:{full.getsockname()[1]}", connect_s=0.2))
        begin = time.monotonic()
        (failure,) = await tool.run([Query("q")], 30.0)
        assert failure.kind is FailureKind.TIMEOUT
        assert time.monotonic() - begin < 5.0
        await tool.close()
        for one in waiting:
            one.close()


async def test_sockets_are_bounded_and_used_again():
    async with ScriptedRetrievalServer() as server:
        tool = HttpSearchTool(HttpConfig(url=server.url, connections=3))
        for _ in range(3):
            outcomes = await asyncio.gather(*(tool.run([Query(f"q{i}")], 5.0) for i in range(20)))
            assert [[o.value[0].text for o in some] for some in outcomes] == [[f"q{i}"] for i in range(20)]
        assert server.peak_connections == server.open_connections == 3
        await tool.close()


async def test_a_proxy_of_the_environment_sees_nothing(monkeypatch):
    async with ScriptedRetrievalServer() as proxy, ScriptedRetrievalServer() as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        tool = HttpSearchTool(HttpConfig(url=server.url))
        (outcome,) = await tool.run([Query("q")], 5.0)
        assert isinstance(outcome, Success)
        assert not proxy.requests
        await tool.close()


async def test_a_reply_beyond_the_limit_is_refused():
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=b" " * 5000)) as server:
        tool = HttpSearchTool(HttpConfig(url=server.url, max_reply_bytes=1000))
        (failure,) = await tool.run([Query("q")], 1.0)
        assert "exceeds 1000 bytes" in failure.message
        await tool.close()


ODD_QUERIES = ["", "   ", "\n\t", "x" * 5000, "a\x00b", "\ud800"]


async def test_odd_queries_are_refused_before_they_are_sent_and_strange_ones_are_sent_whole():
    strange = ["的 中文 查询", "<search>x</search>", '"}]}', "émoji 🎉", "<|im_end|>", "a\nb"]
    async with ScriptedRetrievalServer() as server:
        pool = ToolPool(HttpSearchTool(HttpConfig(url=server.url + "/retrieve")), PoolConfig())
        outcomes = await pool.call_many([Query(q) for q in ODD_QUERIES + strange])
        assert [o.kind for o in outcomes[: len(ODD_QUERIES)]] == [FailureKind.INVALID_REQUEST] * len(ODD_QUERIES)
        assert [o.value[0].text for o in outcomes[len(ODD_QUERIES) :]] == strange
        assert server.requests == [strange]
        await pool.close()


async def test_access_goes_to_access_and_refuses_what_is_no_url():
    body = json.dumps({"result": ["page"]}).encode()
    async with ScriptedRetrievalServer(lambda urls, number: Response(body=body)) as server:
        pool = ToolPool(HttpAccessTool(HttpConfig(url=server.url)), PoolConfig(retry=RetryConfig(retries=0)))
        good, bad = await pool.call_many(["http://a/b", "file:///etc/passwd"])
        assert good.value[0].contents == "page"
        assert bad.kind is FailureKind.INVALID_REQUEST
        assert server.requests == [["http://a/b"]]
        await pool.close()


async def test_a_batch_is_sent_once_with_the_largest_topk_and_cut_per_caller():
    async with ScriptedRetrievalServer(lambda queries, number: Response(body=passages(queries, 5))) as server:
        pool = ToolPool(HttpSearchTool(HttpConfig(url=server.url)), PoolConfig())
        outcomes = await pool.call_many([Query("a", 1), Query("b", 5), Query("a", 5)])
        assert [len(o.value) for o in outcomes] == [1, 5, 5]
        assert len(server.requests) == 1
        await pool.close()
