"""What tracing costs the broker: CPU time of the same calls with and without it, in turn, in one process.

    python benchmarks/channel/tracing.py

Batches of 256 small items are put, got and acknowledged. Every round runs both ways, in changing order; the median
of the rounds' ratios is printed, since other work on the machine disturbs a round by far more than what is measured.
"""

import asyncio
import statistics
import time

from rlinf_plugins.scheduler.channel import ChannelConfig
from rlinf_plugins.scheduler.channel.host import Host

BATCH, CALLS, ROUNDS = 256, 20, 200


class Ends:
    """A host with a producer and a consumer."""

    def __init__(self, trace: bool) -> None:
        self.host = Host(f"trace-{trace}", ChannelConfig(trace=trace))
        self.sent = self.asked = 0

    async def attach(self) -> None:
        """Attach both."""
        self.producer = (await self.host.call("attach_producer", ("p", "here", None))).handle
        self.consumer = (await self.host.call("attach_consumer", ("c", "default", "here", 1.0))).handle

    async def work(self) -> float:
        """CPU seconds of some batches."""
        rows = [("key", b"x" * 100, 1, 100, None, None, None)] * BATCH
        start = time.process_time()
        for _ in range(CALLS):
            await self.host.call("put", (self.producer, self.sent, rows, None))
            self.sent, self.asked = self.sent + BATCH, self.asked + 1
            request = ("key", self.asked, BATCH, None, True, None, None, False)
            _, batch = await self.host.call("get", (self.consumer, [], request, None))
            await self.host.call("ack", (self.consumer, [(batch[0], None)]))
        return time.process_time() - start


async def measure() -> None:
    ends = {trace: Ends(trace) for trace in (False, True)}
    for end in ends.values():
        await end.attach()
        await end.work()
    ratios = []
    for index in range(ROUNDS):
        seconds = {trace: await ends[trace].work() for trace in (bool(index % 2), not index % 2)}
        ratios.append(seconds[True] / seconds[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    quartiles = f"{100 * (low - 1):.1f} % and {100 * (high - 1):.1f} %"
    print(f"tracing adds {100 * (middle - 1):.1f} % of CPU (quartiles of {ROUNDS} rounds: {quartiles})")
    for end in ends.values():
        end.host.shut_down()


if __name__ == "__main__":
    asyncio.run(measure())
