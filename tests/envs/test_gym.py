"""The Gymnasium adapter on real environments."""

import numpy as np
import pytest

from rlinf_plugins.core.errors import EnvContractError, SnapshotError, UnknownNameError
from rlinf_plugins.envs import InitialState
from rlinf_plugins.envs.gym import GymFactory


def test_a_reset_is_a_function_of_its_ids_and_the_time_limit_truncates():
    env = GymFactory(env_id="Pendulum-v1", task="swing up")()
    try:
        assert env.reset(InitialState(trial=3)) == "swing up"
        first = env.observe()["states"]
        outcomes = [env.step(np.zeros(1, np.float32)) for _ in range(200)]
        assert [o.truncated for o in outcomes] == [False] * 199 + [True]
        assert not any(o.terminated for o in outcomes)
        env.reset(InitialState(trial=3))
        np.testing.assert_array_equal(env.observe()["states"], first)
        env.reset(InitialState(trial=4))
        assert not np.array_equal(env.observe()["states"], first)
    finally:
        env.close()


def test_what_the_pool_cannot_drive_is_refused_by_name():
    with pytest.raises(UnknownNameError, match="Pendulum-v1"):
        GymFactory(env_id="Pendulun-v1")()
    with pytest.raises(EnvContractError, match="Discrete"):
        GymFactory(env_id="CartPole-v1")()


@pytest.mark.slow
@pytest.mark.sim
def test_a_robotics_environment_runs_in_the_pool(make_pool):
    factory = GymFactory(env_id="FetchReach-v4", modules=("gymnasium_robotics",))
    pool = make_pool(factory, 1)
    first = pool.reset([InitialState(trial=1)]).observation["states"]
    batch = pool.step_chunk(np.zeros((1, 4, 4)))
    assert batch.failures == {}
    assert batch.valid.all()
    np.testing.assert_array_equal(pool.reset([InitialState(trial=1)]).observation["states"], first)


def test_a_snapshot_replays_exactly_in_another_process(make_pool, seed):
    pool = make_pool(GymFactory(env_id="Pendulum-v1"), 2)
    actions = np.random.default_rng(seed).uniform(-2, 2, (1, 9, 1))
    pool.reset([InitialState(trial=5), InitialState(trial=6)])
    pool.step_chunk(actions, [0])
    saved = pool.save([0])[0]
    rest = pool.step_chunk(actions, [0])
    pool.load({1: saved})
    replay = pool.step_chunk(actions, [1])
    np.testing.assert_array_equal(replay.observation["states"], rest.observation["states"])
    np.testing.assert_array_equal(replay.rewards, rest.rewards)


def test_what_is_not_deterministic_has_no_snapshots(make_pool):
    pool = make_pool(GymFactory(env_id="Pendulum-v1", deterministic=False), 1)
    pool.reset([InitialState()])
    with pytest.raises(SnapshotError, match="cannot be snapshotted"):
        pool.save()
