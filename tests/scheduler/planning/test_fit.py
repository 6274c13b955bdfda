import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_plugins.scheduler.planning.fit import Curve, Surface
from rlinf_plugins.scheduler.planning.tail import Tail, expected_order_statistic

COUNTS = np.arange(1, 65)


def test_measured_points_are_kept():
    surface = Surface.fit([1, 2, 4, 1, 2], [8, 8, 8, 16, 16], [8.0, 5.0, 3.0, 16.0, 9.0], "time")
    assert surface.at(np.array([1, 2, 4]), 8) == pytest.approx([8.0, 5.0, 3.0])
    assert surface.at(np.array([1, 2]), 16) == pytest.approx([16.0, 9.0])


def test_three_points_of_a_rising_parabola_stay_monotone():
    # The shape that a quadratic through three points turns into fewer seconds on fewer devices.
    surface = Surface.fit([1, 2, 4], [8, 8, 8], [4.0, 1.0, 2.0], "time")
    values = surface.at(COUNTS, 8)
    assert (np.diff(values) <= 0).all()
    assert surface.curves[0].violations == (4,)


def test_one_count_scales_down_but_promises_nothing_beyond():
    curve = Curve.fit([8], [2.0], [1])
    assert curve.at(np.array([4.0, 8.0, 64.0])) == pytest.approx([4.0, 2.0, 2.0])


def test_sparse_granularity_borrows_its_neighbours_shape():
    surface = Surface.fit([1, 2, 1], [8, 8, 6], [8.0, 4.0, 6.0], "time")
    assert surface.at(np.array([1, 2]), 6) == pytest.approx([6.0, 3.0])


def test_memory_does_not_shrink_below_the_smallest_granularity():
    surface = Surface.fit([1, 1], [8, 16], [10.0, 12.0], "memory")
    assert surface.at(np.array([1]), 1) == pytest.approx([10.0])
    assert surface.at(np.array([1]), 32) == pytest.approx([16.0])


def test_extrapolation_is_flagged():
    surface = Surface.fit([2, 8], [8, 16], [2.0, 1.0], "time")
    assert not surface.extrapolates(4, 8)
    assert surface.extrapolates(16, 8)
    assert surface.extrapolates(4, 4)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 32), st.sampled_from([4, 8, 32]), st.floats(0.01, 100)), min_size=1, max_size=12),
    st.integers(1, 64),
)
def test_more_devices_are_never_slower(samples, items):
    devices, sizes, seconds = zip(*samples, strict=True)
    values = Surface.fit(devices, sizes, seconds, "time").at(COUNTS, items)
    assert (np.diff(values) <= 1e-9 * values[:-1]).all()
    assert (values >= 0).all()


def test_order_statistics_agree_with_sampling():
    rng = np.random.default_rng(0)
    values = np.sort(rng.lognormal(0, 1, 200))
    drawn = np.sort(rng.choice(values, size=(20000, 16)), axis=1).mean(axis=0)
    for rank in (1, 8, 16):
        assert expected_order_statistic(values, rank, 16) == pytest.approx(drawn[rank - 1], rel=0.03)


def test_waiting_for_all_costs_more_than_in_proportion():
    rng = np.random.default_rng(0)
    tail = Tail(ordered=np.sort(rng.lognormal(5, 1, 400)), slots=0, start=0.0, step=1.0, token=0.0)
    half, whole = tail.seconds(1, 64, 32), tail.seconds(1, 64, 64)
    assert half < 0.2 * whole


def test_tail_costs_are_recovered_from_simulated_calls():
    from rlinf_plugins.scheduler.planning.draws import serve

    rng = np.random.default_rng(1)
    lengths = rng.lognormal(5, 0.6, 400)
    points = [(r, m) for r in (1, 4, 16) for m in (32, 256)]
    seconds = [
        np.mean([serve(rng.choice(lengths, m), r, 16, 0.01, 0.0005).max() for _ in range(40)]) for r, m in points
    ]
    tail = Tail.fit(lengths.tolist(), 16, [p[0] for p in points], [p[1] for p in points], seconds)
    for (r, m), measured in zip(points, seconds, strict=True):
        assert tail.seconds(r, m, m) == pytest.approx(measured, rel=0.12)


def test_what_no_device_shortens_is_put_down_to_the_longest_item():
    """One granularity only: the constant part and the longest item are indistinguishable in the samples."""
    lengths = [10.0] * 15 + [100.0]
    tail = Tail.fit(lengths, 0, [1, 2, 4], [16, 16, 16], [4.5, 4.25, 4.125])
    assert tail.start == 0.0
    assert tail.seconds(2, 16, 16) == pytest.approx(4.25, rel=0.01)
    assert tail.seconds(2, 16, 8) < 1.5, "half of the items are over long before the longest"
