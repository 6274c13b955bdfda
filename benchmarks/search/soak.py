"""100k calls against servers of which 20 % of the replies are slow, 5 % fail and 1 % never come.

Checks, and says so: every call ends within its deadline, sockets are bounded, memory is flat, no reply is lost or
crossed. Usage: python benchmarks/search/soak.py [calls]
"""

import asyncio
import os
import random
import sys
import time
from collections import Counter

import psutil

from rlinf_plugins.testing.retrieval_server import Response, ScriptedRetrievalServer, passages
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, Query, Success

DEADLINE = 5.0
CONNECTIONS = 8


def script(rng: random.Random):
    """Return the misbehaviour: each request draws its own."""

    def decide(queries: list[str], number: int) -> Response:
        draw = rng.random()
        if draw < 0.01:
            return Response(never=True)
        if draw < 0.06:
            kinds = [
                Response(status=500),
                Response(status=503),
                Response(body=b"<html>"),
                Response(body=passages([*queries, "x"])),
            ]
            return rng.choice(kinds)
        return Response(body=passages(queries), delay_s=0.2 if draw < 0.26 else 0.0)

    return decide


async def main(calls: int, seed: int) -> None:
    """Run the soak and print its figures."""
    rng = random.Random(seed)
    config = PoolConfig(
        timeout_s=DEADLINE,
        attempt_timeout_s=1.0,
        batch=BatchConfig(max_batch=16, max_inflight=CONNECTIONS * 2),
        cache=CacheConfig(entries=2000),
    )
    process, outcomes, memory = psutil.Process(), Counter(), []
    worst = crossed = done = 0
    sockets = 0
    async with ScriptedRetrievalServer(script(rng)) as one, ScriptedRetrievalServer(script(rng)) as two:
        replicas = [HttpSearchTool(HttpConfig(url=s.url, connections=CONNECTIONS)) for s in (one, two)]
        pool = ToolPool(replicas, config)

        async def trajectory(number: int, turns: int) -> None:
            nonlocal worst, crossed, done
            for turn in range(turns):
                text = f"query {rng.randrange(5000) if rng.random() < 0.6 else (number, turn)}"
                begin = time.perf_counter()
                outcome = await pool.call(Query(text), tenant=("train", "val")[number % 2])
                worst = max(worst, time.perf_counter() - begin)
                done += 1
                if isinstance(outcome, Success):
                    crossed += [p.id for p in outcome.value] != [f"{text}#{rank}" for rank in range(3)]
                    outcomes[outcome.source.value] += 1
                elif isinstance(outcome, Failure):
                    outcomes[outcome.kind.value] += 1

        async def watch() -> None:
            nonlocal sockets
            while True:
                await asyncio.sleep(2.0)
                memory.append(process.memory_info().rss / 2**20)
                sockets = max(sockets, one.open_connections + two.open_connections)

        watcher = asyncio.ensure_future(watch())
        begin, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(trajectory(i, calls // 500) for i in range(500)))
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        watcher.cancel()
        left = (len(pool._flights), len(pool._held), len(pool._queue))
        await pool.close()
    half = len(memory) // 2
    print(f"seed {seed}: {done} calls in {wall:.0f} s, {1e3 * cpu / done:.3f} CPU ms a call with both servers")
    print(f"outcomes {dict(outcomes)}")
    print(f"worst call {worst:.2f} s against a deadline of {DEADLINE:.0f} s")
    print(f"most sockets open {max(sockets, one.peak_connections + two.peak_connections)} of {2 * CONNECTIONS} allowed")
    print(f"memory MB: at half {memory[half]:.0f}, at the end {memory[-1]:.0f}")
    print(f"lost {calls // 500 * 500 - done}, crossed {crossed}, left behind {left}")
    if crossed or worst > DEADLINE + 1.0 or any(left):
        sys.exit("the soak failed")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, int(os.environ.get("SEED", "0"))))
