"""A policy plays a list of episodes: each is played once, in whichever environment, and none waits for a slow one."""

import time
from dataclasses import replace

import numpy as np
import pytest

from rlinf_plugins.core.errors import ConfigError, RestartStormError
from rlinf_plugins.core.supervision import RestartPolicy
from rlinf_plugins.envs import EpisodeConfig, InitialState, InitialStates, all_pairs, evaluate, play
from rlinf_plugins.testing.envs import Mishap, ToyFactory


def still(batch):
    return np.zeros((len(batch.slots), 2, 3))


def facts(records):
    return sorted((r.initial.task, r.initial.trial, r.length, r.success_once, r.ending) for r in records)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_initial_state_is_played_once(make_pool, stages):
    pool = make_pool(ToyFactory(length=lambda task, trial: 2 * trial + task + 1), 3)
    asked = []

    def policy(batch):
        asked.append(len(batch.slots))
        assert batch.observation["states"].shape == (len(batch.slots), 4)
        return still(batch)

    answers = []
    pairs = all_pairs(pool.spec, trials=4)
    records = list(play(pool, policy, pairs, stages=stages, on_step=answers.append))
    expected = [(at.task, at.trial, 2 * at.trial + at.task + 1, True, "finished") for at in pairs]
    assert facts(records) == sorted(expected)
    assert max(asked) <= -(-3 // stages)
    assert sum(int(answer.valid.sum()) for answer in answers) == sum(record.length for record in records)
    assert pool.recv() == []
    assert pool.stats()["episodes_begun"] == 8


def test_environments_move_while_the_policy_thinks(make_pool):
    pool = make_pool(ToyFactory(length=lambda *_: 12), 2)
    beats, seen = pool._desk.crew.board.beat, {}

    def policy(batch):
        (slot,) = batch.slots
        other, deadline = 1 - slot, time.monotonic() + 30
        while other in seen and beats[other] == seen[other] and time.monotonic() < deadline:
            pass  # until the other one has begun the step that was asked of it before
        assert other not in seen or beats[other] > seen[other], "the policy is asked while nothing moves"
        seen[slot] = int(beats[slot])
        return still(batch)

    assert len(list(play(pool, policy, all_pairs(pool.spec, tasks=[0], trials=2), stages=2))) == 2
    assert sorted(seen) == [0, 1]


def test_a_slow_environment_holds_up_no_other(make_pool):
    pool = make_pool(ToyFactory(step_seconds=lambda task, trial, step: 0.2 if trial == 0 else 0.0), 3)
    ended = [r.initial.trial for r in play(pool, still, all_pairs(pool.spec, tasks=[0], trials=7), stages=3)]
    assert ended[-1] == 0
    assert sorted(ended) == list(range(7))


@pytest.mark.slow
def test_crashes_are_counted_apart_and_repeats_count_once(make_pool, quick):
    factory = ToyFactory(
        length=lambda task, trial: 4 if trial < 2 else 99, mishaps={3: Mishap(poison="kill", where="step", step=2)}
    )
    pool = make_pool(factory, 2, replace(quick, episode=EpisodeConfig(max_steps=8)))
    pool.reset([InitialState(), InitialState()])  # whatever was there before is not counted
    pairs = InitialStates(pairs=all_pairs(pool.spec, tasks=[0], trials=4)).take(6)
    with pytest.warns(UserWarning, match="6 episodes have 4 initial states: 2 start where another did"):
        found = evaluate(pool, still, pairs)
    assert [record.initial for record in found.records] == pairs
    assert (found.judged, found.repeated, len(found.failed)) == (3, 2, 1)
    assert found.rate() == pytest.approx(2 / 3)  # trials 0 and 1 of 0, 1, 2; twice each changes nothing
    assert np.isnan(found.rate(task=1))
    assert str(found) == (
        "success 66.7% of 3 of 4 initial states in 6 episodes, 2 of them repeated, 1 failed by their environment"
    )


@pytest.mark.slow
def test_an_environment_that_is_given_up_leaves_its_episodes_to_the_others(make_pool, quick):
    dying = ToyFactory(mishaps={-1: Mishap(poison="kill", where="step")})
    config = replace(quick, restart=RestartPolicy(max_failures=2, first_delay_s=0.01, max_delay_s=0.01))
    pool = make_pool([dying, ToyFactory()], None, config)
    records = list(play(pool, still, all_pairs(pool.spec, tasks=[0], trials=8)))
    assert sorted(record.initial.trial for record in records) == list(range(8))
    assert sum(record.ending == "failed" for record in records) == 2
    pool = make_pool(dying, 1, config)
    with pytest.raises(RestartStormError, match="no environment is left .* it failed 2 times"):
        list(play(pool, still, all_pairs(pool.spec, tasks=[0], trials=8), stages=1))


def test_more_stages_than_environments_are_refused(make_pool):
    pool = make_pool(ToyFactory(), 1)
    with pytest.raises(ConfigError, match="stages must lie between 1 and the number of environments, 1, got 2"):
        next(play(pool, still, [InitialState()], stages=2))
