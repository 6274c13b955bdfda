"""The search server: both layouts, bad requests, reload while it serves, and the command itself."""

import asyncio
import json
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager

import httpx
import pytest
from aiohttp.test_utils import TestServer

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.core.options import parse_options
from rlinf_plugins.testing.retrievers import write_corpus
from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.index import IndexConfig, build_index, open_index
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.results import Passage, Query
from rlinf_plugins.tools.server import SearchServer, ServerConfig


class Held:
    """A retriever that waits for its gate, to hold requests in the middle."""

    name = "held"

    def __init__(self, version):
        self.version = version
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches = []
        self.closed = False

    def __len__(self):
        return 1

    def search(self, queries, topk):
        self.batches.append(list(queries))
        self.entered.set()
        assert self.gate.wait(10)
        if "break" in queries:
            raise ValueError("broken index")
        return [[Passage(self.version, f'"T"\n{q}', 1.0)] * topk for q in queries]

    def close(self):
        self.closed = True


@asynccontextmanager
async def client_of(server):
    """A client of the server's routes, over a real socket."""
    async with (
        TestServer(server.app()) as running,
        httpx.AsyncClient(base_url=str(running.make_url("/")), trust_env=False) as client,
    ):
        yield client


@pytest.fixture
async def served(tmp_path):
    config = IndexConfig(corpus=str(write_corpus(tmp_path / "c.jsonl")))
    server = SearchServer(lambda version: open_index(config, version))
    await server.reload()
    async with client_of(server) as client:
        yield client, tmp_path / "c.jsonl"
    await server.close()


async def test_both_layouts(served):
    client, _ = served
    body = {"queries": ["capital of Germany", "", "zzz"], "topk": 1, "return_scores": True}
    reply = (await client.post("/retrieve", json=body)).json()
    assert reply["result"][0][0]["document"] == {"id": "0", "contents": '"Berlin"\nBerlin is the capital of Germany.'}
    assert reply["result"][0][0]["score"] > 0
    assert reply["result"][1:] == [[], []]
    bare = (await client.post("/retrieve", json={"queries": ["capital of Germany"], "topk": None})).json()
    assert bare["result"][0][0]["id"] == "0"
    assert 1 <= len(bare["result"][0]) <= 3


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"<html>", 400),
        (b'{"queries": "text"}', 400),
        (b'{"queries": [1]}', 400),
        (b'{"queries": null}', 400),
        (b'{"topk": 3}', 400),
        (b'{"queries": ["a"], "topk": "3"}', 400),
        (b'{"queries": ["a"], "topk": 0}', 400),
        (b'{"queries": ["a"], "topk": 100000}', 400),
        (b'{"queries": ["\xff"]}', 400),
        (json.dumps({"queries": ["a"] * 3000}).encode(), 413),
        (b" " * (9 * 1024**2), 413),
        (b'{"queries": []}', 200),
        (b'{"queries": ["a"], "unknown": 1}', 200),
    ],
)
async def test_bad_requests_are_told_what_is_wrong(served, body, status):
    client, _ = served
    reply = await client.post("/retrieve", content=body)
    assert reply.status_code == status
    assert status == 200 or reply.json()["detail"]


async def test_health_and_metrics(served):
    client, _ = served
    await client.post("/retrieve", json={"queries": ["river", "river"]})
    health = (await client.get("/health")).json()
    assert (health["status"], health["retriever"], health["passages"]) == ("ok", "bm25s", 7)
    assert health["pool"]["outcomes"] == {"fetched": 1, "joined": 1}
    text = (await client.get("/metrics")).text
    assert "rlinf_tool_calls_total{" in text
    assert 'rlinf_tool_calls_total{outcome="joined",pool="bm25s:' in text
    assert "rlinf_tool_latency_seconds_bucket" in text


async def test_a_changed_corpus_is_served_after_a_reload(served):
    client, path = served
    before = (await client.get("/health")).json()["version"]
    changed = path.with_suffix(".new")
    changed.write_text(path.read_text() + '{"id": "new", "contents": "\\"N\\"\\nquokka"}\n')
    changed.replace(path)
    after = (await client.post("/reload")).json()["version"]
    assert after != before
    reply = (await client.post("/retrieve", json={"queries": ["quokka"]})).json()
    assert reply["result"][0][0]["id"] == "new"
    assert (await client.post("/reload")).json()["version"] == after
    for body, says in (
        ('{"version": "bm25-no"}', "no version"),
        ('{"path": "/etc"}', "only 'version'"),
        ("[", "expected"),
    ):
        refused = await client.post("/reload", content=body)
        assert refused.status_code in (400, 409)
        assert says in refused.json()["detail"]
    assert (await client.get("/health")).json()["version"] == after


async def test_a_version_can_be_named(served):
    client, path = served
    first = (await client.get("/health")).json()["version"]
    other = build_index(IndexConfig(corpus=str(path), options={"k1": 1.5})).version
    assert other != first
    for version in (other, first):
        assert (await client.post("/reload", json={"version": version})).json() == {"version": version}
        assert (await client.get("/health")).json()["version"] == version


async def test_requests_under_way_finish_on_the_old_index():
    indexes = [Held("1"), Held("2")]
    remaining = iter(indexes)
    server = SearchServer(lambda version: next(remaining))
    await server.reload()
    async with client_of(server) as client:
        call = asyncio.ensure_future(client.post("/retrieve", json={"queries": ["a"], "topk": 1}))
        await asyncio.to_thread(indexes[0].entered.wait, 10)
        assert await server.reload() == "2"
        assert (await client.get("/health")).json()["version"] == "2"  # the loop is not blocked by the search
        assert not indexes[0].closed
        for index in indexes:
            index.gate.set()
        assert (await call).json()["result"][0][0]["id"] == "1"
        new = await client.post("/retrieve", json={"queries": ["a"], "topk": 1})
        assert new.json()["result"][0][0]["id"] == "2"
    await server.close()
    assert all(index.closed for index in indexes)


async def test_requests_that_wait_are_searched_as_one_batch_and_a_broken_index_is_500():
    index = Held("1")
    server = SearchServer(lambda version: index)
    await server.reload()
    async with client_of(server) as client:
        calls = [asyncio.ensure_future(client.post("/retrieve", json={"queries": [f"q{i}"]})) for i in range(3)]
        await asyncio.to_thread(index.entered.wait, 10)
        calls += [asyncio.ensure_future(client.post("/retrieve", json={"queries": [f"r{i}"]})) for i in range(20)]
        await asyncio.sleep(0.05)
        index.gate.set()
        assert [r.status_code for r in await asyncio.gather(*calls)] == [200] * 23
        assert len(index.batches) <= 3
        broken = await client.post("/retrieve", json={"queries": ["break"]})
        assert broken.status_code == 500
        assert "broken index" in broken.json()["detail"]
    await server.close()


async def test_before_the_index_is_open_requests_are_told_to_come_back():
    server = SearchServer(lambda version: Held("1"), ServerConfig())
    async with client_of(server) as client:
        for reply in (await client.post("/retrieve", json={"queries": ["a"]}), await client.get("/health")):
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "1"


@pytest.mark.slow
async def test_the_command_serves_reloads_on_hangup_and_stops(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl")
    arguments = ["-m", "rlinf_plugins.cli", "serve-search", "--corpus", str(path), "--port", "0", "--option", "k1=1.2"]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    try:
        lines = [(await asyncio.wait_for(process.stdout.readline(), 60)).decode() for _ in range(2)]
        assert "7 passages" in lines[0]
        url = lines[1].split()[-1]
        pool = ToolPool(HttpSearchTool(HttpConfig(url=url)))
        outcome = await pool.call(Query("capital of Germany", 1))
        assert outcome.value[0].id == "0"
        await pool.close()
        process.send_signal(signal.SIGHUP)
        assert b"serving index bm25-" in await asyncio.wait_for(process.stdout.readline(), 30)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) in (0, 130, -signal.SIGINT)
    finally:
        if process.returncode is None:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()


def test_retriever_settings_on_the_command_line():
    assert parse_options(["encoder.model=/m/e5", "encoder.batch=8", "file=null", "kind=flat", "k1=0.9"]) == {
        "encoder": {"model": "/m/e5", "batch": 8},
        "file": None,
        "kind": "flat",
        "k1": 0.9,
    }
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_options(["k1"])
