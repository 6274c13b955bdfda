"""The state machines without I/O, on an injected clock."""

import random
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.batching import BatchConfig, BatchPolicy
from rlinf_plugins.tools.breaker import BreakerConfig, BreakerState, CircuitBreaker
from rlinf_plugins.tools.cache import CacheConfig, ResultCache
from rlinf_plugins.tools.fair_queue import FairQueue
from rlinf_plugins.tools.hedge import HedgeConfig, HedgePolicy
from rlinf_plugins.tools.metrics import Histogram
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.queries import QueryConfig, QueryRules
from rlinf_plugins.tools.results import Failure, FailureKind, Query
from rlinf_plugins.tools.retry import RetryConfig, retry_delay


def always(item):
    return True


class BreakerMachine(RuleBasedStateMachine):
    """Against a model in words: open after N failures in a row, one probe at a time, longer after each failed probe."""

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.breaker = CircuitBreaker(BreakerConfig(failures=3, open_s=1.0, max_open_s=4.0), self.clock)
        self.row = 0
        self.opened_at = None
        self.length = 1.0
        self.probe = False

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(good=st.sampled_from(["success", "failure", "abandon"]))
    def call(self, good):
        closed = self.opened_at is None
        ready = closed or self.clock() >= self.opened_at + self.length
        assert self.breaker.can_enter() == ready
        assert self.breaker.enter() == ready
        if not ready:
            return
        if not closed:
            assert not self.breaker.can_enter()  # the probe's place is taken
        getattr(self.breaker, good)()
        if good == "success":
            self.row, self.opened_at, self.length = 0, None, 1.0
        elif good == "failure":
            self.row += 1
            if not closed:
                self.length = min(4.0, self.length * 2)
                self.opened_at = self.clock()
            elif self.row >= 3:
                self.opened_at = self.clock()

    @invariant()
    def states_agree(self):
        if self.opened_at is None:
            assert self.breaker.state is BreakerState.CLOSED
            assert self.breaker.retry_after_s == 0
        else:
            left = self.opened_at + self.length - self.clock()
            assert self.breaker.state is (BreakerState.OPEN if left > 0 else BreakerState.HALF_OPEN)
            assert self.breaker.retry_after_s == pytest.approx(max(0.0, left))


TestBreaker = BreakerMachine.TestCase


def test_a_breaker_can_be_turned_off():
    breaker = CircuitBreaker(BreakerConfig(failures=0), ManualClock())
    for _ in range(100):
        breaker.failure()
    assert breaker.enter()


class QueueMachine(RuleBasedStateMachine):
    """Against per-tenant FIFO lists: nothing is lost, duplicated or reordered within a tenant."""

    def __init__(self):
        super().__init__()
        self.queue = FairQueue(6, {"a": 2.0})
        self.model = {}
        self.next = 0

    @rule(tenant=st.sampled_from("abc"))
    def push(self, tenant):
        self.next += 1
        full = len(self.queue) == 6
        admitted, displaced = self.queue.push(tenant, (tenant, self.next))
        if displaced is not None:
            assert full
            assert displaced[0] != tenant
            assert self.model[displaced[0]].pop() == displaced
        assert admitted or full
        if admitted:
            self.model.setdefault(tenant, deque()).append((tenant, self.next))

    @rule(count=st.integers(1, 4), odd_only=st.booleans())
    def pop(self, count, odd_only):
        def alive(item):
            return not odd_only or item[1] % 2 == 1

        before = len(self.queue)
        taken = self.queue.pop(count, alive)
        assert len(taken) <= count
        for item in taken:
            lane = self.model[item[0]]
            while not alive(lane[0]):
                lane.popleft()
            assert lane.popleft() == item
        dropped = before - len(self.queue) - len(taken)
        left = sum(map(len, self.model.values())) - len(self.queue)
        assert 0 <= left <= dropped  # dead items at the head may have gone too
        for tenant, lane in self.model.items():
            while len(lane) > self.queue.backlog(tenant):
                assert not alive(lane[0])
                lane.popleft()

    @invariant()
    def sizes_agree(self):
        assert len(self.queue) == sum(map(len, self.model.values())) <= 6


TestQueue = QueueMachine.TestCase


def test_backlogged_tenants_are_served_by_weight():
    queue = FairQueue(1000, {"train": 3.0, "val": 1.0})
    for i in range(400):
        queue.push("train", ("train", i))
    for i in range(400):
        queue.push("val", ("val", i))
    served = Counter(tenant for tenant, _ in queue.pop(200, always))
    assert served["train"] == pytest.approx(150, abs=2)


def test_a_tenant_earns_nothing_while_idle():
    queue = FairQueue(1000)
    for i in range(100):
        queue.push("a", ("a", i))
    queue.pop(90, always)
    for i in range(100):
        queue.push("b", ("b", i))
    first = Counter(tenant for tenant, _ in queue.pop(10, always))
    assert first["b"] <= 6


def test_a_flood_cannot_lock_out_a_late_tenant():
    queue = FairQueue(10)
    for i in range(50):
        queue.push("flood", ("flood", i))
    admitted = [queue.push("late", ("late", i)) for i in range(8)]
    assert [ok for ok, _ in admitted] == [True] * 5 + [False] * 3
    assert all(displaced[0] == "flood" for ok, displaced in admitted if ok)


FAILED = Failure(kind=FailureKind.TIMEOUT, message="", retryable=True)


@given(st.integers(1, 6), st.floats(0, 0.999), st.floats(0, 10))
def test_a_retry_never_starts_after_the_deadline(attempts, draw, left):
    config = RetryConfig(retries=3, base_s=0.1, cap_s=1.0)
    delay = retry_delay(config, FAILED, attempts, left, draw)
    if attempts > 3:
        assert delay is None
    elif delay is not None:
        assert 0 <= delay <= min(1.0, 0.1 * 2 ** (attempts - 1))
        assert delay < left


def test_what_cannot_succeed_is_not_retried_and_retry_after_is_a_floor():
    final = Failure(kind=FailureKind.STATUS, message="")
    busy = Failure(kind=FailureKind.OVERLOADED, message="", retryable=True, retry_after_s=2.0)
    assert retry_delay(RetryConfig(), final, 1, 10, 0.5) is None
    assert retry_delay(RetryConfig(), busy, 1, 10, 0.5) >= 2.0
    assert retry_delay(RetryConfig(), busy, 1, 1.9, 0.5) is None


def test_hedging_waits_for_knowledge_and_stays_in_its_budget():
    policy = HedgePolicy(HedgeConfig(budget=0.1, quantile=0.9, window=50, min_samples=10))
    assert policy.delay() is None
    rng = random.Random(0)
    hedged = 0
    for _ in range(500):
        policy.observe(rng.random())
        if policy.delay() is not None and policy.spend():
            hedged += 1
    assert policy.delay() == pytest.approx(0.9, abs=0.12)
    assert 30 <= hedged <= 50


def test_hedging_is_off_by_default():
    policy = HedgePolicy(HedgeConfig())
    for _ in range(100):
        policy.observe(1.0)
    assert policy.delay() is None
    assert not policy.spend()


def test_the_coalescer_sends_at_once_unless_told_to_linger():
    eager = BatchPolicy(BatchConfig(max_batch=4, max_inflight=2))
    assert eager.due(1, 0, 0.0) == (1, None)
    assert eager.due(9, 1, 0.0) == (4, None)
    assert eager.due(9, 2, 0.0) == (0, None)
    assert eager.due(0, 0, 0.0) == (0, None)
    patient = BatchPolicy(BatchConfig(max_batch=4, linger_s=0.01))
    assert patient.due(1, 0, 0.004) == (0, pytest.approx(0.006))
    assert patient.due(1, 0, 0.01) == (1, None)
    assert patient.due(4, 0, 0.0) == (4, None)


def test_the_batch_size_adapts_to_an_upstream_that_gains_nothing_from_large_batches():
    policy = BatchPolicy(BatchConfig(max_batch=64, target_s=0.1))
    for _ in range(300):  # 5 ms a query, whatever the batch: 20 take the target time
        size, _ = policy.due(1000, 0, 0.0)
        policy.observe(size, size * 0.005)
    assert 12 <= policy.limit <= 21


def test_the_cache_forgets_by_age_by_size_and_by_version():
    clock = ManualClock()
    cache = ResultCache(CacheConfig(entries=2, ttl_s=10), clock)
    cache.put("1", "a", "A")
    assert cache.get("1", "a") == "A"
    assert cache.get("2", "a") is None
    clock.advance(10.1)
    assert cache.get("1", "a") is None
    for key in "abc":
        cache.put("1", key, key)
    assert len(cache) == 2
    off = ResultCache(CacheConfig(entries=0), clock)
    off.put("1", "a", "A")
    assert off.get("1", "a") is None


def test_queries_are_compared_as_configured():
    same = [Query(" Who  is\nshe "), Query("Who is she")]
    case = Query("who IS she")
    by_blank, by_case, exact = (QueryRules(QueryConfig(normalise=n)) for n in ("whitespace", "case", "none"))
    assert by_blank.key(same[0]) == by_blank.key(same[1]) != by_blank.key(case)
    assert by_case.key(same[0]) == by_case.key(case)
    assert exact.key(same[0]) != exact.key(same[1])
    assert by_blank.key(Query("a", 3)) != by_blank.key(Query("a", 5))
    assert by_blank.check(Query("a", 0)).kind is FailureKind.INVALID_REQUEST


def test_histogram_quantiles_are_within_a_bucket():
    histogram = Histogram()
    for i in range(1, 1001):
        histogram.observe(i / 1000)
    assert histogram.quantile(0.5) == pytest.approx(0.5, rel=0.45)
    assert histogram.quantile(0.5) >= 0.5
    assert histogram.quantile(0.99) >= 0.99
    assert Histogram().quantile(0.5) == 0.0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"bach": {}}, "did you mean 'batch'"),
        ({"batch": {"max_batch": 0}}, r"pool\.batch needs max_batch >= 1"),
        ({"batch": {"target_s": -1.0}}, "target_s must be positive"),
        ({"cache": {"ttl_s": 0.0}}, "ttl_s > 0"),
        ({"retry": {"retries": -1}}, "retries >= 0"),
        ({"breaker": {"open_s": 0.0}}, "open_s"),
        ({"hedge": {"budget": 2.0}}, "budget"),
        ({"hedge": {"min_samples": 1000}}, "min_samples"),
        ({"timeout_s": 0.0}, "timeout_s > 0"),
        ({"weights": {"train": -1.0}}, "weights must be positive"),
        ({"queue": "many"}, "queue"),
    ],
)
def test_bad_settings_are_named(values, says):
    with pytest.raises(ConfigError, match=says):
        from_mapping(PoolConfig, values, "pool")
