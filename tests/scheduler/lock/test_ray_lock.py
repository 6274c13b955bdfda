"""The lock through Ray with real processes: killed, suspended and resumed in every role."""

import asyncio
import os
import signal
import uuid

import pytest

from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import (
    LockCancelledError,
    LockServiceError,
    LockTimeoutError,
    StaleTokenError,
    UnknownDeviceError,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TTL = 1.5
SLACK = 3.0  # what a busy machine may add to a deadline


@pytest.fixture
def lock_actor(ray_session):
    from rlinf_plugins.scheduler.lock.ray_host import LockOptions, start_lock

    actor = start_lock({"d0": 10, "d1": 10}, options=LockOptions(ttl_s=TTL), name=f"lock-{uuid.uuid4().hex}")
    ray_session.get(actor.introduce.remote())
    yield actor
    ray_session.kill(actor, no_restart=True)


@pytest.fixture
def client(lock_actor):
    from rlinf_plugins.scheduler.lock.client import DeviceLock

    made = DeviceLock(lock_actor, "driver")
    yield made
    made.close()


@pytest.fixture
def spawn(ray_session, lock_actor, tmp_path):
    """Start a worker process with its own client and the machine's fence."""
    folder = tmp_path / "fence"

    class Worker:
        def __init__(self, actor, name, folder):
            from pathlib import Path

            from rlinf_plugins.scheduler.lock.client import DeviceLock
            from rlinf_plugins.scheduler.lock.fence import FileFence

            self.fence = FileFence(Path(folder))
            self.lock = DeviceLock(actor, name, fence=self.fence)
            self.lease = None

        def pid(self):
            return os.getpid()

        def acquire(self, devices, timeout_s=60.0):
            self.lease = self.lock.acquire(devices, timeout_s=timeout_s)
            return self.lease.token

        def onload(self, moves):
            """Move bytes, as a resident does: under a permit that was made when the work began."""
            with self.fence.admit(self.permit, ["d0"]), open(moves, "a") as file:
                file.write(f"{self.lease.token}\n")

        def prepare(self):
            self.permit = self.lock.permit(self.lease)

        def release(self):
            self.lock.release(self.lease)

    workers = []

    def start(name):
        worker = ray_session.remote(Worker).options(num_cpus=0).remote(lock_actor, name, str(folder))
        workers.append((worker, ray_session.get(worker.pid.remote())))
        return workers[-1]

    yield start
    for worker, pid in workers:
        with_cont(pid)
        ray_session.kill(worker)


def with_cont(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def cause(ray_session, ref):
    try:
        ray_session.get(ref)
    except ray_session.exceptions.RayTaskError as error:
        return error.cause
    raise AssertionError("the call was expected to fail")


def test_errors_arrive_as_they_are(client):
    with pytest.raises(UnknownDeviceError, match=r"^unknown devices d7; the cluster has d0, d1$"):
        client.acquire(["d7"])
    with client.hold(["d0"]) as lease:
        with pytest.raises(LockTimeoutError, match=f"d0 held by {lease.owner}"):
            client.acquire(["d0"], owner="other", timeout_s=0.1)
        assert client.state().holders[0].token == lease.token
    with pytest.raises(StaleTokenError):
        client.release(lease)


def test_inner_entries_have_the_outer_ones_lease(client):
    with client.hold(["d0", "d1"]) as outer:
        with client.hold(["d1"]) as inner:
            assert inner == outer
        assert client.state().holders[0].count == 1
    assert client.state().holders == ()


async def test_awaited_calls_and_cancelled_waits(client):
    lease = await client.aacquire(["d0"])
    waiting = asyncio.ensure_future(client.aacquire(["d0", "d1"], owner="other"))
    while not (await client.astate()).waiters:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while (await client.astate()).waiters:
        await asyncio.sleep(0.01)
    await client.arelease(lease)
    async with client.ahold(["d0", "d1"], owner="other"):
        pass
    assert (await client.astate()).holders == ()


async def test_a_lease_that_the_fence_refuses_is_given_back(lock_actor, tmp_path):
    from rlinf_plugins.scheduler.lock.client import DeviceLock
    from rlinf_plugins.scheduler.lock.fence import FileFence, Permit

    fence = FileFence(tmp_path)
    fence.seal(Permit({"d0": 2**62}, "a later job"))
    client = DeviceLock(lock_actor, "driver", fence=fence)
    with pytest.raises(StaleTokenError, match="was there already"):
        client.acquire(["d0"])
    with pytest.raises(StaleTokenError, match="was there already"):
        await client.aacquire(["d0"])
    assert client.state().holders == ()
    client.close()


def test_a_lease_outlives_many_ttls_by_its_heartbeats(client):
    import threading

    lease = client.acquire(["d0"])
    with pytest.raises(LockTimeoutError):
        client.acquire(["d0"], owner="other", timeout_s=3 * TTL)
    assert client.permit(lease).tokens == {"d0": lease.token}
    assert [t.name for t in threading.enumerate() if t.name.startswith("lock-heartbeat")]
    client.release(lease)


def test_a_killed_holder_is_succeeded_within_one_ttl(ray_session, client, spawn):
    worker, pid = spawn("victim")
    token = ray_session.get(worker.acquire.remote(["d0"]))
    start = monotonic()
    os.kill(pid, signal.SIGKILL)
    lease = client.acquire(["d0"], timeout_s=TTL + SLACK)
    assert lease.token > token
    assert monotonic() - start < TTL + SLACK
    client.release(lease)


def test_a_death_reported_by_a_supervisor_needs_no_ttl(ray_session, client, spawn):
    worker, pid = spawn("victim")
    ray_session.get(worker.acquire.remote(["d0"]))
    os.kill(pid, signal.SIGKILL)
    client.report_death(client.state().holders[0].session, "actor died")
    client.release(client.acquire(["d0"], timeout_s=0.5))


def test_a_killed_waiter_leaves_the_queue_within_one_ttl(ray_session, client, spawn):
    lease = client.acquire(["d0"])
    worker, pid = spawn("victim")
    worker.acquire.remote(["d0"])
    while not client.state().waiters:
        pass
    os.kill(pid, signal.SIGKILL)
    start = monotonic()
    while client.state().waiters:
        assert monotonic() - start < TTL + SLACK
    client.release(lease)


def test_a_sleeper_is_succeeded_and_its_late_onload_refused(ray_session, client, spawn, tmp_path):
    moves = tmp_path / "moves"
    sleeper, pid = spawn("sleeper")
    heir, _ = spawn("heir")
    first = ray_session.get(sleeper.acquire.remote(["d0"]))
    ray_session.get(sleeper.prepare.remote())
    os.kill(pid, signal.SIGSTOP)
    late = sleeper.onload.remote(str(moves))  # runs in the sleeper the moment it wakes up
    second = ray_session.get(heir.acquire.remote(["d0"]))
    assert second > first
    ray_session.get(heir.prepare.remote())
    os.kill(pid, signal.SIGCONT)
    assert isinstance(cause(ray_session, late), StaleTokenError)
    ray_session.get(heir.onload.remote(str(moves)))
    assert moves.read_text() == f"{second}\n"
    assert isinstance(cause(ray_session, sleeper.release.remote()), StaleTokenError)


def test_a_suspended_waiter_does_not_get_the_devices_and_keep_them(ray_session, client, spawn):
    lease = client.acquire(["d0"])
    sleeper, pid = spawn("sleeper")
    waiting = sleeper.acquire.remote(["d0"])
    while not client.state().waiters:
        pass
    os.kill(pid, signal.SIGSTOP)
    client.release(lease)
    again = client.acquire(["d0"], timeout_s=TTL + SLACK)
    os.kill(pid, signal.SIGCONT)
    client.release(again)
    try:
        ray_session.get(waiting)  # the grant it slept through: its permit must be refused
    except (LockCancelledError, LockServiceError, StaleTokenError):
        return
    ray_session.get(sleeper.pid.remote())
    assert isinstance(cause(ray_session, sleeper.release.remote()), StaleTokenError)


def test_a_killed_lock_comes_back_with_its_leases(ray_session, lock_actor, client, spawn):
    import ray

    worker, _ = spawn("holder")
    token = ray_session.get(worker.acquire.remote(["d0"]))
    pid = ray_session.get(lock_actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    lease = client.acquire(["d1"], timeout_s=60.0)
    assert lease.token > token
    (holder,) = [h for h in client.state().holders if h.devices == ("d0",)]
    assert holder.token == token
    with pytest.raises(LockTimeoutError, match="d0 held by"):
        client.acquire(["d0"], owner="other", timeout_s=0.2)
    ray.get(worker.prepare.remote())
    ray.get(worker.release.remote())
    client.release(client.acquire(["d0"], owner="other", timeout_s=5.0))
    client.release(lease)


def test_a_killed_lock_takes_a_release_before_the_next_heartbeat(ray_session, lock_actor, client):
    lease = client.acquire(["d0"])
    pid = ray_session.get(lock_actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    assert client.release(lease)
    client.release(client.acquire(["d0"], owner="other", timeout_s=60.0))


def test_a_suspended_lock_blames_nobody(ray_session, lock_actor, client):
    lease = client.acquire(["d0"])
    pid = ray_session.get(lock_actor.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    start = monotonic()
    while True:
        try:
            client.permit(lease)
        except LockServiceError:
            break
    assert monotonic() - start < TTL + SLACK, "no answer means no permit"
    os.kill(pid, signal.SIGCONT)
    assert client.state().holders[0].token == lease.token
    while True:
        try:
            client.permit(lease)
            break
        except LockServiceError:
            assert monotonic() - start < 60.0
    client.release(lease)
