"""What the search benchmarks share: servers as processes, queries, percentiles."""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "data" / "hotpot" / "corpus.jsonl"


def distinct_queries(corpus: Path, count: int, seed: int = 0) -> list[str]:
    """Return ``count`` different queries of four to eight words that stand together in some passage."""
    rng = random.Random(seed)
    passages = [json.loads(line)["contents"] for line in corpus.open(encoding="utf-8")]
    found: dict[str, None] = {}
    while len(found) < count:
        words = re.findall(r"\w+", rng.choice(passages))
        if len(words) > 12:
            start = rng.randrange(len(words) - 8)
            found[" ".join(words[start : start + rng.randint(4, 8)])] = None
    return list(found)


def with_duplicates(queries: Sequence[str], count: int, share: float, seed: int = 0) -> list[str]:
    """Return ``count`` queries of which ``share`` repeat an earlier one."""
    rng = random.Random(seed)
    chosen: list[str] = []
    fresh = iter(queries)
    for _ in range(count):
        chosen.append(rng.choice(chosen) if chosen and rng.random() < share else next(fresh))
    return chosen


@contextmanager
def process(arguments: Sequence[str], ready: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server; yields the address on the line that contains ``ready``, and the process."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        for line in child.stdout:
            if ready in line:
                match = re.search(r"http://[\d.]+:\d+", line)
                yield match[0], psutil.Process(child.pid)
                break
        else:
            raise RuntimeError(f"{arguments} ended before it was ready")
    finally:
        child.terminate()
        child.wait(20)


@contextmanager
def our_server(corpus: Path, index: Path, *extra: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run ``rlinf-plugins serve-search`` on a free port."""
    arguments = [
        "-m",
        "rlinf_plugins.cli",
        "serve-search",
        "--corpus",
        str(corpus),
        "--index",
        str(index),
        "--port",
        "0",
    ]
    with process([*arguments, *extra], "serving http") as found:
        yield found


@contextmanager
def serial_server(corpus: Path, index: Path, kind: str, model: str | None) -> Iterator[tuple[str, psutil.Process]]:
    """Run the peer's kind of server, which searches inside its event loop."""
    script = str(Path(__file__).with_name("serial_server.py"))
    with process([script, str(corpus), str(index), kind, *([model] if model else [])], "http") as found:
        yield found


def cpu_seconds(server: psutil.Process) -> float:
    """CPU time a process has used."""
    times = server.cpu_times()
    return times.user + times.system


def percentile(values: Sequence[float], q: float) -> float:
    """Return the ``q`` quantile of ``values``."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def burst(call: Callable[[str], Awaitable[object]], queries: Sequence[str]) -> dict[str, float]:
    """Make all calls at once; returns req/s, p50 and p99 in ms."""
    waits = []

    async def one(query: str) -> None:
        begin = time.perf_counter()
        await call(query)
        waits.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    await asyncio.gather(*(one(query) for query in queries))
    wall = time.perf_counter() - begin
    return {"rps": len(queries) / wall, "p50": 1e3 * percentile(waits, 0.5), "p99": 1e3 * percentile(waits, 0.99)}


async def think(
    call: Callable[[str], Awaitable[object]], queries: Sequence[str], clients: int, seconds: float
) -> dict[str, float]:
    """Closed loop: each client waits ``seconds``, then calls, until the queries are used up."""
    rest, waits = iter(queries), []
    rng = random.Random(0)

    async def client() -> None:
        await asyncio.sleep(seconds * rng.random())
        for query in rest:
            begin = time.perf_counter()
            await call(query)
            waits.append(time.perf_counter() - begin)
            await asyncio.sleep(seconds)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    wall = time.perf_counter() - begin
    return {"rps": len(waits) / wall, "p50": 1e3 * percentile(waits, 0.5), "p99": 1e3 * percentile(waits, 0.99)}
