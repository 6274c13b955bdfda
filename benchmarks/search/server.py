"""Our server against a serial one (Search-R1's and RLinf's way) with 64 clients, one query a request.

Usage: python benchmarks/search/server.py [bm25 | dense ENCODER_FOLDER]
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from common import CORPUS, cpu_seconds, distinct_queries, our_server, percentile, serial_server

CLIENTS = 64


async def load(url: str, queries: list[str]) -> dict[str, float]:
    """64 clients that each send their next query as soon as the last is answered; kept-alive connections."""
    rest, waits = iter(queries), []

    async def client(session: aiohttp.ClientSession) -> None:
        for query in rest:
            begin = time.perf_counter()
            body = {"queries": [query], "topk": 3, "return_scores": True}
            async with session.post(f"{url}/retrieve", json=body) as reply:
                await reply.json()
            waits.append(time.perf_counter() - begin)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
        wall = time.perf_counter() - begin
    return {"rps": len(waits) / wall, "p50": 1e3 * percentile(waits, 0.5), "p99": 1e3 * percentile(waits, 0.99)}


def main(kind: str, model: str | None) -> None:
    """Alternate between the servers three times, each time with queries no server has seen."""
    size = 1500 if kind == "bm25" else 400
    index = Path(os.environ.get("INDEX", tempfile.mkdtemp()))
    extra = ["--retriever", "dense", "--option", f"encoder.model={model}"] if kind == "dense" else []
    queries = distinct_queries(CORPUS, 7 * size)
    ours, serial = our_server(CORPUS, index, *extra), serial_server(CORPUS, index, kind, model)
    with ours as (our_url, our_process), serial as (url, peer_process):
        for turn in range(3):
            for title, target, server in (("serial", url, peer_process), ("ours", our_url, our_process)):
                chunk = [queries.pop() for _ in range(size)]
                before = cpu_seconds(server)
                result = asyncio.run(load(target, chunk))
                cpu = cpu_seconds(server) - before
                print(
                    f"{kind} {turn} {title:7s} {result['rps']:7.0f} req/s  p50 {result['p50']:7.1f} ms  "
                    f"p99 {result['p99']:7.1f} ms  {1e3 * cpu / size:6.2f} CPU ms/query",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "bm25", sys.argv[2] if len(sys.argv) > 2 else None)
