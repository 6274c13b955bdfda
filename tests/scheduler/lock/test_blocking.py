"""The switcher from plain threads."""

import threading

import pytest

from rlinf_plugins.core.errors import ExceedsCapacityError, ResidentStateError
from rlinf_plugins.scheduler.lock.blocking import BlockingSwitcher
from rlinf_plugins.scheduler.lock.fence import MemoryFence
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident


def build(sizes):
    devices, fence = VirtualDevices({"d0": 10}), MemoryFence()

    async def make():
        switcher = Switcher(LocalLock({"d0": 10}), {"d0": 10}, used_bytes=devices.used_bytes)
        for name, nbytes in sizes.items():
            await switcher.add(VirtualResident(name, {"d0": nbytes}, devices, fence))
        return switcher

    return BlockingSwitcher(make)


@pytest.fixture
def switcher():
    made = build({"actor": 6, "rollout": 8})
    yield made
    made.close()


def test_blocks_take_turns_between_threads(switcher):
    active, seen = [], []

    def work(name):
        for _ in range(20):
            with switcher.use(name):
                active.append(name)
                seen.append(tuple(active))
                assert switcher.is_on(name)
                active.remove(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("actor", "rollout")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 40
    assert all(len(entry) == 1 for entry in seen)


def test_errors_reach_the_caller_and_the_devices_are_given_back(switcher):
    with pytest.raises(ZeroDivisionError), switcher.use("actor"):
        raise ZeroDivisionError
    with switcher.use("rollout"), pytest.raises(ResidentStateError):
        switcher.evict("rollout")
    switcher.expect(["actor"])
    switcher.evict("rollout")
    assert not switcher.is_on("rollout")


def test_a_plan_that_cannot_work_is_refused_when_it_is_made():
    with pytest.raises(ExceedsCapacityError):
        build({"giant": 11})


def test_a_closed_switcher_says_so(switcher):
    switcher.close()
    with pytest.raises(ResidentStateError, match="closed"):
        switcher.evict("actor")
