"""The pool as a caller sees it, on toy environments in real processes."""

import asyncio

import numpy as np
import pytest

from rlinf_plugins.core.errors import ActionError, ConfigError, EnvStartError, PoolUsageError, SnapshotError
from rlinf_plugins.envs import Deadlines, EpisodeConfig, InitialState, PoolConfig, RewardConfig
from rlinf_plugins.testing.envs import Mishap, NullFactory, ToyFactory


def starts(*trials, task=0):
    return [InitialState(task=task, trial=trial) for trial in trials]


@pytest.fixture
def ragged(make_pool):
    return make_pool(ToyFactory(image=8, length=lambda task, trial: trial + 2), 3)


def test_chunks_end_with_their_episode_and_finished_slots_stay_frozen(ragged):
    first = ragged.reset(starts(0, 1, 6))
    assert first.task_descriptions == ["move 0"] * 3
    assert first.rewards.shape == (3, 0)
    assert not first.done.any()
    batch = ragged.step_chunk(np.full((3, 5, 3), 0.1))
    assert batch.valid.sum(axis=1).tolist() == [2, 3, 5]
    assert batch.terminated[0].tolist() == [False, True, False, False, False]
    assert not batch.truncated.any()
    assert batch.done.tolist() == [True, True, False]
    np.testing.assert_allclose(batch.rewards.sum(axis=1), [0.6, 0.9, 1.5], rtol=1e-5)
    assert batch.metrics["success"][1].tolist() == [0, 0, 1, 0, 0]
    again = ragged.step_chunk(np.full((3, 5, 3), 0.1))
    assert again.valid.sum(axis=1).tolist() == [0, 0, 3]
    np.testing.assert_array_equal(again.observation["states"][0], batch.observation["states"][0])
    assert sorted(record.slot for record in ragged.drain_records()) == [0, 1, 2]  # in the order they arrived
    assert ragged.drain_records() == []


def test_a_partial_reset_leaves_the_others_alone(ragged):
    ragged.reset(starts(0, 1, 6))
    before = ragged.step_chunk(np.zeros((3, 2, 3)))
    after = ragged.reset(starts(3), slots=[0])
    assert after.slots == [0]
    assert not after.done[0]
    batch = ragged.step_chunk(np.zeros((2, 1, 3)), slots=[2, 0])
    assert batch.slots == [2, 0]
    assert batch.observation["states"][:, 3].tolist() == [3, 1]
    assert before.observation["states"][1, 3] == 2  # results stay as they were


def test_the_start_is_a_function_of_the_ids_alone(ragged):
    first = ragged.reset(starts(0, 1, 2)).observation["states"]
    ragged.step_chunk(np.ones((3, 2, 3)))
    shuffled = ragged.reset(starts(2, 0, 1)).observation["states"]
    np.testing.assert_array_equal(first, shuffled[[1, 2, 0]])
    assert len({tuple(row) for row in first.tolist()}) == 3


def test_truncated_is_not_terminated(make_pool):
    pool = make_pool(ToyFactory(), 1, PoolConfig(episode=EpisodeConfig(max_steps=4)))
    pool.reset(starts(0))
    batch = pool.step_chunk(np.zeros((1, 6, 3)))
    assert batch.truncated[0].tolist() == [False] * 3 + [True] + [False] * 2
    assert not batch.terminated.any()
    (record,) = pool.drain_records()
    assert (record.truncated, record.terminated, record.length, record.ending) == (True, False, 4, "finished")


def test_terminations_can_be_ignored_until_the_time_limit(make_pool):
    episode = EpisodeConfig(max_steps=6, ignore_terminations=True)
    pool = make_pool(ToyFactory(length=lambda task, trial: 2), 1, PoolConfig(episode=episode))
    pool.reset(starts(0))
    batch = pool.step_chunk(np.zeros((1, 8, 3)))
    assert batch.valid[0].tolist() == [True] * 6 + [False] * 2
    assert batch.terminated[0].tolist() == [False] + [True] * 5 + [False] * 2
    (record,) = pool.drain_records()
    assert record.success_once
    assert record.length == 6


def test_the_rest_of_a_chunk_is_executed_on_request_but_never_valid(make_pool):
    pool = make_pool(ToyFactory(length=lambda *_: 2), 1, PoolConfig(episode=EpisodeConfig(run_after_done=True)))
    pool.reset(starts(0))
    batch = pool.step_chunk(np.full((1, 5, 3), 0.5))
    assert batch.valid.sum() == 2
    assert batch.rewards.sum() == pytest.approx(3.0)
    assert batch.observation["states"][0, 3] == 5  # it did move on


def test_rewards_reach_the_learner_as_configured(make_pool):
    reward = RewardConfig(mode="sparse", coefficient=5.0, relative=True, step_penalty=0.5)
    pool = make_pool(ToyFactory(length=lambda *_: 3), 1, PoolConfig(reward=reward))
    pool.reset(starts(0))
    assert pool.step_chunk(np.zeros((1, 3, 3))).rewards[0].tolist() == [-0.5, -0.5, 4.5]
    assert pool.drain_records()[0].ret == pytest.approx(3.5)


def test_finished_environments_are_reset_at_once_on_request(make_pool):
    trials = iter(range(3, 100))
    pool = make_pool(
        ToyFactory(length=lambda task, trial: trial + 2), 2, next_initial=lambda _: starts(next(trials))[0]
    )
    pool.reset(starts(0, 5))
    batch = pool.step_chunk(np.zeros((2, 4, 3)))
    assert batch.done.tolist() == [True, False]
    assert batch.observation["states"][0, 3] == 0
    assert batch.final_observation[0]["states"][3] == 2
    assert pool.step_chunk(np.zeros((2, 4, 3))).valid.sum(axis=1).tolist() == [4, 3]


def test_ready_environments_do_not_wait_for_the_slow_one(make_pool):
    pool = make_pool(ToyFactory(step_seconds=lambda task, trial, step: 0.4 if trial == 0 else 0.0), 3)
    pool.reset(starts(0, 1, 2))
    pool.send(np.zeros((3, 1, 3)), [0, 1, 2])
    ready = pool.recv(at_least=2)
    assert sorted(result.slot for result in ready) == [1, 2]
    assert [result.slot for result in pool.recv()] == [0]
    assert pool.recv() == []


async def test_each_environment_has_its_own_pace(make_pool):
    pool = make_pool(ToyFactory(length=lambda task, trial: trial + 1), 3)

    async def play(slot):
        steps = 0
        for trial in range(slot, 5):
            result = await pool.async_reset(slot, InitialState(trial=trial))
            while not result.done:
                result = await pool.async_step(slot, np.zeros(3))
                steps += int(result.valid.sum())
            assert result.metrics["success"][-1] == 1
        return steps

    assert await asyncio.gather(*map(play, range(3))) == [15, 14, 12]
    assert pool.stats()["episodes_closed"] == 12


async def test_a_cancelled_step_does_not_block_its_slot(make_pool):
    pool = make_pool(ToyFactory(step_seconds=lambda task, trial, step: 0.3 if trial == 0 else 0.0), 1)
    await pool.async_reset(0, InitialState(trial=0))
    task = asyncio.create_task(pool.async_step(0, np.zeros(3)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(PoolUsageError, match="busy"):
        await pool.async_step(0, np.zeros(3))
    result = await pool.async_reset(0, InitialState(trial=1))
    assert result.observation["states"][3] == 0
    assert [record.ending for record in pool.drain_records()] == ["abandoned"]


def test_a_snapshot_replays_exactly_in_any_slot(make_pool):
    config = PoolConfig(reward=RewardConfig(relative=True))
    pool = make_pool(ToyFactory(image=8, length=lambda *_: 9), 2, config)
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 10, 3))
    pool.reset(starts(0, 1))
    pool.step_chunk(actions[:, :4])
    saved = pool.save()
    rest = pool.step_chunk(actions[:, 4:])
    pool.load({1: saved[0], 0: saved[1]})
    replay = pool.step_chunk(actions[::-1, 4:])
    for name in rest.observation:
        np.testing.assert_array_equal(replay.observation[name], rest.observation[name][::-1])
    np.testing.assert_array_equal(replay.rewards, rest.rewards[::-1])
    records = pool.drain_records()
    finished = sorted((r.length, round(r.ret, 5)) for r in records if r.ending == "finished")
    assert finished[::2] == finished[1::2]  # each episode and its replay
    assert len(finished) == 4


def test_offload_ends_the_processes_and_onload_brings_the_episodes_back(make_pool):
    pool = make_pool(ToyFactory(length=lambda task, trial: 6 + trial), 2)
    pool.reset(starts(0, 5))
    before = pool.step_chunk(np.full((2, 6, 3), 0.1))  # slot 0 is finished, slot 1 is not
    assert pool.offload() > 0
    with pytest.raises(PoolUsageError, match="parked"):
        pool.step_chunk(np.zeros((2, 1, 3)))
    batch = pool.onload()
    assert batch is not None
    assert batch.slots == [1]
    np.testing.assert_array_equal(batch.observation["states"][0], before.observation["states"][1])
    assert pool.step_chunk(np.full((2, 6, 3), 0.1)).valid.sum(axis=1).tolist() == [0, 5]
    assert [(record.number, record.length) for record in pool.drain_records()] == [(0, 6), (1, 11)]


def test_a_failed_save_keeps_everything_running(make_pool):
    pool = make_pool(ToyFactory(mishaps={1: Mishap(poison="raise", where="save")}), 2)
    pool.reset(starts(0, 1))
    with pytest.raises(SnapshotError, match="out of sorts"):
        pool.offload()
    assert pool.step_chunk(np.zeros((2, 1, 3))).valid.sum(axis=1).tolist() == [1, 0]


def test_an_environment_without_snapshots_says_so(make_pool):
    pool = make_pool(NullFactory(), 1)
    pool.reset(starts(0))
    with pytest.raises(SnapshotError, match="cannot be snapshotted"):
        pool.save()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.5])
def test_a_bad_action_fails_only_its_own_environment(make_pool, value):
    pool = make_pool(ToyFactory(), 2)
    pool.reset(starts(0, 1))
    actions = np.zeros((2, 3, 3))
    actions[1, 2, 0] = value
    batch = pool.step_chunk(actions)
    assert batch.valid.sum(axis=1).tolist() == [3, 0]
    assert batch.failures[1].kind == "invalid_action"
    assert "component 0 of step 2" in batch.failures[1].reason
    assert pool.reset(starts(1), [1]).failures == {}
    assert pool.stats()["starts"] == 2  # no process was lost for it


def test_out_of_range_actions_can_be_clipped_but_nan_never(make_pool):
    pool = make_pool(ToyFactory(), 2, PoolConfig(out_of_range="clip"))
    pool.reset(starts(0, 1))
    batch = pool.step_chunk(np.array([[[9.0, -9.0, 0.5]], [[np.nan, 0, 0]]]))
    assert batch.rewards[0, 0] == pytest.approx(0.5)
    assert list(batch.failures) == [1]


@pytest.mark.parametrize(
    "actions", [np.zeros((3, 1, 3)), np.zeros((2, 1, 4)), np.zeros(3), np.zeros((2, 99, 3)), np.full((2, 1, 3), "x")]
)
def test_actions_that_fit_no_environment_are_refused_before_anything_moves(make_pool, actions):
    pool = make_pool(ToyFactory(), 2)
    pool.reset(starts(0, 1))
    with pytest.raises(ActionError):
        pool.step_chunk(actions)
    assert pool.step_chunk(np.zeros((2, 1, 3))).observation["states"][:, 3].tolist() == [1, 1]


def test_misuse_is_named(make_pool):
    pool = make_pool(ToyFactory(), 2)
    with pytest.raises(PoolUsageError, match="never reset"):
        pool.step_chunk(np.zeros((2, 1, 3)))
    with pytest.raises(PoolUsageError, match="no environment 5"):
        pool.reset(starts(0), [5])
    with pytest.raises(PoolUsageError, match="repeated"):
        pool.reset(starts(0, 1), [1, 1])
    with pytest.raises(PoolUsageError, match="as many initial states"):
        pool.reset(starts(0))
    with pytest.raises(PoolUsageError, match="no task 9; it has 0: move 0"):
        pool.reset(starts(0, 0, task=9))
    with pytest.raises(PoolUsageError, match="at least one"):
        make_pool(ToyFactory(), 0)
    with pytest.raises(ConfigError, match=r"config\.deadlines\.step must be positive, got 0"):
        make_pool(ToyFactory(), 1, PoolConfig(deadlines=Deadlines(step=0)))


def test_what_is_refused_for_one_slot_moves_no_other(make_pool):
    pool = make_pool(ToyFactory(), 2)
    mixed = [InitialState(), InitialState(task=9)]
    for begin in (pool.reset, lambda initial: pool.send_reset(initial, [0, 1])):
        with pytest.raises(PoolUsageError, match="no task 9"):
            begin(mixed)
    with pytest.raises(PoolUsageError, match="as many initial states"):
        pool.send_reset(starts(0), [0, 1])
    assert pool.stats()["episodes_begun"] == 0
    pool.send_reset(starts(0, 1), [0, 1])
    for call in (lambda: pool.reset(starts(0), [0]), lambda: pool.send(np.zeros((1, 1, 3)), [1]), pool.save):
        with pytest.raises(PoolUsageError, match="busy"):
            call()
    assert len(pool.recv(2)) == 2
    assert pool.step_chunk(np.zeros((2, 1, 3))).valid.all()


def test_environments_of_one_pool_must_agree(make_pool):
    with pytest.raises(EnvStartError, match="must have the same arrays"):
        make_pool([ToyFactory(image=8), ToyFactory(image=16)], None)
