"""The Ray service: joins across workers, fair tenants, an actor that dies."""

import asyncio
import os
import signal
import sys

import pytest
import ray

from rlinf_plugins.tools.autoscale import AutoscaleConfig
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Source, Success
from rlinf_plugins.tools.retry import RetryConfig
from rlinf_plugins.tools.service import ServiceConfig, ToolService
from rlinf_plugins.tools.tool import Tool

# The actors cannot import a test module; its classes travel with them.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Remote(Tool[str, str]):
    """Tells which process ran it; fails and counts as asked."""

    def __init__(self):
        self.batches = 0

    def key(self, request):
        return request

    def check(self, request):
        return None if request else Failure(kind=FailureKind.INVALID_REQUEST, message="empty")

    async def run(self, requests, timeout_s):
        self.batches += 1
        if "slow" in requests:
            await asyncio.sleep(3600)
        if any(r.startswith("pause") for r in requests):
            await asyncio.sleep(0.03)
        return [
            Failure(kind=FailureKind.STATUS, message="no", retryable=True)
            if r == "bad"
            else Success(f"{r}:{os.getpid()}:{self.batches}")
            for r in requests
        ]


def service(name, shards=1, **pool):
    pool = PoolConfig(retry=RetryConfig(retries=0), **pool)
    return ToolService(Remote(), Remote, ServiceConfig(name=name, shards=shards), pool)


async def test_calls_come_back_and_equal_ones_are_shared_across_clients(ray_session):
    one, two = service("shared", 2), service("shared", 2)
    first = await asyncio.gather(*(one.call(f"q{i}", tenant=f"t{i % 2}") for i in range(40)))
    again = await asyncio.gather(*(two.call(f"q{i}") for i in range(40)))
    assert [o.value.split(":")[0] for o in first] == [f"q{i}" for i in range(40)]
    assert [o.value for o in again] == [o.value for o in first]
    assert {o.source for o in again} == {Source.CACHED}
    assert len({o.value.split(":")[1] for o in first}) == 2
    assert sum(s["batches"] for s in one.snapshot().values()) <= 6
    await one.close()
    await two.close()


async def test_failures_keep_their_type_across_processes(ray_session):
    client = service("failures", batch=BatchConfig(max_batch=1, max_inflight=8))
    bad, good, empty, slow = await asyncio.gather(
        client.call("bad"), client.call("good"), client.call(""), client.call("slow", timeout_s=2.0)
    )
    assert bad.kind is FailureKind.STATUS
    assert isinstance(good, Success)
    assert empty.kind is FailureKind.INVALID_REQUEST
    assert slow.kind in (FailureKind.TIMEOUT, FailureKind.DEADLINE)
    await client.close()


async def test_a_killed_actor_is_replaced(ray_session):
    client = service("killed", timeout_s=60.0)
    pid = int((await client.call("a")).value.split(":")[1])
    os.kill(pid, signal.SIGKILL)
    outcome = await client.call("b")
    assert isinstance(outcome, Success), outcome
    assert int(outcome.value.split(":")[1]) != pid
    await client.close()


async def until_it_fails(call):
    for _ in range(400):
        await call()
        await asyncio.sleep(0.05)


async def test_it_grows_while_calls_wait_and_gives_actors_up_when_it_is_quiet(ray_session):
    autoscale = AutoscaleConfig(max_shards=2, grow_wait_s=0.05, shrink_wait_s=0.01, window_s=0.2, quiet_s=0.5)
    batch = BatchConfig(max_batch=1, max_inflight=1)
    config = ServiceConfig(name="grows", autoscale=autoscale)
    client = ToolService(Remote(), Remote, config, PoolConfig(batch=batch, timeout_s=60.0))
    pids = set()
    for wave in range(100):
        outcomes = await asyncio.gather(*(client.call(f"pause {wave} {i}") for i in range(12)))
        assert all(isinstance(o, Success) for o in outcomes), outcomes
        pids |= {o.value.split(":")[1] for o in outcomes}
        if client.shards == 2 and len(pids) == 2:
            break
    assert client.shards == len(pids) == 2
    extra = ray.get_actor("grows-1")
    for _ in range(200):
        await asyncio.sleep(0.05)  # quiet: time passes, now and then a call
        await client.call("calm")
        if client.shards == 1:
            break
    assert client.shards == 1
    with pytest.raises(ray.exceptions.RayActorError):
        await until_it_fails(extra.snapshot.remote)  # does not count as use
    again = await asyncio.gather(*(client.call(f"after {i}") for i in range(12)))
    assert all(isinstance(o, Success) for o in again)
    await client.close()
