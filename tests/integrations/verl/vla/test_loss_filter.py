import pytest

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.vla.loop_config import EmbodiedConfig
from rlinf_verl.vla.loss_filter import groups_to_drop

# Two rows an episode, two episodes a group; a row tells the return of its episode.
KEYS = [f"{uid}_{session}_{index}" for uid in "abc" for session in range(2) for index in range(2)]
RETURNS = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]


def test_groups_that_all_failed_or_all_succeeded_are_dropped():
    assert groups_to_drop(KEYS, RETURNS, [0.5, 4.5]) == {"a", "c"}


def test_the_mean_is_over_episodes_however_many_rows_they_have():
    keys = ["a_0_0", "a_0_1", "a_0_2", "a_1_0", "b_0_0", "b_1_0"]
    returns = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert groups_to_drop(keys, returns, [0.4, 0.6]) == {"b"}


def test_where_all_would_go_none_does():
    assert groups_to_drop(KEYS[:4], RETURNS[:4], [0.5, 4.5]) == set()


@pytest.mark.parametrize("bounds", [[1.0], [2.0, 1.0]])
def test_impossible_bounds_are_refused(bounds):
    with pytest.raises(ConfigError, match="envs.keep_groups must be"):
        EmbodiedConfig(factory="m:f", keep_groups=bounds).validate("envs")
