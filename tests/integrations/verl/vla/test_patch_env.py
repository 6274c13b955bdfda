import numpy as np
import pytest

from rlinf_plugins.envs import InitialState
from rlinf_plugins.testing.patch_env import PatchFactory


@pytest.mark.parametrize("places", [1, 3])
def test_only_a_look_tells_trials_apart(places):
    env = PatchFactory(places=places)()
    seen = {}
    for trial in range(env.spec.trials):
        assert env.reset(InitialState(trial=trial)) == "point at the patch"
        seen[env.observe()["main_images"].tobytes()] = trial
    assert len(seen) == 2 * places


def test_the_reward_is_half_for_place_and_half_for_colour():
    env = PatchFactory(places=3)()
    env.reset(InitialState(trial=5))
    outcomes = [env.step(np.array(action, np.float32)) for action in ([0.7, 0.4], [0.7, -0.4], [0.0, 0.4], [0.0, -0.4])]
    assert [o.reward for o in outcomes] == [1.0, 0.5, 0.5, 0.0]
    assert [o.metrics["success"] for o in outcomes] == [True, False, False, False]
    assert all(o.terminated for o in outcomes)


@pytest.mark.parametrize("places", [1, 3])
def test_a_policy_that_does_not_look_gets_no_further_than_said(places):
    env = PatchFactory(places=places)()
    best = 0.0
    for place in np.linspace(-1, 1, 41):
        for colour in (-0.5, 0.5):
            total = 0.0
            for trial in range(env.spec.trials):
                env.reset(InitialState(trial=trial))
                total += env.step(np.array([place, colour])).reward
            best = max(best, total / env.spec.trials)
    assert best == pytest.approx(0.5 / places + 0.25)
