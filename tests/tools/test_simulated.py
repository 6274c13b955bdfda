"""Hedging, breakers, deadlines and fairness of the whole pool, in simulated time and against oracles."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_plugins.testing.simulated_loop import run_simulated
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.breaker import BreakerConfig
from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.hedge import HedgeConfig
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Success
from rlinf_plugins.tools.retry import RetryConfig
from rlinf_plugins.tools.tool import Tool

BROKEN = Failure(kind=FailureKind.STATUS, message="500", whole_batch=True)


class Timed(Tool[int, str]):
    """Takes the seconds that its script gives for a request; negative ones end in a failure."""

    def __init__(self, script, label=""):
        self.script = script
        self.label = label
        self.started = []
        self.ended = []

    async def run(self, requests, timeout_s):
        self.started.append((requests[0], now()))
        try:
            seconds = max(abs(self.script(request)) for request in requests)
            await asyncio.sleep(seconds)
        finally:
            self.ended.append((requests[0], now()))
        return [BROKEN if self.script(request) < 0 else Success(self.label) for request in requests]


def now():
    return asyncio.get_running_loop().time()


def pool_of(tools, **config):
    defaults = {
        "timeout_s": 100.0,
        "attempt_timeout_s": 100.0,
        "cache": CacheConfig(entries=0),
        "retry": RetryConfig(retries=0),
        "breaker": BreakerConfig(failures=0),
    }
    return ToolPool(tools, PoolConfig(**{**defaults, **config}), clock=asyncio.get_running_loop().time)


calls = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60)


@given(calls, st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_a_hedge_starts_when_a_call_is_slow_and_the_first_reply_counts(times, budget):
    config = HedgeConfig(budget=budget, quantile=0.5, window=8, min_samples=4)
    # A thousandth per call apart, so that no two events fall together.
    times = [(a + i / 1000, b + i / 1000 + 1e-4) for i, (a, b) in enumerate(times)]

    async def main():
        first, second = Timed(lambda i: times[i][0], "first"), Timed(lambda i: times[i][1], "second")
        pool = pool_of([first, second], hedge=config)
        recent, tokens, hedges = [], 0.0, 0
        for number, (a, b) in enumerate(times):
            start = now()
            outcome = await pool.call(number)
            slow = sorted(recent[-8:])[min(8, len(recent)) // 2] if budget and len(recent) >= 4 else None
            if slow is not None and a > slow and tokens >= 1.0:
                tokens, hedges = tokens - 1.0, hedges + 1
                assert second.started[-1] == (number, pytest.approx(start + slow))
                winner, taken = ("second", slow + b) if slow + b < a else ("first", a)
                recent.append(b if winner == "second" else a)
                await asyncio.sleep(0)
                assert {n for n, _ in first.ended} == {n for n, _ in first.started}  # the loser was cancelled
            else:
                assert number not in [n for n, _ in second.started]
                winner, taken = "first", a
                recent.append(a)
            tokens = min(8.0, tokens + budget)
            assert outcome == Success(winner)
            assert now() - start == pytest.approx(taken)
            assert pool.metrics.hedges == hedges
        assert hedges <= budget * len(times)
        await pool.close()

    run_simulated(main())


def test_a_hedge_can_save_a_call_whose_first_reply_is_a_failure():
    async def main():
        first, second = Timed(lambda i: 1.0 if i < 10 else -5.0, "first"), Timed(lambda i: 6.0, "second")
        pool = pool_of([first, second], hedge=HedgeConfig(budget=1.0, min_samples=5, window=10))
        for number in range(10):
            await pool.call(number)
        start = now()
        assert await pool.call(10) == Success("second")
        assert now() - start == pytest.approx(7.0)  # slow after 1 s, then 6 s
        await pool.close()

    run_simulated(main())


@given(st.lists(st.sampled_from([1.0, -1.0, 40.0]), min_size=1, max_size=40))
def test_an_open_circuit_refuses_at_once_and_lets_one_probe_through(script):
    config = BreakerConfig(failures=2, open_s=8.0, max_open_s=16.0)

    async def main():
        tool = Timed(lambda i: script[i])
        pool = pool_of(tool, breaker=config, attempt_timeout_s=10.0)
        row, length, closed_until = 0, 8.0, None
        for number, seconds in enumerate(script):
            start = now()
            outcome = await pool.call(number)
            if closed_until is not None and start < closed_until:
                assert outcome.kind is FailureKind.UNAVAILABLE
                assert now() == start
                assert outcome.retry_after_s == pytest.approx(closed_until - start)
                await asyncio.sleep(3.0)
                continue
            probe = closed_until is not None
            assert tool.started[-1] == (number, start)
            if seconds == 1.0:
                assert isinstance(outcome, Success)
                row, length, closed_until = 0, 8.0, None
                continue
            assert outcome.kind is (FailureKind.STATUS if seconds < 0 else FailureKind.TIMEOUT)
            row += 1
            length = min(16.0, length * 2) if probe else length
            if probe or row >= 2:
                closed_until = now() + length
        await pool.close()

    run_simulated(main())


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 8), st.floats(0.1, 8)), min_size=1, max_size=40),
    st.integers(1, 3),
)
def test_every_call_ends_with_its_reply_or_by_its_deadline(plan, slots):
    """Each call: when it is made, how long its reply takes, how long it may take."""

    async def main():
        pool = pool_of(Timed(lambda i: plan[i][1]), batch=BatchConfig(max_batch=4, max_inflight=slots))

        async def one(number):
            at, _, allowed = plan[number]
            await asyncio.sleep(at)
            outcome = await pool.call(number, timeout_s=allowed)
            taken = now() - at
            if isinstance(outcome, Success):
                assert plan[number][1] - 1e-6 <= taken <= allowed + 1e-6
            else:
                assert outcome.kind in (FailureKind.DEADLINE, FailureKind.TIMEOUT)
                assert taken <= allowed + 1e-6

        await asyncio.gather(*(one(number) for number in range(len(plan))))
        await asyncio.sleep(20)  # attempts that nobody waits for any more end by themselves
        assert not pool._held
        assert pool._inflight == 0
        await pool.close()

    run_simulated(main())


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_flood_of_one_tenant_delays_another_by_the_weights_and_no_more(weight):
    async def main():
        batch = BatchConfig(max_batch=1, max_inflight=1)
        pool = pool_of(Timed(lambda i: 0.01), batch=batch, weights={"val": weight})
        flood = [asyncio.ensure_future(pool.call(i, tenant="train")) for i in range(1000)]
        await asyncio.sleep(1.0)
        start = now()
        late = await asyncio.gather(*(pool.call(1000 + i, tenant="val") for i in range(60)))
        assert all(isinstance(outcome, Success) for outcome in late)
        # 60 calls of a hundredth each, and the flood's share in between.
        assert now() - start == pytest.approx(0.6 * (1 + 1 / weight), abs=0.05)
        assert all(isinstance(outcome, Success) for outcome in await asyncio.gather(*flood))
        await pool.close()

    run_simulated(main())
