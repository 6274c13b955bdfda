"""Acquire and release in process: ours against RLinf's lock manager, and against a plain asyncio.Lock per device.

    python benchmarks/lock/core.py

RLinf's lock is imported from an installed ``rlinf`` if there is one (its package need not be complete: only the file of
its lock manager is loaded, with stand-ins for the cluster it asks for the number of devices). CPU time, median of
rounds.
"""

import asyncio
import importlib.util
import pathlib
import statistics
import sys
import time
import types

from rlinf_plugins.scheduler.lock.manager import LockManager
from rlinf_plugins.scheduler.lock.service import LockService

SIZES = {1: 20_000, 8: 10_000, 64: 3_000, 512: 300}
ROUNDS = 7


def per_call(rounds: list[float], calls: int) -> float:
    return statistics.median(rounds) / calls * 1e6


def manager_us(size: int, calls: int, *, fresh_sets: bool, shared: bool = False) -> float:
    names = [f"gpu:{i}" for i in range(size)]
    lock = LockManager(dict.fromkeys(names, 80 << 30))
    devices = names if fresh_sets else frozenset(names)
    options = {"shared": True, "nbytes": 1 << 30} if shared else {}
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            lock.release(lock.acquire("worker", devices, **options).token, "worker")
        rounds.append(time.process_time() - start)
    return per_call(rounds, calls)


async def service_us(size: int, calls: int) -> float:
    names = frozenset(f"gpu:{i}" for i in range(size))
    lock = LockService(LockManager(dict.fromkeys(names, 80 << 30)))
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            lease = await lock.acquire("worker", names)
            lock.release(lease.token, "worker")
        rounds.append(time.process_time() - start)
    lock.close()
    return per_call(rounds, calls)


async def plain_us(size: int, calls: int) -> float:
    locks = [asyncio.Lock() for _ in range(size)]
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            for lock in locks:
                await lock.acquire()
            for lock in locks:
                lock.release()
        rounds.append(time.process_time() - start)
    return per_call(rounds, calls)


def rlinf_lock_module():
    spec = importlib.util.find_spec("rlinf")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = pathlib.Path(spec.submodule_search_locations[0]) / "scheduler/manager/lock_manager.py"
    if not file.exists():
        return None
    stand_ins = {
        "peer": types.ModuleType("peer"),
        "peer.manager": types.ModuleType("peer.manager"),
        "peer.cluster": types.SimpleNamespace(Cluster=None),
        "peer.manager.manager": types.SimpleNamespace(Manager=object),
        "peer.manager.worker_manager": types.SimpleNamespace(WorkerAddress=str),
    }
    stand_ins["peer"].__path__ = stand_ins["peer.manager"].__path__ = []
    sys.modules.update(stand_ins)
    spec = importlib.util.spec_from_file_location("peer.manager.lock_manager", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def rlinf_us(module, size: int, calls: int) -> float:
    module.Cluster = lambda: types.SimpleNamespace(num_accelerators=size)
    lock = module.DeviceLockManager()
    ids = list(range(size))
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(calls):
            await lock.acquire_devices("worker", ids)
            await lock.release_devices("worker", ids)
        rounds.append(time.process_time() - start)
    return per_call(rounds, calls)


def main() -> None:
    peer = rlinf_lock_module()
    columns = ("core", "core, new set", "core, shared", "asyncio host", "asyncio.Lock each", "RLinf", "RLinf / host")
    print("devices " + "".join(f"{column:>18}" for column in columns) + "   (us per acquire + release)")
    for size, calls in SIZES.items():
        few = max(20, calls // 20)
        row = [
            manager_us(size, calls, fresh_sets=False),
            manager_us(size, calls // 4, fresh_sets=True),
            manager_us(size, few, fresh_sets=False, shared=True),
            asyncio.run(service_us(size, calls // 2)),
            asyncio.run(plain_us(size, few)),
        ]
        theirs = asyncio.run(rlinf_us(peer, size, few)) if peer else float("nan")
        row += [theirs, theirs / row[3]]
        print(f"{size:7} " + "".join(f"{value:18.1f}" for value in row))


if __name__ == "__main__":
    main()
