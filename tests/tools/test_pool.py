"""The pool against scripted tools and a scripted server."""

import asyncio
import random
from collections import Counter

import pytest

from rlinf_plugins.core.errors import ConfigError, PoolClosedError
from rlinf_plugins.testing.retrieval_server import Response, ScriptedRetrievalServer, passages
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.breaker import BreakerConfig
from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.hedge import HedgeConfig
from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Query, Source, Success
from rlinf_plugins.tools.retry import RetryConfig
from rlinf_plugins.tools.tool import Tool

NO_CACHE = CacheConfig(entries=0)
FAST_RETRY = RetryConfig(retries=2, base_s=0.001, cap_s=0.002)


class Echo(Tool[str, str]):
    """Answers with its request; waits for its gate where one is given; fails on requests that begin with 'bad'."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.gate = gate
        self.batches: list[list[str]] = []
        self.running = 0
        self.closed = False

    def key(self, request):
        return request

    async def run(self, requests, timeout_s):
        self.batches.append(list(requests))
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.running -= 1
        if any(r.startswith("poison") for r in requests):
            raise RuntimeError("poison")
        return [
            Failure(kind=FailureKind.TOOL_ERROR, message=r) if r.startswith("bad") else Success(r.upper())
            for r in requests
        ]

    async def close(self):
        self.closed = True


def values(outcomes):
    return [o.value if isinstance(o, Success) else o.kind for o in outcomes]


async def test_concurrent_calls_leave_in_one_batch_and_come_back_to_their_callers():
    tool = Echo()
    pool = ToolPool(tool)
    outcomes = await pool.call_many([f"q{i}" for i in range(50)])
    assert values(outcomes) == [f"Q{i}" for i in range(50)]
    assert len(tool.batches) == 1


async def test_batches_respect_their_limits():
    gate = asyncio.Event()
    tool = Echo(gate)
    pool = ToolPool(tool, PoolConfig(batch=BatchConfig(max_batch=4, max_inflight=2)))
    calls = asyncio.ensure_future(pool.call_many([f"q{i}" for i in range(20)]))
    while tool.running < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert tool.running == 2
    gate.set()
    assert values(await calls) == [f"Q{i}" for i in range(20)]
    assert max(map(len, tool.batches)) == 4


async def test_equal_calls_share_one_execution_then_the_cache():
    tool = Echo()
    pool = ToolPool(tool)
    first = await pool.call_many(["a", "a", "a", "b"])
    assert Counter(o.source for o in first) == {Source.FETCHED: 2, Source.JOINED: 2}
    again = await pool.call("a")
    assert again == Success("A", Source.CACHED)
    assert tool.batches == [["a", "b"]]
    assert pool.snapshot()["join_ratio"] == pytest.approx(0.4)


async def test_sharing_and_cache_can_be_turned_off():
    tool = Echo()
    pool = ToolPool(tool, PoolConfig(single_flight=False, cache=NO_CACHE))
    await pool.call_many(["a", "a"])
    await pool.call("a")
    assert tool.batches == [["a", "a"], ["a"]]


async def test_another_version_of_the_data_is_fetched_anew():
    tool = Echo()
    pool = ToolPool(tool)
    await pool.call("a")
    tool.version = "2"
    assert (await pool.call("a")).source is Source.FETCHED


async def test_failures_are_not_cached_and_hurt_nobody_else():
    tool = Echo()
    pool = ToolPool(tool)
    outcomes = await pool.call_many(["a", "bad", "b"])
    assert values(outcomes) == ["A", FailureKind.TOOL_ERROR, "B"]
    await pool.call("bad")
    assert tool.batches == [["a", "bad", "b"], ["bad"]]


async def test_a_call_that_breaks_its_whole_batch_is_isolated():
    tool = Echo()
    pool = ToolPool(tool, PoolConfig(retry=RetryConfig(retries=0), breaker=BreakerConfig(failures=0)))
    requests = [f"q{i}" for i in range(64)]
    requests[17] = "poison"
    outcomes = await pool.call_many(requests)
    failed = [i for i, o in enumerate(outcomes) if isinstance(o, Failure)]
    assert failed == [17]
    assert outcomes[17].kind is FailureKind.TOOL_ERROR
    assert "poison" in outcomes[17].message
    assert len(tool.batches) <= 13  # the batch, then two per halving


async def test_every_call_ends_by_its_own_deadline_even_if_the_tool_never_returns():
    pool = ToolPool(Echo(asyncio.Event()))
    loop = asyncio.get_running_loop()
    start = loop.time()
    short, long = await asyncio.gather(pool.call("a", timeout_s=0.05), pool.call("a", timeout_s=0.15))
    assert (short.kind, long.kind) == (FailureKind.DEADLINE, FailureKind.DEADLINE)
    assert loop.time() - start < 1.0
    await pool.close()


async def test_calls_nobody_waits_for_any_more_are_not_sent():
    gate = asyncio.Event()
    tool = Echo(gate)
    pool = ToolPool(tool, PoolConfig(batch=BatchConfig(max_batch=1, max_inflight=1)))
    first = asyncio.ensure_future(pool.call("a"))
    while not tool.running:
        await asyncio.sleep(0)
    assert (await pool.call("late", timeout_s=0.01)).kind is FailureKind.DEADLINE
    gate.set()
    await first
    assert values([await pool.call("late")]) == ["LATE"]
    assert tool.batches == [["a"], ["late"]]


async def test_a_cancelled_caller_does_not_cancel_the_others():
    gate = asyncio.Event()
    pool = ToolPool(Echo(gate))
    one, two = asyncio.ensure_future(pool.call("a")), asyncio.ensure_future(pool.call("a"))
    await asyncio.sleep(0)
    one.cancel()
    gate.set()
    assert values([await two]) == ["A"]
    assert one.cancelled() or one.done()


async def test_a_full_queue_refuses_with_a_type():
    gate = asyncio.Event()
    pool = ToolPool(Echo(gate), PoolConfig(queue=2, batch=BatchConfig(max_batch=1, max_inflight=1)))
    calls = [asyncio.ensure_future(pool.call(f"q{i}")) for i in range(6)]
    await asyncio.sleep(0.01)
    gate.set()
    outcomes = await asyncio.gather(*calls)
    kinds = Counter("ok" if isinstance(o, Success) else o.kind for o in outcomes)
    assert kinds[FailureKind.OVERLOADED] >= 3
    assert kinds["ok"] + kinds[FailureKind.OVERLOADED] == 6


async def test_closing_fails_what_waits_and_closes_the_tool():
    tool = Echo(asyncio.Event())
    pool = ToolPool(tool, PoolConfig(batch=BatchConfig(max_batch=1, max_inflight=1)))
    calls = [asyncio.ensure_future(pool.call(f"q{i}")) for i in range(3)]
    while not tool.running:
        await asyncio.sleep(0)
    await pool.close()
    await pool.close()
    assert set(values(await asyncio.gather(*calls))) == {FailureKind.CLOSED}
    assert tool.closed
    with pytest.raises(PoolClosedError):
        await pool.call("a")


async def test_wrong_number_of_outcomes_is_a_bad_reply():
    class Short(Echo):
        async def run(self, requests, timeout_s):
            return [Success("x")] * (len(requests) - 1 or 2)

    pool = ToolPool(Short(), PoolConfig(retry=RetryConfig(retries=0)))
    assert set(values(await pool.call_many(["a", "b"]))) == {FailureKind.BAD_REPLY}


def test_a_pool_without_a_replica_is_refused():
    with pytest.raises(ConfigError, match="at least one replica"):
        ToolPool([])


async def test_a_slow_replica_is_hedged_and_the_quick_one_wins():
    gate = asyncio.Event()
    slow, quick = Echo(), Echo()
    config = PoolConfig(
        cache=NO_CACHE, hedge=HedgeConfig(budget=1.0, min_samples=5, window=10), batch=BatchConfig(max_inflight=8)
    )
    pool = ToolPool([slow, quick], config)
    for i in range(10):
        await pool.call(f"warm{i}")
    slow.gate = gate  # from now on the first choice never answers
    outcome = await pool.call("a", timeout_s=5)
    assert outcome == Success("A", Source.FETCHED)
    assert pool.metrics.hedges == 1
    await pool.close()


async def test_a_failing_replica_is_left_alone_after_its_circuit_opens():
    def script(queries, number):
        return Response(status=500)

    config = PoolConfig(
        cache=NO_CACHE,
        retry=FAST_RETRY,
        breaker=BreakerConfig(failures=2, open_s=60, max_open_s=60),
        batch=BatchConfig(max_batch=1),
    )
    async with ScriptedRetrievalServer(script) as bad, ScriptedRetrievalServer() as good:
        pool = ToolPool([HttpSearchTool(HttpConfig(url=s.url)) for s in (bad, good)], config)
        outcomes = [await pool.call(Query(f"q{i}", 3)) for i in range(20)]
        assert all(isinstance(o, Success) for o in outcomes)
        assert len(bad.requests) == 2
        await pool.close()


async def test_retry_after_is_respected_and_retries_are_bounded():
    def script(queries, number):
        return Response(status=429, headers={"retry-after": "0"})

    async with ScriptedRetrievalServer(script) as server:
        pool = ToolPool(HttpSearchTool(HttpConfig(url=server.url)), PoolConfig(retry=FAST_RETRY))
        outcome = await pool.call(Query("a"))
        assert outcome.kind is FailureKind.OVERLOADED
        assert len(server.requests) == 3
        long = ToolPool(HttpSearchTool(HttpConfig(url=server.url)), PoolConfig(retry=RetryConfig(retries=0)))
        assert (await long.call(Query("b"))).retry_after_s == 0.0
        await pool.close()
        await long.close()


@pytest.mark.slow
async def test_soak_no_lost_or_crossed_reply(seed):
    """Slow, failing and silent servers: each call ends in time with its own answer or a failure."""
    rng = random.Random(seed)

    def script(queries, number):
        draw = rng.random()
        if draw < 0.01:
            return Response(never=True)
        if draw < 0.06:
            return rng.choice(
                [
                    Response(status=500),
                    Response(status=503),
                    Response(body=b"<html>"),
                    Response(body=passages([*queries, "x"])),
                ]
            )
        return Response(body=passages(queries), delay_s=0.05 if draw < 0.26 else 0.0)

    config = PoolConfig(timeout_s=3.0, attempt_timeout_s=0.3, retry=FAST_RETRY, batch=BatchConfig(max_batch=16))
    async with ScriptedRetrievalServer(script) as one, ScriptedRetrievalServer(script) as two:
        pool = ToolPool([HttpSearchTool(HttpConfig(url=s.url, connections=4)) for s in (one, two)], config)
        loop = asyncio.get_running_loop()

        async def trajectory(index):
            worst = 0.0
            for turn in range(20):
                text = f"query {rng.randrange(300) if rng.random() < 0.6 else (index, turn)}"
                start = loop.time()
                outcome = await pool.call(Query(text), tenant=f"t{index % 3}")
                worst = max(worst, loop.time() - start)
                if isinstance(outcome, Success):
                    assert [p.id for p in outcome.value] == [f"{text}#{rank}" for rank in range(3)]
                else:
                    assert outcome.kind in set(FailureKind)
            return worst

        worst = max(await asyncio.gather(*(trajectory(i) for i in range(200))))
        assert worst < 3.5
        assert one.peak_connections + two.peak_connections <= 8
        assert sum(pool.metrics.outcomes.values()) == 4000
        assert not pool._flights
        assert not pool._held
        await pool.close()
