"""Streaming and ping-pong between two processes: this channel, RLinf's, Ray's queue, plain actor calls.

All run one after another in the same Ray session on the same machine, several times in turn, and the best of each is
compared, since other work on the machine only ever makes a run slower.

    python benchmarks/channel/compare.py --peer-path DIR

DIR is what ``pip install --no-deps --target DIR rlinf==0.3.0`` made; without it RLinf's channel is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = {"dict": (0, 300), "1 MB": (1 << 20, 80), "64 MB": (64 << 20, 10)}
"""Bytes of the tensor (0: a small dict) and items per run."""
SYSTEMS = ("ours", "rlinf", "queue", "raw")
BOUND = 16


def make_item(size: int) -> Any:
    if size == 0:
        return {"index": 1, "reward": 0.5, "text": "a short answer"}
    import torch

    return torch.zeros(size, dtype=torch.uint8)


def check(item: Any) -> None:
    """Touch what came, as a consumer would."""
    if not isinstance(item, dict):
        assert int(item[-1]) == 0


# --- this channel -----------------------------------------------------------------------------------------------


class _OursProducer:
    def stream(self, channel: Any, key: str, count: int, size: int, simple: bool) -> None:
        producer, item = channel.producer(), make_item(size)
        if simple:
            for _ in range(count):
                producer.put(item, key=key)
        else:
            with producer.stream() as stream:
                for _ in range(count):
                    stream.put(item, key=key)

    def ping(self, there: Any, back: Any, count: int, size: int) -> list[float]:
        producer, consumer, item = there.producer(), back.consumer(), make_item(size)
        return [_timed(lambda: _ping(producer, consumer, item)) for _ in range(count)]


class _OursConsumer:
    def stream(self, channel: Any, key: str, count: int, simple: bool) -> float:
        consumer = channel.consumer()
        if simple:
            return _rate(count, lambda: _get_and_ack(consumer, key))
        values = consumer.stream(ahead=64, key=key)
        rate = _rate(count, lambda: check(next(values)))
        values.close()
        return rate

    def pong(self, there: Any, back: Any, count: int) -> None:
        consumer, producer = there.consumer(), back.producer()
        for _ in range(count):
            with consumer.get() as delivery, producer.stream() as stream:
                stream.put(delivery.value)


def _ping(producer: Any, consumer: Any, item: Any) -> None:
    with producer.stream() as stream:
        stream.put(item)
        delivery = consumer.get()
    check(delivery.value)
    delivery.ack()


def _get_and_ack(consumer: Any, key: str) -> None:
    with consumer.get(key=key) as delivery:
        check(delivery.value)


def run_ours(repeat: int) -> dict[str, Any]:
    import ray

    from rlinf_plugins.scheduler.channel import Channel, ChannelConfig

    producer, consumer = ray.remote(_OursProducer).remote(), ray.remote(_OursConsumer).remote()
    results: dict[str, Any] = {}
    config = ChannelConfig(max_items=1024, max_bytes=1 << 30)
    there, back = Channel.create("there", config), Channel.create("back", config)
    for name, (size, count) in SIZES.items():
        for simple in (True, False):
            rates = []
            for index in range(repeat):
                key = f"{name}-{simple}-{index}"
                put = producer.stream.remote(there, key, count, size, simple)
                rates.append(ray.get(consumer.stream.remote(there, key, count, simple)))
                ray.get(put)
            results[f"{name} stream {'simple' if simple else 'best'}"] = max(rates)
        pong = consumer.pong.remote(there, back, count)
        times = ray.get(producer.ping.remote(there, back, count, size))
        ray.get(pong)
        results[f"{name} ping p50 ms"] = statistics.median(times) * 1e3
    there.destroy()
    back.destroy()
    return results


# --- RLinf's channel --------------------------------------------------------------------------------------------


def run_rlinf(repeat: int) -> dict[str, Any]:
    from rlinf.scheduler import Channel, Cluster, NodePlacementStrategy, Worker

    class Producer(Worker):
        def __init__(self) -> None:
            super().__init__()

        def stream(self, channel: Any, key: str, count: int, size: int, simple: bool) -> None:
            item, works = make_item(size), []
            for _ in range(count):
                if simple:
                    channel.put(item, key=key)
                else:
                    works.append(channel.put(item, key=key, async_op=True))
                    if len(works) >= BOUND:
                        works.pop(0).wait()
            for work in works:
                work.wait()

        def ping(self, there: Any, back: Any, count: int, size: int) -> list[float]:
            item = make_item(size)

            def once() -> None:
                there.put(item, async_op=True)
                check(back.get())

            return [_timed(once) for _ in range(count)]

    class Consumer(Worker):
        def __init__(self) -> None:
            super().__init__()

        def stream(self, channel: Any, key: str, count: int, simple: bool) -> float:
            return _rate(count, lambda: check(channel.get(key=key)))

        def pong(self, there: Any, back: Any, count: int) -> None:
            for _ in range(count):
                back.put(there.get())

    cluster = Cluster(num_nodes=1)
    placement = NodePlacementStrategy(node_ranks=[0])
    producer = Producer.create_group().launch(cluster, name="producer", placement_strategy=placement)
    consumer = Consumer.create_group().launch(cluster, name="consumer", placement_strategy=placement)
    results: dict[str, Any] = {}
    there, back = (Channel.create(name=way, maxsize=BOUND) for way in ("there", "back"))
    for name, (size, count) in SIZES.items():
        for simple in (True, False):
            rates = []
            for index in range(repeat):
                key = f"{name}-{simple}-{index}"
                put = producer.stream(there, key, count, size, simple)
                rates.append(consumer.stream(there, key, count, simple).wait()[0])
                put.wait()
            results[f"{name} stream {'simple' if simple else 'best'}"] = max(rates)
        pong = consumer.pong(there, back, count)
        times = producer.ping(there, back, count, size).wait()[0]
        pong.wait()
        results[f"{name} ping p50 ms"] = statistics.median(times) * 1e3
    return results


# --- Ray's queue and plain actor calls --------------------------------------------------------------------------


class _Mailbox:
    """The least a broker can be: an actor around an asyncio queue, no lease, no bound in bytes, no order of keys."""

    def __init__(self) -> None:
        import asyncio

        self._queue: asyncio.Queue[Any] = asyncio.Queue(BOUND)

    async def put(self, item: Any) -> None:
        await self._queue.put(item)

    async def get(self) -> Any:
        return await self._queue.get()


class _MailboxHandle:
    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def put(self, item: Any) -> None:
        import ray

        ray.get(self.actor.put.remote(item))

    def get(self) -> Any:
        import ray

        return ray.get(self.actor.get.remote())


class _PlainEnd:
    def put_all(self, queue: Any, count: int, size: int) -> None:
        item = make_item(size)
        for _ in range(count):
            queue.put(item)

    def get_all(self, queue: Any, count: int) -> float:
        return _rate(count, lambda: check(queue.get()))

    def ping(self, there: Any, back: Any, count: int, size: int) -> list[float]:
        item = make_item(size)

        def once() -> None:
            there.put(item)
            check(back.get())

        return [_timed(once) for _ in range(count)]

    def pong(self, there: Any, back: Any, count: int) -> None:
        for _ in range(count):
            back.put(there.get())


def run_plain(make: Callable[[], Any], repeat: int) -> dict[str, Any]:
    import ray

    first, second = (ray.remote(_PlainEnd).remote() for _ in range(2))
    results: dict[str, Any] = {}
    for name, (size, count) in SIZES.items():
        rates = []
        for _ in range(repeat):
            queue = make()
            put = first.put_all.remote(queue, count, size)
            rates.append(ray.get(second.get_all.remote(queue, count)))
            ray.get(put)
        results[f"{name} stream simple"] = results[f"{name} stream best"] = max(rates)
        there, back = make(), make()
        pong = second.pong.remote(there, back, count)
        times = ray.get(first.ping.remote(there, back, count, size))
        ray.get(pong)
        results[f"{name} ping p50 ms"] = statistics.median(times) * 1e3
    return results


# --- all of them ------------------------------------------------------------------------------------------------


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _rate(count: int, take: Callable[[], Any]) -> float:
    """Items per second, from the first that came to the last."""
    take()
    start = time.perf_counter()
    for _ in range(count - 1):
        take()
    return (count - 1) / (time.perf_counter() - start)


def run_one(system: str, repeat: int) -> dict[str, Any]:
    if system == "rlinf":
        return run_rlinf(repeat)
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, configure_logging=False)
    if system == "ours":
        return run_ours(repeat)
    if system == "queue":
        from ray.util.queue import Queue

        return run_plain(lambda: Queue(maxsize=BOUND, actor_options={"num_cpus": 0}), repeat)
    return run_plain(lambda: _MailboxHandle(ray.remote(_Mailbox).options(num_cpus=0).remote()), repeat)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-path", help="folder with rlinf==0.3.0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("RESULT " + json.dumps(run_one(options.one, options.repeat)), flush=True)
        return
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RLINF_CODE_WORKING_DIR="0", OMP_NUM_THREADS="1")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps Ray on the loopback interface
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, options.peer_path]))
    import ray

    context = ray.init(
        num_cpus=8,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=3 << 30,
        log_to_driver=False,
        configure_logging=False,
    )
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    best: dict[str, dict[str, float]] = {}
    systems = [s for s in options.systems if s != "rlinf" or options.peer_path]
    for _ in range(options.rounds):
        for system in systems:
            command = [sys.executable, __file__, "--one", system, "--repeat", str(options.repeat)]
            start = time.perf_counter()
            run = subprocess.run(command, capture_output=True, text=True, timeout=600)
            print(f"{system}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                print(f"{system} failed:\n{run.stdout[-2000:]}\n{run.stderr[-3000:]}", file=sys.stderr)
                continue
            for name, value in json.loads(lines[0][7:]).items():
                keep = min if "ping" in name else max
                row = best.setdefault(name, {})
                row[system] = keep(row.get(system, value), value)
    print_table(best, systems)


def print_table(best: dict[str, dict[str, float]], systems: list[str]) -> None:
    print(f"{'':24}" + "".join(f"{system:>10}" for system in systems) + "   ours/rlinf")
    for name, row in best.items():
        ratio = row["ours"] / row["rlinf"] if {"ours", "rlinf"} <= row.keys() else float("nan")
        cells = "".join(f"{row.get(system, float('nan')):>10.4g}" for system in systems)
        print(f"{name:24}{cells}{ratio:>13.3g}")


if __name__ == "__main__":
    main()
