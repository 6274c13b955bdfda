"""Pools over toy environments, and what must be left behind when they are gone: nothing."""

import gc
import os

import psutil
import pytest

from rlinf_plugins.core.supervision import RestartPolicy
from rlinf_plugins.envs import Deadlines, EnvPool, PoolConfig


@pytest.fixture
def quick() -> PoolConfig:
    """Options with short deadlines, so that a hang is found fast; far above what a toy needs."""
    return PoolConfig(
        deadlines=Deadlines(start=30.0, reset=3.0, step=1.0, snapshot=3.0, close=3.0, heartbeat=0.2),
        restart=RestartPolicy(max_failures=3, first_delay_s=0.05, max_delay_s=0.1),
    )


@pytest.fixture
def make_pool(quick):
    """Returns a function that makes pools; afterwards they are closed and nothing of them may be left."""
    pools = []
    before = set(os.listdir("/proc/self/fd"))

    def make(factory, num_envs=1, config=None, **options):
        pools.append(EnvPool(factory, num_envs, config or quick, **options))
        return pools[-1]

    yield make
    while pools:
        pools.pop().close()
    gc.collect()  # shared memory lives as long as an array over it
    assert not [child for child in psutil.Process().children(recursive=True) if _is_worker(child)]
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2, "descriptors leak"  # an event loop's may linger


def _is_worker(process) -> bool:
    try:
        return "run_target" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
