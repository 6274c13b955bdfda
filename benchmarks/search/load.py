"""Bursts and think time against one server: the pool in Ray actors, the pool in process, and two peers.

Usage: python benchmarks/search/load.py ours|serial [bm25 | dense ENCODER_FOLDER] [--only burst|think]
The first word names the server that all of them call: ours, which batches by itself, or the serial kind users have.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from pathlib import Path

import psutil
import ray
from common import CORPUS, burst, cpu_seconds, distinct_queries, our_server, serial_server, think, with_duplicates
from peers import rlinf_search_worker, verl_search_tool

from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.queries import QueryTool
from rlinf_plugins.tools.results import Query
from rlinf_plugins.tools.service import ServiceConfig, ToolService

SIZE = 300
ROUNDS = 3
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


class Meter:
    """CPU time of everything that takes part: this process, its Ray actors, the server."""

    def __init__(self, server: psutil.Process) -> None:
        workers = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::")]
        self._clients = [psutil.Process(), *workers]
        self._server = server

    def read(self) -> tuple[float, float]:
        """Return CPU seconds so far: clients, server."""
        return sum(map(cpu_seconds, self._clients)), cpu_seconds(self._server)


async def compare(title: str, ways: dict, meter: Meter, load) -> None:
    """Run ``load`` on every way in turn, several rounds, and print the medians."""
    print(f"\n{title}")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            before = meter.read()
            result = await load(call)
            after = meter.read()
            cpu = [1e3 * (b - a) / SIZE for a, b in zip(before, after, strict=True)]
            rows[name].append(result | {"client": cpu[0], "server": cpu[1]})
    for name, results in rows.items():
        middle = {key: statistics.median(r[key] for r in results) for key in results[0]}
        print(
            f"{name:28s} {middle['rps']:7.0f} req/s  p50 {middle['p50']:8.1f} ms  p99 {middle['p99']:8.1f} ms"
            f"  CPU ms/call: client {middle['client']:6.2f}, server {middle['server']:5.2f}",
            flush=True,
        )


async def main(kind: str, server_kind: str, model: str | None, only: str | None) -> None:
    """Run every load on every way of calling, the peers and ours in turn."""
    index = Path(os.environ.get("INDEX", tempfile.mkdtemp()))
    queries = distinct_queries(CORPUS, 80 * SIZE)
    fresh = iter(queries)

    def take(count: int, share: float) -> list[str]:
        return with_duplicates([next(fresh) for _ in range(count)], count, share)

    extra = ["--retriever", "dense", "--option", f"encoder.model={model}"] if model else []
    serving = our_server(CORPUS, index, *extra) if server_kind == "ours" else serial_server(CORPUS, index, kind, model)
    with serving as (url, server):
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
        meter = Meter(server)
        clients = CLIENTS[kind]
        loads = {
            f"burst of {SIZE}": burst,
            f"think time 0.3 s, {clients} clients": lambda call, queries: think(call, queries, clients, 0.3),
        }
        for title, load in loads.items():
            if only is None or title.startswith(only):
                for share in (0.0, 0.6):
                    await compare(
                        f"{title}, {share:.0%} duplicates",
                        ways,
                        meter,
                        lambda call, load=load, share=share: load(call, take(SIZE, share)),
                    )
        await in_process.close()
        await no_cache.close()


CLIENTS = {"bm25": 32, "dense": 16}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=["ours", "serial"])
    parser.add_argument("kind", nargs="?", choices=sorted(CLIENTS), default="bm25")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--only", choices=["burst", "think"])
    arguments = parser.parse_args()
    ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    asyncio.run(main(arguments.kind, arguments.server, arguments.model, arguments.only))
    ray.shutdown()
