"""Bursts and think time against one server: the pool in Ray actors, the pool in process, and two peers.

Usage: python benchmarks/search/load.py [bm25 | dense ENCODER_FOLDER]
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import ray
from common import CORPUS, burst, cpu_seconds, distinct_queries, our_server, think, with_duplicates
from peers import rlinf_search_worker, verl_search_tool

from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.queries import QueryTool
from rlinf_plugins.tools.results import Query
from rlinf_plugins.tools.service import ServiceConfig, ToolService

SIZE = 600
LONG = PoolConfig(timeout_s=120.0, attempt_timeout_s=60.0)
"""Nothing may time out here: peers would be asked for less work than we are."""


def ours(url: str, name: str) -> ToolService:
    def factory() -> HttpSearchTool:
        return HttpSearchTool(HttpConfig(url=url))

    return ToolService(QueryTool(), factory, ServiceConfig(name=name), LONG)


def caller(pool: object):
    async def call(query: str) -> None:
        (await pool.call(Query(query, 3))).unwrap()

    return call


def show(title: str, result: dict[str, float], server_cpu: float, calls: int) -> None:
    print(
        f"{title:34s} {result['rps']:8.0f} req/s  p50 {result['p50']:8.1f} ms  p99 {result['p99']:8.1f} ms"
        f"  server {1e3 * server_cpu / calls:6.2f} CPU ms/query",
        flush=True,
    )


async def main(kind: str, *extra: str) -> None:
    """Run every load on every way of calling, the peers and ours in turn."""
    index = Path(os.environ.get("INDEX", tempfile.mkdtemp()))
    queries = distinct_queries(CORPUS, 40 * SIZE)
    fresh = iter(queries)

    def take(count: int, share: float) -> list[str]:
        return with_duplicates([next(fresh) for _ in range(count)], count, share)

    with our_server(CORPUS, index, *extra) as (url, server):
        target = f"{url}/retrieve"
        peers = {"old veRL SearchTool": verl_search_tool(target), "RLinf": rlinf_search_worker(target)}
        in_process = ToolPool(HttpSearchTool(HttpConfig(url=url)), LONG)
        no_cache = ToolPool(
            HttpSearchTool(HttpConfig(url=url)),
            PoolConfig(timeout_s=120.0, attempt_timeout_s=60.0, single_flight=False, cache=CacheConfig(entries=0)),
        )
        ways = peers | {
            "pool in Ray actors": caller(ours(url, "bench")),
            "pool in process": caller(in_process),
            "pool, no sharing, no cache": caller(no_cache),
        }
        for call in ways.values():  # starts actors and connections
            await burst(call, take(20, 0.0))
        size = SIZE if kind == "bm25" else SIZE // 2
        for share in (0.0, 0.6):
            print(f"\nburst of {size}, {share:.0%} duplicates")
            for title, call in ways.items():
                before = cpu_seconds(server)
                result = await burst(call, take(size, share))
                show(title, result, cpu_seconds(server) - before, size)
        for share in (0.0, 0.6):
            print(f"\nthink time 0.3 s, {CLIENTS[kind]} clients, {share:.0%} duplicates")
            for title, call in ways.items():
                before = cpu_seconds(server)
                result = await think(call, take(size, share), CLIENTS[kind], 0.3)
                show(title, result, cpu_seconds(server) - before, size)
        await in_process.close()
        await no_cache.close()


CLIENTS = {"bm25": 32, "dense": 16}

if __name__ == "__main__":
    arguments = sys.argv[1:] or ["bm25"]
    extra = ["--retriever", "dense", "--option", f"encoder.model={arguments[1]}"] if arguments[0] == "dense" else []
    ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    asyncio.run(main(arguments[0], *extra))
    ray.shutdown()
