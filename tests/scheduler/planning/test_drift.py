import random

import pytest

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.scheduler.drift import DriftConfig, DriftDetector


def watch(detector, seconds):
    return [found for value in seconds if (found := detector.observe(value)) is not None]


def noisy(rng, level, count):
    return [level * rng.uniform(0.9, 1.1) for _ in range(count)]


def test_noise_of_ten_per_cent_replans_at_most_once(seed):
    rng = random.Random(seed)
    for _ in range(50):
        assert len(watch(DriftDetector(10.0), noisy(rng, 10.0, 1000))) <= 1


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_step_change_replans_exactly_once_within_twenty_steps(seed, factor):
    rng = random.Random(seed)
    for _ in range(50):
        found = watch(DriftDetector(10.0), noisy(rng, 10.0, 300) + noisy(rng, 10.0 * factor, 700))
        assert len(found) == 1
        assert 300 <= found[0].step < 320
        assert found[0].ratio == pytest.approx(factor, rel=0.12)


def test_a_model_wrong_by_a_constant_replans_once():
    detector = DriftDetector(10.0)
    found = 0
    for _ in range(200):
        if detector.observe(14.0) is not None:
            found += 1
            detector.replanned(10.0)  # the new plan's prediction is as wrong as the old one's
    assert found == 1


def test_single_outliers_are_ignored():
    values = [10.0] * 100
    for step in range(5, 100, 9):
        values[step] = 100.0
    assert not watch(DriftDetector(10.0), values)


def test_a_second_change_is_found():
    detector = DriftDetector(10.0)
    assert len(watch(detector, [10.0] * 20 + [15.0] * 60 + [10.0] * 60)) == 2


def test_state_survives_a_checkpoint(seed):
    rng = random.Random(seed)
    values = noisy(rng, 10.0, 50) + noisy(rng, 15.0, 60)
    for cut in (3, 40, 53, 60, 80):
        whole, first = DriftDetector(10.0), DriftDetector(10.0)
        watch(first, values[:cut])
        second = DriftDetector(1.0)
        second.restore(first.state())
        watch(whole, values[:cut])
        assert watch(second, values[cut:]) == watch(whole, values[cut:])


def test_impossible_thresholds_are_refused():
    with pytest.raises(ConfigError, match="threshold"):
        DriftConfig(threshold=0.0).validate("drift")
