"""When a service grows and shrinks, on an injected clock; the actors themselves are in test_service.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.autoscale import AutoscaleConfig, ShardScaler, jump_hash
from rlinf_plugins.tools.service import ServiceConfig

CONFIG = AutoscaleConfig(max_shards=4, grow_wait_s=0.1, shrink_wait_s=0.01, window_s=2.0, quiet_s=10.0)


def scaler(config=CONFIG, shards=1):
    clock = ManualClock()
    return ShardScaler(config, shards, clock), clock


def feed(found, clock, wait, seconds, per_second=10):
    """Report calls that waited ``wait`` each for some seconds; returns the shards after each second."""
    seen = []
    for _ in range(seconds):
        clock.advance(1.0)
        found.observe(per_second, per_second * wait)
        seen.append(found.shards)
    return seen


def test_it_is_off_unless_a_limit_is_given():
    found, clock = scaler(AutoscaleConfig(), shards=2)
    assert set(feed(found, clock, 50.0, 100)) == {2}


def test_it_grows_by_one_a_window_while_calls_wait_and_stops_at_the_limit():
    found, clock = scaler()
    seen = feed(found, clock, 0.5, 20)
    assert seen[:7] == [1, 2, 2, 3, 3, 4, 4]
    assert seen[-1] == 4


def test_it_keeps_its_size_between_the_thresholds_and_shrinks_after_a_quiet_while():
    found, clock = scaler()
    feed(found, clock, 0.5, 20)
    assert set(feed(found, clock, 0.05, 60)) == {4}
    quiet = feed(found, clock, 0.001, 40)
    assert quiet[8] == 4
    assert quiet[-1] == 1
    assert sorted(quiet, reverse=True) == quiet
    assert quiet.count(3) >= 10  # one at a time


def test_no_calls_at_all_are_quiet_too():
    found, clock = scaler()
    feed(found, clock, 0.5, 6)
    assert found.shards > 1
    for _ in range(200):
        clock.advance(1.0)
        assert 1 <= found.shards <= 4
    assert found.shards == 1


def test_a_shard_that_could_not_be_added_is_tried_again_a_window_later():
    found, clock = scaler()
    feed(found, clock, 0.5, 2)
    assert found.shards == 2
    found.settle(1)
    assert found.shards == 1
    assert feed(found, clock, 0.5, 3)[-1] == 2


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 100), st.floats(0, 1)), max_size=80), st.integers(1, 4))
def test_bounds_hold_and_steps_are_of_one(events, least):
    found, clock = scaler(shards=least)
    before, decided = least, -10.0
    for seconds, calls, wait in events:
        clock.advance(seconds)
        found.observe(calls, calls * wait)
        after = found.shards
        assert least <= after <= 4
        assert abs(after - before) <= 1
        if after != before:
            assert clock() - decided >= 2.0
            decided = clock()
        before = after


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.integers(1, 15))
def test_one_shard_more_moves_only_the_keys_it_receives(keys, buckets):
    for key in keys:
        old, new = jump_hash(key, buckets), jump_hash(key, buckets + 1)
        assert 0 <= old < buckets
        assert new in (old, buckets)


def test_keys_are_spread_evenly():
    counts = [0] * 5
    for key in range(10_000):
        counts[jump_hash(key * 2654435761 % 2**32, 5)] += 1
    assert min(counts) > 1800


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"shards": 0}, "at least 1"),
        ({"shards": 3, "autoscale": {"max_shards": 2}}, "max_shards=2 is below shards=3"),
        ({"autoscale": {"max_shards": -1}}, "max_shards >= 0"),
        ({"autoscale": {"window_s": 100.0}}, "window_s <= quiet_s"),
        ({"autoscale": {"grow_wait_s": 0.001}}, "shrink_wait_s < grow_wait_s"),
    ],
)
def test_bad_settings_are_named(values, says):
    with pytest.raises(ConfigError, match=says):
        from_mapping(ServiceConfig, values, "service")
