"""The pool over Ray actors: the local pool's answers, stable binding, and what happens when an actor dies."""

import asyncio
import os
import signal

import numpy as np
import pytest

from rlinf_plugins.core.errors import ActionError, ConfigError, EnvStartError, PoolUsageError, SnapshotError
from rlinf_plugins.envs import EnvPool, InitialState, PoolConfig
from rlinf_plugins.envs.ray_placement import Placement
from rlinf_plugins.envs.ray_pool import RayEnvPool
from rlinf_plugins.testing.envs import Mishap, ToyFactory

SMALL = 0.25  # CPUs of an environment
TOY = ToyFactory(image=8, length=lambda task, trial: trial + 3)


def starts(*trials):
    return [InitialState(trial=trial) for trial in trials]


def test_environments_are_spread_unevenly_and_stay_where_they_are():
    assert Placement(actors=2).shares(5) == [[0, 1, 2], [3, 4]]
    assert Placement(actors=3).shares(3) == [[0], [1], [2]]
    for actors in (0, 4):
        with pytest.raises(ConfigError, match=f"got {actors}"):
            Placement(actors=actors).shares(3)


def test_an_actor_takes_what_its_environments_need():
    options = Placement(cpus_per_env=0.5, gpus_per_actor=1.0, resources={"arm": 2}).options(3)
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (1.5, 1.0, {"arm": 2})
    assert options["scheduling_strategy"] == "SPREAD"
    assert Placement(spread=False).options(1)["scheduling_strategy"] == "DEFAULT"


@pytest.fixture(scope="module")
def pool(ray_session):
    with RayEnvPool(TOY, 3, PoolConfig(), Placement(actors=2, cpus_per_env=SMALL)) as pool:
        yield pool
        pool.drain_records()


def facts(records):
    return sorted((r.slot, r.initial.trial, r.ending, r.length, round(r.ret, 4), r.success_once) for r in records)


pytestmark = [pytest.mark.ray]


@pytest.mark.slow
def test_it_answers_as_the_local_pool_does(pool, seed):
    actions = np.random.default_rng(seed).uniform(-1, 1, (3, 5, 3))
    seen = []
    with EnvPool(TOY, 3) as local:
        for one in (local, pool):
            batches = [one.reset(starts(0, 1, 4)), one.step_chunk(actions), one.step_chunk(actions[[2, 0], :1], [2, 0])]
            saved = one.save([2])
            batches += [one.load({1: saved[2]}), one.step_chunk(actions[:1], [1])]
            seen.append((batches, facts(one.drain_records())))
    (local_batches, local_records), (batches, records) = seen
    assert records == local_records
    for mine, theirs in zip(batches, local_batches, strict=True):
        assert mine.slots == theirs.slots
        assert mine.task_descriptions == theirs.task_descriptions
        for name in ("rewards", "terminated", "truncated", "valid", "done"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name), err_msg=name)
        for name, array in theirs.observation.items():
            np.testing.assert_array_equal(mine.observation[name], array)


@pytest.mark.slow
def test_send_and_recv_and_coroutines(pool):
    pool.reset(starts(5, 5, 5))
    pool.send(np.zeros((3, 2, 3)), [0, 1, 2])
    with pytest.raises(PoolUsageError, match=r"\[1\] are busy"):
        pool.reset(starts(0), [1])
    results = []
    while len(results) < 3:
        results += pool.recv()
    assert sorted(result.slot for result in results) == [0, 1, 2]
    assert pool.recv() == []

    async def play(slot):
        result = await pool.async_reset(slot, InitialState(trial=slot))
        steps = 0
        while not result.done:
            result = await pool.async_step(slot, np.zeros(3))
            steps += int(result.valid.sum())
        return steps

    async def all_of_them():
        return await asyncio.gather(*map(play, range(3)))

    assert asyncio.run(all_of_them()) == [3, 4, 5]


@pytest.mark.slow
def test_misuse_is_named_before_anything_moves(pool):
    begun = pool.stats()["episodes_begun"]
    with pytest.raises(PoolUsageError, match="no environment 7"):
        pool.reset(starts(0), [7])
    with pytest.raises(PoolUsageError, match="no initial state 99"):
        pool.reset(starts(99), [0])
    pool.reset(starts(0, 0, 0))
    with pytest.raises(ActionError):
        pool.step_chunk(np.zeros((3, 1, 4)))
    with pytest.raises(SnapshotError, match="is of"):
        pool.load({0: __import__("pickle").dumps(("Other", InitialState(), b""))})
    assert pool.stats()["episodes_begun"] == begun + 3


@pytest.mark.slow
def test_offload_and_onload(pool):
    pool.reset(starts(5, 5, 5))
    before = pool.step_chunk(np.full((3, 2, 3), 0.5))
    assert pool.offload() > 0
    with pytest.raises(PoolUsageError, match="parked"):
        pool.step_chunk(np.zeros((3, 1, 3)))
    batch = pool.onload()
    np.testing.assert_array_equal(batch.observation["states"], before.observation["states"])
    assert pool.step_chunk(np.zeros((3, 9, 3))).valid.sum(axis=1).tolist() == [6, 6, 6]


def process_of(pool, actor):
    return ray_get(pool._hosts.actors[actor].__ray_call__.remote(lambda _: os.getpid()))


def ray_get(reference):
    import ray

    return ray.get(reference)


@pytest.mark.slow
def test_a_dead_actor_fails_its_episodes_and_comes_back(ray_session):
    with RayEnvPool(TOY, 3, PoolConfig(), Placement(actors=2, cpus_per_env=SMALL)) as pool:
        pool.reset(starts(6, 6, 6))
        pool.step_chunk(np.zeros((3, 1, 3)))
        os.kill(process_of(pool, 0), signal.SIGKILL)
        batch = pool.step_chunk(np.zeros((3, 2, 3)))
        assert batch.valid.sum(axis=1).tolist() == [0, 0, 2]
        assert {slot: failure.kind for slot, failure in batch.failures.items()} == {0: "crashed", 1: "crashed"}
        assert "Ray actor" in batch.failures[0].reason
        assert pool.step_chunk(np.zeros((2, 1, 3)), [0, 1]).done.all()  # until they are reset
        assert pool.reset(starts(1, 1), [0, 1]).failures == {}
        assert pool.step_chunk(np.zeros((3, 4, 3))).valid.sum(axis=1).tolist() == [4, 4, 4]
        records = pool.drain_records()
        assert facts(records)[:2] == [(0, 1, "finished", 4, 0.0, True), (0, 6, "failed", 0, 0.0, False)]
        assert sorted(record.number for record in records) == [0, 1, 3, 4]
        stats = pool.stats()
        assert (stats["episodes_begun"], stats["episodes_closed"]) == (5, 4)

        # what its processes had saved is gone with it; the others come back where they were
        assert pool.reset(starts(6, 6), [0, 1]).failures == {}
        pool.offload()
        os.kill(process_of(pool, 0), signal.SIGKILL)
        back = pool.onload()
        assert (back.slots, back.done.tolist()) == ([2], [False])
        assert sorted(pool.step_chunk(np.zeros((3, 1, 3))).failures) == [0, 1]

        # and one that stops answering is replaced
        assert pool.reset(starts(6, 6), [0, 1]).failures == {}
        os.kill(process_of(pool, 0), signal.SIGSTOP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rlinf_plugins.envs.ray_hosts._SLACK_S", -25.0)  # of a step's 30 s
            batch = pool.step_chunk(np.zeros((3, 1, 3)))
        assert {slot: failure.kind for slot, failure in batch.failures.items()} == {0: "hung", 1: "hung"}
        assert pool.reset(starts(1, 1), [0, 1]).failures == {}
        assert sorted(r.ending for r in pool.drain_records()) == ["failed"] * 4 + ["finished"]
    assert sorted(record.number for record in pool.drain_records()) == [9, 10]


@pytest.mark.slow
def test_a_reply_from_before_an_actors_death_counts(ray_session):
    slow = ToyFactory(length=lambda *_: 1, step_seconds=lambda task, trial, step: 20.0 if trial == 1 else 0.0)
    with RayEnvPool(slow, 2, PoolConfig(), Placement(cpus_per_env=SMALL)) as pool:
        pool.reset(starts(1, 0))
        pool.send(np.zeros((2, 1, 3)), [0, 1])
        quick = pool._inflight[1].reply
        ray_session.wait([quick], timeout=60)
        os.kill(process_of(pool, 0), signal.SIGKILL)
        lost, finished = sorted(pool.recv(2), key=lambda one: one.slot)
        assert (lost.failure.kind, finished.failure, finished.valid.tolist()) == ("crashed", None, [True])
        assert [(r.slot, r.ending) for r in pool.drain_records()] == [(1, "finished"), (0, "failed")]


@pytest.mark.slow
def test_what_cannot_start_says_why(ray_session):
    bad = ToyFactory(mishaps={-1: Mishap(poison="raise", where="build")})
    with pytest.raises(EnvStartError, match="out of sorts"):
        RayEnvPool(bad, 1, PoolConfig(), Placement(cpus_per_env=SMALL))
    with pytest.raises(EnvStartError, match=r"need CPU=0.25, unobtainium=1; Ray has"):
        RayEnvPool(TOY, 1, placement=Placement(cpus_per_env=SMALL, resources={"unobtainium": 1}, start_timeout=1.0))
