"""CPU time of the pool itself per call: distinct calls, equal calls, and cached ones, on a tool that does nothing."""

import asyncio
import time

from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.queries import QueryTool
from rlinf_plugins.tools.results import Query, Success


class Nothing(QueryTool):
    """Answers at once."""

    async def run(self, requests, timeout_s):
        """Find nothing."""
        return [Success(()) for _ in requests]


async def measure(title: str, waves: list[list[Query]]) -> None:
    """Run the waves one after another and print CPU per call."""
    pool = ToolPool(Nothing())
    if title == "cached":
        await pool.call_many(waves[0])
    calls = sum(map(len, waves))
    begin = time.process_time()
    for wave in waves:
        await asyncio.gather(*(pool.call(query) for query in wave))
    print(f"{title:10s} {1e3 * (time.process_time() - begin) / calls:.4f} CPU ms a call", flush=True)


async def main() -> None:
    """Waves of 512 concurrent calls."""
    await measure("distinct", [[Query(f"wave {w} query {i}") for i in range(512)] for w in range(60)])
    await measure("equal", [[Query(f"wave {w}")] * 512 for w in range(60)])
    await measure("cached", [[Query(f"query {i}") for i in range(512)]] * 60)


asyncio.run(main())
