import numpy as np
import pytest

from rlinf_plugins.core.errors import EpisodeFailedError
from rlinf_plugins.envs import Failure, InitialState, StepResult
from rlinf_verl.vla.loop_config import EmbodiedConfig
from rlinf_verl.vla.loop_episode import EpisodeRunner
from rlinf_verl.vla.rollout_engine import Decision


class ScriptedPool:
    """Plays the given results back and records what it was asked."""

    def __init__(self, *results):
        self.results, self.actions, self.initial = list(results), [], None

    async def async_reset(self, slot, initial):
        self.initial = (slot, initial)
        return self.results.pop(0)

    async def async_step(self, slot, actions):
        self.actions.append(actions)
        return self.results.pop(0)


def state(frame, *, valid=(), terminated=False, truncated=False, success=False, failure=None, rewards=None):
    n = len(valid)
    end = np.zeros(n, bool)
    if n:
        end[max(i for i, v in enumerate(valid) if v)] = True
    return StepResult(
        slot=0,
        observation={"main_images": np.full((2, 2, 3), frame, np.uint8), "states": np.full(3, frame, np.float32)},
        task_description="move",
        rewards=np.ones(n, np.float32) if rewards is None else np.array(rewards, np.float32),
        terminated=end & terminated,
        truncated=end & truncated,
        valid=np.array(valid, bool),
        metrics={"success": (end & success).astype(np.float32)},
        done=terminated or truncated or failure is not None,
        failure=failure,
    )


def decision(values=None, version=1):
    return Decision(
        request_id="r",
        finish="acted",
        version=version,
        prompt=[1, 29871],
        tokens=np.full((2, 3), 31800),
        log_probs=np.zeros((2, 3), np.float32),
        values=values,
        actions=np.array([[0.1, 0.2, 0.9], [0.3, 0.4, 0.2]]),
    )


@pytest.fixture
def play():
    async def run(pool, decide, values_the_end=False, **options):
        runner = EpisodeRunner(pool, EmbodiedConfig(factory="m:f", **options), ["main_images"], values_the_end)
        return await runner.run(
            uid="u",
            session=1,
            slot=0,
            initial=InitialState(task=1, trial=4),
            decide=decide,
            sampling={"temperature": 0.7, "top_k": -1},
        )

    return run


async def test_each_chunk_holds_what_the_policy_saw_and_what_came_of_it(play):
    pool = ScriptedPool(
        state(0), state(1, valid=[True, True]), state(2, valid=[True, False], terminated=True, success=True)
    )
    seen = []

    async def decide(images, instruction, proprio):
        seen.append((int(images[0][0, 0, 0]), instruction, proprio))
        return decision()

    trace = await play(pool, decide)
    assert pool.initial == (0, InitialState(task=1, trial=4))
    assert seen == [(0, "move", None), (1, "move", None)]
    assert [int(c.images[0, 0, 0, 0]) for c in trace.chunks] == [0, 1]
    assert (trace.success, trace.ret, trace.steps) == (True, 3.0, 3)
    assert [c.terminated for c in trace.chunks] == [False, True]
    assert (trace.chunks[0].temperature, trace.chunks[0].top_k) == (0.7, 0)
    assert trace.final_values is None


async def test_a_truncated_episode_asks_for_the_value_of_what_it_left(play):
    pool = ScriptedPool(state(0), state(5, valid=[True, True], truncated=True))
    asked = []

    async def decide(images, instruction, proprio):
        asked.append(int(images[0][0, 0, 0]))
        return decision(values=np.array([float(images[0][0, 0, 0])]))

    trace = await play(pool, decide)
    assert asked == [0, 5]
    assert trace.final_values.tolist() == [5.0]
    assert not trace.success


@pytest.mark.parametrize(("always", "final"), [(False, None), (True, [5.0])])
async def test_what_follows_termination_is_valued_only_where_asked_for(play, always, final):
    pool = ScriptedPool(state(0), state(5, valid=[True, True], terminated=True))

    async def decide(images, instruction, proprio):
        return decision(values=np.array([float(images[0][0, 0, 0])]))

    trace = await play(pool, decide, values_the_end=always)
    assert (None if trace.final_values is None else trace.final_values.tolist()) == final


async def test_gripper_and_execution_are_translated(play):
    pool = ScriptedPool(state(0), state(1, valid=[True], terminated=True))

    async def decide(*_):
        return decision()

    await play(pool, decide, gripper="widowx", execute=1)
    assert pool.actions[0].tolist() == [[0.1, 0.2, 1.0]]


async def test_proprio_is_the_named_observation(play):
    pool = ScriptedPool(state(3), state(1, valid=[True], terminated=True))
    got = []

    async def decide(images, instruction, proprio):
        got.append(proprio.tolist())
        return decision()

    await play(pool, decide, proprio="states")
    assert got == [[3.0, 3.0, 3.0]]


async def test_a_failed_environment_ends_the_episode_with_its_reason(play):
    failure = Failure(kind="crashed", slot=0, phase="step", step=7, reason="killed by SIGKILL")
    pool = ScriptedPool(state(0), state(1, valid=[True, True]), state(1, failure=failure))

    async def decide(*_):
        return decision()

    with pytest.raises(EpisodeFailedError, match=r"u_1 failed after 1 chunks: .*crashed .*SIGKILL"):
        await play(pool, decide)
