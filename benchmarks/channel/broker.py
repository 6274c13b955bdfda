"""What the broker costs, in a Ray actor: CPU time per item, items per second, memory of one-shot keys.

    python benchmarks/channel/broker.py

CPU time is the broker process's own, so that other work on the machine does not count.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

ITEMS, BATCH, KEYS = 50_000, 256, 100_000


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(process: psutil.Process, work: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of the broker and wall seconds of ``work``."""
    start, wall = cpu(process), time.perf_counter()
    work()
    return cpu(process) - start, time.perf_counter() - wall


def put_all(channel: Any, count: int) -> None:
    with channel.producer().stream(window=4096) as stream:
        for index in range(count):
            stream.put({"index": index, "reward": 0.5})


def take_all(channel: Any, count: int) -> None:
    """Batches one after another, acknowledged with the next request."""
    consumer, left = channel.consumer(), count
    values = consumer.stream(ahead=BATCH)
    while left:
        next(values)
        left -= 1
    values.close()


def batches(consumer: Any, count: int) -> list[Any]:
    """The get alone: batches one after another, acknowledged later."""
    taken, left = [], count
    while left:
        taken.append(consumer.get_batch(min(BATCH * 4, left), fill=False))
        left -= len(taken[-1])
    return taken


def one_shot_keys(channel: Any, count: int) -> None:
    """Keys that are used once, a few hundred at a time."""
    from rlinf_plugins.scheduler.channel import Put

    producer, consumer = channel.producer(), channel.consumer()

    async def some(keys: list[str]) -> None:
        await producer.put_many_async([Put(key, key=key) for key in keys])
        await consumer.ack_async(*await asyncio.gather(*[consumer.get_async(key=key, timeout=60) for key in keys]))

    async def all_of_them() -> None:
        for start in range(0, count, 500):
            await some([f"once-{index}" for index in range(start, start + 500)])

    asyncio.run(all_of_them())


def main() -> None:
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    import ray

    from rlinf_plugins.scheduler.channel import Channel, ChannelConfig

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=200 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    channel = Channel.create("broker", ChannelConfig(max_items=ITEMS))
    process = psutil.Process(channel.stats()["pid"])
    per_item = []
    for _ in range(4):  # the first as a warm-up
        put, put_wall = measure(process, lambda: put_all(channel, ITEMS))
        take, take_wall = measure(process, lambda: take_all(channel, ITEMS))
        per_item.append((put + take) / ITEMS * 1e6)
        print(
            f"put {put / ITEMS * 1e6:5.1f} us  get+ack {take / ITEMS * 1e6:5.1f} us of CPU; "
            f"{ITEMS / put_wall:8.0f} puts/s, {ITEMS / take_wall:8.0f} gets/s"
        )
    print(f"put + get + ack, batched: {min(per_item[1:]):.1f} us of broker CPU an item")
    rates = []
    for _ in range(3):
        put_all(channel, ITEMS)
        consumer = channel.consumer()
        start = time.perf_counter()
        taken = batches(consumer, ITEMS)
        rates.append(ITEMS / (time.perf_counter() - start))
        consumer.ack(*taken)
    print(f"batched get alone: {max(rates):.0f} items/s")
    one_shot_keys(channel, 5000)
    before = process.memory_info().rss
    one_shot_keys(channel, KEYS)
    print(f"{KEYS} one-shot keys: RSS grew by {(process.memory_info().rss - before) / 1e6:.2f} MB")
    channel.destroy()


if __name__ == "__main__":
    main()
