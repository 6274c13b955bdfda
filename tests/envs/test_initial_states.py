"""Where episodes start does not depend on what ran faster, and nothing is drawn twice before all were."""

import pytest

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.envs import EnvSpec, InitialState, InitialStates, all_pairs
from rlinf_plugins.envs.initial_states import repeats


def spec(trials=4, tasks=3):
    seen = {"states": Field(shape=(1,), dtype="float32")}
    names = tuple(f"task {index}" for index in range(tasks))
    return EnvSpec(name="Toy", action_low=(-1.0,), action_high=(1.0,), observation=seen, tasks=names, trials=trials)


def test_every_pair_once_task_by_task():
    assert [(at.task, at.trial) for at in all_pairs(spec(2, 2))] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all_pairs(spec(), tasks=[2, 2], trials=1, first_trial=3) == [InitialState(task=2, trial=3)]


@pytest.mark.parametrize(
    ("options", "trials", "says"),
    [
        ({"tasks": [3]}, 4, "Toy has tasks 0 to 2; it has no \\[3\\]"),
        ({"trials": 5}, 4, "trials 0 to 3 of each task, got up to 4"),
        ({}, None, "trials=N"),
        ({"tasks": []}, 4, "leave no initial state"),
    ],
)
def test_what_there_is_not_is_named(options, trials, says):
    with pytest.raises(ConfigError, match=says):
        all_pairs(spec(trials), **options)


def test_every_pass_has_every_pair_once_in_an_order_of_its_own(seed):
    pairs = all_pairs(spec())
    states = InitialStates(pairs=pairs, seed=seed)
    passes = [states.take(36)[at : at + 12] for at in (0, 12, 24)]
    assert all(sorted(one, key=pairs.index) == pairs for one in passes)
    assert passes[0] != passes[1]
    assert InitialStates(pairs=pairs, seed=seed).take(36) == states.take(36)
    assert InitialStates(pairs=pairs).take(13) == [*pairs, pairs[0]]
    assert repeats(states.take(12)) == 0
    assert repeats(states.take(16)) == 4


def test_pools_and_epochs_share_one_sequence(seed):
    states = InitialStates(pairs=all_pairs(spec()), seed=seed)
    rows = [states.row(epoch, 3, rank=rank, ranks=2) for epoch in (0, 1) for rank in (0, 1)]
    assert sum(rows, []) == states.take(12)
    assert states.row(1, 3, rank=1, ranks=2) == rows[3]  # asked alone, it is the same


def test_a_group_starts_alike(seed):
    states = InitialStates(pairs=all_pairs(spec()), group_size=4, seed=seed).take(24)
    assert all(len(set(states[at : at + 4])) == 1 for at in range(0, 24, 4))
    assert len(set(states)) == 6
    for wrong in ({"pairs": []}, {"pairs": all_pairs(spec()), "group_size": 0}):
        with pytest.raises(ConfigError, match="positive group_size"):
            InitialStates(**wrong)
