"""A call to the lock through Ray against a bare call to an empty actor, in one run.

    python benchmarks/lock/through_ray.py [calls]

Both actors are asyncio actors with the same concurrency. Alternating rounds; the ratio is of medians over all calls,
since other processes of the machine take their share of the wall clock.
"""

import statistics
import sys
import time

import ray

from rlinf_plugins.scheduler.lock.client import DeviceLock
from rlinf_plugins.scheduler.lock.ray_host import start_lock

ROUNDS = 8


class Bare:
    """The least an actor can do."""

    async def call(self) -> None:
        """Return at once."""


def timed(call, times: list[float], count: int) -> None:
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 250
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    for size in (1, 64, 512):
        names = frozenset(f"gpu:{i}" for i in range(size))
        lock = DeviceLock(start_lock(dict.fromkeys(names, 1), name=f"lock-{size}"), "bench")
        bare = ray.remote(Bare).options(num_cpus=0, max_concurrency=100_000).remote()
        ray.get(bare.call.remote())

        def bare_call(actor=bare) -> None:
            ray.get(actor.call.remote())

        def bare_pair(actor=bare) -> None:
            ray.get(actor.call.remote())
            ray.get(actor.call.remote())

        def lock_pair(client=lock, devices=names) -> None:
            client.release(client.acquire(devices))

        timed(lock_pair, [], 50)
        timed(bare_call, [], 50)
        pairs, locks = [], []
        for _ in range(ROUNDS):
            timed(bare_pair, pairs, calls // ROUNDS)
            timed(lock_pair, locks, calls // ROUNDS)
        theirs, ours = statistics.median(pairs) * 1e6, statistics.median(locks) * 1e6
        print(
            f"{size:4} devices: two bare calls {theirs:7.0f} us, acquire + release {ours:7.0f} us, {ours / theirs:.2f}x"
        )
        lock.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
