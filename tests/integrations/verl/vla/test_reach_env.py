import numpy as np
import pytest

from rlinf_plugins.envs import InitialState
from rlinf_plugins.testing.reach_env import ReachFactory


@pytest.fixture
def play():
    """Function from trial, and from position to action, to the outcomes of an episode."""

    def run(trial, act):
        env = ReachFactory()()
        assert env.reset(InitialState(trial=trial)) == "move to the middle"
        outcomes = []
        while not outcomes or not (outcomes[-1].terminated or outcomes[-1].truncated):
            outcomes.append(env.step(np.asarray(act(env.observe()["states"]), np.float32)))
        return outcomes

    return run


@pytest.mark.parametrize("trial", range(5))
def test_arriving_earns_one_from_every_start(play, trial):
    outcomes = play(trial, lambda at: -at / max(np.abs(at)))
    assert outcomes[-1].terminated
    assert outcomes[-1].metrics == {"success": True}
    assert sum(o.reward for o in outcomes) == pytest.approx(1.0)


def test_who_does_not_arrive_earns_the_distance_closed_and_is_cut_off(play):
    outcomes = play(0, lambda at: [-1.0, 0.0] if at[0] > 0.6 else [0.0, 0.0])
    assert len(outcomes) == 4
    assert [o.truncated for o in outcomes] == [False, False, False, True]
    assert outcomes[-1].metrics == {"success": False}
    assert sum(o.reward for o in outcomes) == pytest.approx(0.5)


def test_no_policy_that_ignores_the_state_gets_far(play):
    best = -1.0
    for angle in np.linspace(0, 2 * np.pi, 40, endpoint=False):
        way = [np.cos(angle), np.sin(angle)]
        best = max(best, float(np.mean([sum(o.reward for o in play(t, lambda _, way=way: way)) for t in range(5)])))
    assert best < 0.3
