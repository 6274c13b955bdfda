"""The asyncio host: grants wake their waiter, cancelled waits leave nothing behind, one timer serves all deadlines."""

import asyncio

import pytest

from rlinf_plugins.core.errors import LockCancelledError, LockTimeoutError
from rlinf_plugins.scheduler.lock.manager import LockManager
from rlinf_plugins.scheduler.lock.service import LockService
from rlinf_plugins.scheduler.lock.types import Lease


@pytest.fixture
def make():
    made = []

    def build(**options):
        service = LockService(LockManager({"d0": 10, "d1": 10}, **options))
        made.append(service)
        return service

    yield build
    for service in made:
        service.close()


async def started(coroutine) -> asyncio.Task:
    """Start ``coroutine`` and let it run to its first wait."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task


async def test_a_waiter_is_woken_by_the_release(make):
    lock = make()
    a = await lock.acquire("a", ["d0"])
    waiter = await started(lock.acquire("b", ["d0"]))
    assert not waiter.done()
    lock.release(a.token, "a")
    assert (await waiter).owner == "b"


async def test_a_timeout_fires_by_itself(make):
    lock = make()
    await lock.acquire("a", ["d0"])
    with pytest.raises(LockTimeoutError, match="d0 held by a"):
        await lock.acquire("b", ["d0"], timeout_s=0.02)
    assert lock.state().waiters == ()


async def test_a_silent_session_is_found_by_itself(make):
    lost = []
    lock = LockService(LockManager({"d0": 1}, ttl_s=0.1), lambda lease, reason: lost.append((lease, reason)))
    a = await lock.acquire("a", ["d0"], session="dead")
    waiter = await started(lock.acquire("b", ["d0"], session="alive"))
    beats = [0]

    async def keep_alive():
        while not waiter.done():
            lock.beat("alive", [])
            beats[0] += 1
            await asyncio.sleep(0.02)

    beating = asyncio.ensure_future(keep_alive())
    assert (await waiter).token > a.token
    await beating
    assert [lease for lease, _ in lost] == [a]
    lock.close()


async def test_a_cancelled_wait_leaves_the_queue(make):
    lock = make()
    a = await lock.acquire("a", ["d0"])
    waiter = await started(lock.acquire("b", ["d0"]))
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert lock.state().waiters == ()
    lock.release(a.token, "a")
    assert lock.state().holders == ()


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_wait_cancelled_in_the_moment_of_its_grant_gives_the_devices_back(make, cancel_first):
    lock = make()
    a = await lock.acquire("a", ["d0"])
    waiter = await started(lock.acquire("b", ["d0"]))
    if cancel_first:
        waiter.cancel()
        lock.release(a.token, "a")
    else:
        lock.release(a.token, "a")
        waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert lock.state().free == ("d0", "d1")


async def test_withdraw_undoes_a_request_in_any_state(make):
    lock = make()
    a = await lock.acquire("a", ["d0"])
    waiter = await started(lock.acquire("b", ["d0"]))
    lock.withdraw("b", 0)
    with pytest.raises(LockCancelledError):
        await waiter
    lock.withdraw("a", 1)
    assert lock.state().holders[0].owner == "a"
    lock.withdraw("a", 0)
    assert lock.state().holders == ()
    lock.withdraw("nobody", 0)
    assert a.token


async def test_closing_refuses_those_who_wait(make):
    lock = make()
    await lock.acquire("a", ["d0"])
    waiter = await started(lock.acquire("b", ["d0"]))
    lock.close()
    with pytest.raises(LockCancelledError, match="closed"):
        await waiter


def old_lease(token=7, owner="a"):
    return Lease(token, owner, owner, frozenset(["d0"]), False, 0)


async def test_heartbeats_bring_leases_over_a_restart(make):
    lock = make(recovery_s=0.1)
    assert lock.beat("a", [(old_lease(), 1)]) == {7}
    other = await started(lock.acquire("b", ["d0"], session="a"))
    lock.release(7, "a")
    assert not other.done(), "nothing is granted before all had time to come forward"
    assert (await other).token > 7


async def test_a_late_heartbeat_does_not_revive_a_released_lease(make):
    lock = make(recovery_s=60.0)
    assert lock.beat("a", [(old_lease(), 1)]) == {7}, "sent before the release, arrived after the restart"
    assert lock.beat("a", []) == frozenset(), "the next one does not mention it"
    assert lock.state().holders == ()


async def test_too_late_to_come_forward(make):
    lock = make()
    assert lock.beat("a", [(old_lease(), 1)]) == frozenset()
