"""A pool of simulators takes turns with others on a device, and loses no episode."""

import asyncio
import threading

import numpy as np
import pytest

from rlinf_plugins.core.errors import ExceedsCapacityError, SnapshotError, StaleTokenError
from rlinf_plugins.envs import InitialState
from rlinf_plugins.envs.resident import EnvPoolResident
from rlinf_plugins.scheduler.lock.fence import MemoryFence, Permit
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident
from rlinf_plugins.testing.envs import NullFactory, ToyFactory

PERMIT = Permit({"d": 5}, "test")


def starts(*trials):
    return [InitialState(task=0, trial=trial) for trial in trials]


async def test_pool_and_policy_take_turns_and_episodes_go_on(make_pool):
    pool = make_pool(ToyFactory(), 2)
    fence, devices, capacity = MemoryFence(), VirtualDevices({"d": 100}), {"d": 100}
    envs = EnvPoolResident("envs", pool, {"d": 60}, fence)
    assert isinstance(envs, Resident)
    switcher = Switcher(LocalLock(capacity), capacity)
    await switcher.add(envs)
    await switcher.add(VirtualResident("actor", {"d": 70}, devices, fence))
    async with switcher.use("envs"):
        pool.reset(starts(0, 1))
        before = pool.step_chunk(np.full((2, 2, 3), 0.1))
    async with switcher.use("actor"):
        assert not switcher.is_on("envs")
        assert await envs.resident_bytes() == {"d": 0}
        assert pool.stats()["starts"] == 2
    async with switcher.use("envs"):
        after = pool.step_chunk(np.full((2, 1, 3), 0.1))
    assert after.valid.all()
    assert not np.array_equal(before.observation["states"], after.observation["states"])
    assert not switcher.is_on("actor")
    found = pool.stats()
    assert (found["starts"], found["episodes_begun"], found["episodes_closed"]) == (4, 2, 0)  # the same went on


async def test_a_command_under_way_is_waited_for(make_pool):
    pool = make_pool(ToyFactory(), 1)
    resident = EnvPoolResident("envs", pool, {"d": 60}, MemoryFence())
    pool.reset(starts(0))
    pool.send(np.zeros((1, 1, 3)), [0])
    draining = asyncio.create_task(resident.drain())
    await asyncio.sleep(0)
    assert not draining.done(), "the answer was not taken in yet"
    reader = threading.Thread(target=pool.recv)
    reader.start()
    await draining
    reader.join()
    await resident.offload(PERMIT)
    assert await resident.resident_bytes() == {"d": 0}


async def test_a_stale_permit_ends_nothing(make_pool):
    pool, fence = make_pool(ToyFactory(), 1), MemoryFence()
    resident = EnvPoolResident("envs", pool, {"d": 60}, fence)
    fence.seal(Permit({"d": 6}, "heir"))
    with pytest.raises(StaleTokenError):
        await resident.offload(PERMIT)
    assert await resident.resident_bytes() == {"d": 60}


async def test_an_episode_that_cannot_be_saved_keeps_the_device(make_pool):
    pool, capacity = make_pool(NullFactory(), 1), {"d": 100}
    pool.reset(starts(0))
    fence = MemoryFence()
    switcher = Switcher(LocalLock(capacity), capacity)
    await switcher.add(EnvPoolResident("envs", pool, {"d": 60}, fence))
    with pytest.raises(SnapshotError):
        await switcher.evict("envs")
    async with switcher.use("envs"):
        assert pool.step_chunk(np.zeros((1, 1, pool.spec.action_dim))).valid.all()
    assert switcher.budget.used("d") == 60, "its bytes are still there, and nobody is put on top"
    with pytest.raises(ExceedsCapacityError, match="can never run"):
        await switcher.add(EnvPoolResident("more", pool, {"d": 101}, fence))
