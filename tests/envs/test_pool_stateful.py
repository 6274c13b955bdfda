"""The pool against a model: any interleaving of steps, partial resets, crashes, restores and offloads.

The model is the environment itself, stepped in this process, and a list of the episodes that must be on record.
"""

import os
import signal
import time
from dataclasses import dataclass, field, replace

import numpy as np
import psutil
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rlinf_plugins.core.errors import PoolUsageError, SnapshotError
from rlinf_plugins.core.supervision import RestartPolicy
from rlinf_plugins.envs import Deadlines, EnvPool, InitialState
from rlinf_plugins.testing.envs import Mishap, ToyFactory

SLOTS, DIES, RAISES = 3, 6, 7
HEALTHY = ToyFactory(image=8, length=lambda task, trial: trial + 2)
FACTORY = replace(
    HEALTHY, mishaps={DIES: Mishap(poison="kill", where="step", step=1), RAISES: Mishap(poison="raise", where="reset")}
)
some_slots = st.lists(st.sampled_from(range(SLOTS)), min_size=1, unique=True)
trials = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 5, DIES, RAISES]), min_size=SLOTS, max_size=SLOTS)
seeds = st.integers(0, 2**31)


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Model:
    """What one slot must be."""

    env: object = field(default_factory=HEALTHY)
    open: int | None = None  # number of the running episode
    initial: InitialState | None = None
    known: bool = False
    failed: bool = False
    killed: bool = False  # the pool may or may not have noticed
    length: int = 0
    ret: float = 0.0
    shown: dict = field(default_factory=dict)


class PoolAgainstModel(RuleBasedStateMachine):
    """Drives both and compares every answer."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.slots = pool, [Model() for _ in range(SLOTS)]
        self.expected, self.sent = {}, {}
        batch = pool.reset([InitialState()] * SLOTS)  # closes what an earlier example left
        assert not batch.failures
        pool.drain_records()
        self.begun = pool.stats()["episodes_begun"] - SLOTS
        for model in self.slots:
            self.begin(model, InitialState())
            model.env.reset(InitialState())
            self.look(model)

    def idle(self, slots):
        return [slot for slot in slots if slot not in self.sent]

    def close(self, model, *endings):
        if model.open is not None:
            endings = {*endings, *(["failed"] if model.killed else [])}
            self.expected[model.open] = (model.initial, endings, model.length, model.ret)
            model.open = None

    def begin(self, model, initial):
        self.close(model, "abandoned")
        model.open, model.initial, model.known, model.failed, model.killed = self.begun, initial, True, False, False
        self.begun += 1

    def look(self, model):
        model.shown = {name: array.copy() for name, array in model.env.observe().items()}

    def predict(self, slot, actions):
        """Step the model; return valid, rewards and whether an episode fails."""
        model, valid, rewards = self.slots[slot], np.zeros(len(actions), bool), np.zeros(len(actions))
        if model.open is None:
            return valid, rewards
        if model.killed or not np.isfinite(actions).all():
            model.failed = True
            self.close(model, "failed")
            return valid, rewards
        for step, action in enumerate(actions):
            if model.initial.trial == DIES and model.length == 1:
                model.failed = True
                self.close(model, "failed")
                return np.zeros_like(valid), np.zeros_like(rewards)
            outcome = model.env.step(action.astype(np.float32))
            valid[step], rewards[step] = True, outcome.reward
            model.length, model.ret = model.length + 1, model.ret + outcome.reward
            if outcome.terminated:
                self.close(model, "finished")
                break
        self.look(model)
        return valid, rewards

    def agree(self, slot, done, failure, observation):
        model = self.slots[slot]
        assert done == (model.open is None)
        assert (failure is not None) == model.failed, failure
        for name, array in model.shown.items():
            np.testing.assert_array_equal(observation[name], array, err_msg=f"slot {slot}, {name}")

    def agree_batch(self, batch):
        for row, slot in enumerate(batch.slots):
            seen = {name: array[row] for name, array in batch.observation.items()}
            self.agree(slot, batch.done[row], batch.failures.get(slot), seen)

    @rule(slots=some_slots, chosen=trials)
    def reset(self, slots, chosen):
        slots = self.idle(slots)
        starts = [InitialState(trial=trial) for trial in chosen[: len(slots)]]
        for slot, start in zip(slots, starts, strict=True):
            model = self.slots[slot]
            self.begin(model, start)
            model.env.reset(start)
            model.length, model.ret = 0, 0.0
            if start.trial == RAISES:
                model.failed = True
                self.close(model, "failed")
            else:
                self.look(model)
        if slots:
            self.agree_batch(self.pool.reset(starts, slots))

    @rule(slots=some_slots, count=st.integers(1, 4), seed=seeds, nan=st.integers(0, 20))
    def step(self, slots, count, seed, nan):
        slots = [slot for slot in self.idle(slots) if self.slots[slot].known]
        if not slots:
            return
        actions = np.random.default_rng(seed).uniform(-1, 1, (len(slots), count, 3))
        if nan < len(slots):
            actions[nan, count - 1, 1] = np.nan
        predicted = [self.predict(slot, chunk) for slot, chunk in zip(slots, actions, strict=True)]
        batch = self.pool.step_chunk(actions, slots)
        for row, (valid, rewards) in enumerate(predicted):
            np.testing.assert_array_equal(batch.valid[row], valid)
            np.testing.assert_allclose(batch.rewards[row], rewards, atol=1e-6)
        self.agree_batch(batch)

    @rule(slots=some_slots, seed=seeds)
    def send(self, slots, seed):
        slots = [slot for slot in self.idle(slots) if self.slots[slot].known]
        actions = np.random.default_rng(seed).uniform(-1, 1, (SLOTS, 2, 3))
        for slot in slots:
            self.pool.send(actions[slot][None], [slot])
            self.sent[slot] = self.predict(slot, actions[slot])

    # No preconditions: who has answered depends on time, and Hypothesis takes rules that come and go for a fault.
    @rule(at_least=st.integers(0, SLOTS))
    def receive(self, at_least):
        results = self.pool.recv(at_least)
        assert len(results) >= min(at_least, len(self.sent))
        for result in results:
            valid, rewards = self.sent.pop(result.slot)
            np.testing.assert_array_equal(result.valid, valid)
            np.testing.assert_allclose(result.rewards, rewards, atol=1e-6)
            self.agree(result.slot, result.done, result.failure, result.observation)

    @rule(slot=st.sampled_from(range(SLOTS)), wait=st.booleans())
    def kill(self, slot, wait):
        """Kill an idle worker; the pool notices before the next call, or only then."""
        crew = self.pool._desk.crew
        with crew.lock:
            worker, starts = crew.slots[slot].worker, crew.slots[slot].starts
        if slot in self.sent or worker is None or crew.slots[slot].status.value != "idle":
            return
        os.kill(worker.pid, signal.SIGKILL)
        while is_alive(worker.pid):  # or the next command is its last one and fails, which is no rule of the model
            time.sleep(0.001)
        model = self.slots[slot]
        model.killed = model.open is not None
        while wait and crew.slots[slot].starts == starts:
            crew.pump(0.05)
        if wait and model.open is not None:
            model.failed = True
            self.close(model, "failed")

    @rule(source=st.sampled_from(range(SLOTS)), into=st.sampled_from(range(SLOTS)))
    def save_and_load(self, source, into):
        if source in self.sent or into in self.sent:
            return
        model, other = self.slots[source], self.slots[into]
        if model.open is None or model.killed:
            with pytest.raises((PoolUsageError, SnapshotError)):
                self.pool.save([source])
            if model.open is not None:
                model.failed = True
                self.close(model, "failed")
            return
        saved = self.pool.save([source])
        state, initial, length, ret = model.env.save(), model.initial, model.length, model.ret
        self.begin(other, initial)
        other.env.load(state)
        other.length, other.ret = length, ret
        self.look(other)
        self.agree_batch(self.pool.load({into: saved[source]}))

    @rule()
    def leave_and_come_back(self):
        if self.sent:
            return
        try:
            self.pool.offload()
        except SnapshotError:
            assert any(model.killed for model in self.slots), "nothing was wrong with any environment"
            self.pool.offload()
        for model in self.slots:
            if model.killed and model.open is not None:
                model.failed = True
                self.close(model, "failed")
        assert all(slot.worker is None for slot in self.pool._desk.crew.slots)
        batch = self.pool.onload()
        running = [slot for slot in range(SLOTS) if self.slots[slot].open is not None]
        assert (batch.slots if batch is not None else []) == running
        if batch is not None:
            self.agree_batch(batch)

    @invariant()
    def every_episode_that_ended_is_on_record_once(self):
        for record in self.pool.drain_records():
            self.notice(record.number)
            initial, endings, length, ret = self.expected.pop(record.number)
            assert (record.initial, record.length) == (initial, length)
            assert record.ending in endings
            assert record.ret == pytest.approx(ret, abs=1e-5)

    def notice(self, number):
        """The pool may learn of a killed worker whenever it looks, also while another slot is waited for."""
        for model in self.slots:
            if model.killed and model.open == number:
                model.failed = True
                self.close(model, "failed")

    def teardown(self):
        self.pool.recv(SLOTS)
        self.every_episode_that_ended_is_on_record_once()
        assert not self.expected, "episodes without a record"


@pytest.mark.slow
def test_any_interleaving_gives_what_the_model_gives(quick):
    never = RestartPolicy(max_failures=10**9, first_delay_s=0.0, max_delay_s=0.0)
    config = replace(quick, restart=never, deadlines=Deadlines())
    with EnvPool(FACTORY, SLOTS, config) as pool:
        run_state_machine_as_test(
            lambda: PoolAgainstModel(pool),
            settings=settings(
                max_examples=8, stateful_step_count=12, deadline=None, phases=[Phase.generate], print_blob=True
            ),
        )
        stats = pool.stats()
    assert stats["starts"] > SLOTS, "no worker ever died"
