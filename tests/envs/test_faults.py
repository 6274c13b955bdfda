"""Real crashes, hangs and stops of workers: one episode fails with its cause, the others go on."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

from rlinf_plugins.core.errors import EnvStartError, PoolUsageError, RestartStormError, SnapshotError
from rlinf_plugins.envs import InitialState
from rlinf_plugins.envs.board import Phase
from rlinf_plugins.envs.failures import diagnose
from rlinf_plugins.testing.envs import Mishap, ToyFactory

START = [InitialState(trial=0), InitialState(trial=1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "kind", "by", "says"),
    [
        ("kill", "crashed", "SIGKILL", "SIGKILL"),
        ("segfault", "crashed", "SIGSEGV", "SIGSEGV"),
        ("exit", "raised", "", "SystemExit: 3"),
        ("raise", "raised", "", "out of sorts"),
        ("ask", "raised", "", "EOFError"),
        ("hang", "hung", "SIGKILL", "no answer"),
        ("hang_holding_gil", "hung", "SIGKILL", "no answer"),
        ("stop", "hung", "SIGKILL", "no answer"),
    ],
)
def test_a_mishap_fails_one_episode_with_its_cause(make_pool, poison, kind, by, says):
    pool = make_pool(ToyFactory(mishaps={1: Mishap(poison=poison, where="step", step=2)}), 2)
    pool.reset(START)
    batch = pool.step_chunk(np.full((2, 4, 3), 0.25))
    assert batch.valid.sum(axis=1).tolist() == [4, 0]
    failure = batch.failures[1]
    assert (failure.kind, failure.signal, failure.step, failure.phase) == (kind, by, 2, "step")
    assert says in failure.reason
    assert failure.action == ((0.25,) * 3,) * 4
    assert pool.reset([InitialState(trial=2)], [1]).failures == {}
    assert pool.step_chunk(np.zeros((2, 1, 3))).valid.all()
    assert [(r.slot, r.ending, r.length) for r in pool.drain_records()] == [(1, "failed", 2)]


PLACES = ("reset", "observe", "step", "save", "load")
POISONS = ("kill", "hang", "stop")


def poisoned(folder, poison, places):
    """Return a factory whose environment has each mishap once in its life, restarts of the process included.

    Args:
        folder: Where what happened is noted.
        poison: What happens.
        places: Where, by trial.
    """
    notes = {trial: str(folder / f"{poison}-{where}") for trial, where in places.items()}
    mishaps = {trial: Mishap(poison=poison, where=where, marker=notes[trial]) for trial, where in places.items()}
    return ToyFactory(mishaps=mishaps)


@pytest.fixture
def patient(quick):
    """Deadlines that a worker meets even where other jobs have taken the machine."""
    deadlines = replace(quick.deadlines, start=15.0, reset=4.0, step=2.0, snapshot=4.0)
    return replace(quick, deadlines=deadlines, restart=replace(quick.restart, max_failures=20), parallel_starts=9)


@pytest.mark.slow
def test_a_mishap_at_any_phase_of_a_start_is_survived(make_pool, patient, tmp_path):
    """In the build, the first reset and the first frame; all at once, in nine processes."""
    phases = [(poison, where) for poison in POISONS for where in ("build", "reset", "observe")]
    pool = make_pool([poisoned(tmp_path, poison, {0: where}) for poison, where in phases], None, patient)
    assert len(list(tmp_path.iterdir())) == len(phases)
    assert pool.stats()["starts"] >= 2 * len(phases)
    assert pool.reset([InitialState()] * len(phases)).failures == {}
    assert pool.drain_records() == []


@pytest.mark.slow
def test_a_mishap_at_any_phase_of_an_episode_fails_that_episode_alone(make_pool, patient, tmp_path):
    places = dict(enumerate(PLACES, 1))
    pool = make_pool([ToyFactory(), *(poisoned(tmp_path, poison, places) for poison in POISONS)], None, patient)
    sick = [1, 2, 3]
    for trial, where in places.items():
        episodes = [InitialState(trial=trial)] * 4
        began = pool.reset(episodes)
        if where in ("reset", "observe"):
            assert list(began.failures) == sick
            assert pool.reset(episodes[:3], sick).failures == {}
        stepped = pool.step_chunk(np.zeros((4, 2, 3)))
        assert list(stepped.failures) == (sick if where == "step" else [])
        if where in ("step", "save"):
            with pytest.raises(PoolUsageError if where == "step" else SnapshotError, match="environment 1"):
                pool.save()
        else:
            assert list(pool.load(pool.save()).failures) == (sick if where == "load" else [])
    assert len(list(tmp_path.iterdir())) == len(places) * len(POISONS)
    records = [record for record in pool.drain_records() if record.ending == "failed"]
    assert sorted(record.slot for record in records) == sorted(sick * len(PLACES))
    for record in records:
        assert record.failure.phase == places[record.initial.trial]
        assert (record.failure.kind == "crashed") == (POISONS[record.slot - 1] == "kill")
        assert record.failure.signal == "SIGKILL"
    assert pool.reset(episodes).failures == {}
    assert pool.stats()["starts"] == 4 + len(places) * len(POISONS)


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["kill", "hang_holding_gil", "stop"])
def test_a_mishap_at_the_end_holds_up_nothing(make_pool, tmp_path, poison):
    pool = make_pool([poisoned(tmp_path, poison, {0: "close"}), ToyFactory()], None)
    began = time.monotonic()
    pool.close()  # the fixture looks for what is left
    assert time.monotonic() - began < 30
    assert os.listdir(tmp_path)


@pytest.mark.slow
def test_an_idle_worker_that_is_stopped_is_replaced(make_pool):
    pool = make_pool(ToyFactory(), 2)
    pool.reset(START)
    _kill_worker(pool, 0, signal.SIGSTOP)
    while pool.stats()["starts"] == 2:
        pool._desk.crew.pump(0.1)
    batch = pool.step_chunk(np.zeros((2, 1, 3)))
    assert batch.failures[0].kind == "hung"
    assert "SIGSTOP" in batch.failures[0].reason
    assert batch.valid[:, 0].tolist() == [False, True]


def test_a_kill_between_two_calls_costs_one_episode_and_no_other(make_pool):
    pool = make_pool(ToyFactory(), 2)
    pool.reset(START)
    _kill_worker(pool, 0, signal.SIGKILL)
    batch = pool.step_chunk(np.zeros((2, 2, 3)))
    assert batch.valid.sum(axis=1).tolist() == [0, 2]
    assert batch.failures[0].signal == "SIGKILL"
    assert pool.reset(START[:1], [0]).failures == {}
    stats = pool.stats()
    assert (stats["episodes_begun"], stats["episodes_closed"]) == (3, 1)


@pytest.mark.parametrize(
    ("where", "says"), [("step", "the reward of step 0 is nan"), ("observe", "'states' has values")]
)
def test_a_simulation_that_diverges_is_a_failed_episode_not_a_number(make_pool, where, says):
    pool = make_pool(ToyFactory(mishaps={1: Mishap(poison="nan", where=where)}), 2)
    pool.reset(START)
    batch = pool.step_chunk(np.zeros((2, 1, 3)))
    assert (batch.failures[1].kind, batch.valid[:, 0].tolist()) == ("raised", [True, False])
    assert says in batch.failures[1].reason
    assert np.isfinite(batch.rewards).all()
    assert [record.failure is not None for record in pool.drain_records()] == [True]


@pytest.mark.slow
def test_a_worker_that_never_lasts_is_given_up(make_pool):
    pool = make_pool(ToyFactory(mishaps={1: Mishap(poison="kill", where="step")}), 2)
    pool.reset(START)
    for _ in range(2):
        pool.step_chunk(np.zeros((2, 1, 3)))
        pool.reset([InitialState(trial=1)], [1])
    pool.step_chunk(np.zeros((2, 1, 3)))
    with pytest.raises(RestartStormError, match="3 times"):
        pool.reset([InitialState(trial=1)], [1])
    assert pool.step_chunk(np.zeros((1, 1, 3)), [0]).valid.all()


def test_what_cannot_be_made_says_why_and_leaves_nothing(make_pool):
    with pytest.raises(EnvStartError, match="out of sorts"):
        make_pool(ToyFactory(mishaps={-1: Mishap(poison="raise", where="build")}), 2)


def test_a_blank_first_frame_is_refused(make_pool):
    with pytest.raises(EnvStartError, match="blank"):
        make_pool(ToyFactory(image=16, mishaps={-1: Mishap(poison="blank", where="observe")}), 1)


@pytest.mark.slow
def test_a_grown_worker_is_replaced_at_its_episodes_end(make_pool, quick):
    factory = ToyFactory(length=lambda *_: 1, mishaps={1: Mishap(poison="leak", where="step")})
    pool = make_pool(factory, 1, replace(quick, memory_budget=64 << 20))
    pool.reset([InitialState(trial=0)])
    pool.step_chunk(np.zeros((1, 1, 3)))
    assert pool.stats()["recycled"] == 0
    pool.reset([InitialState(trial=1)])
    pool.step_chunk(np.zeros((1, 1, 3)))
    assert pool.reset([InitialState(trial=0)]).failures == {}
    assert pool.stats()["recycled"] == 1
    assert [r.ending for r in pool.drain_records()] == ["finished", "finished"]


def test_a_stall_of_all_is_told_from_a_hang_of_one():
    render, step = Phase.FIRST_RENDER, Phase.STEP
    kind, reason = diagnose(0, 9.0, [render] * 4, [0, 1, 2, 3])
    assert kind == "stalled"
    assert "all 4 waiting workers stopped in first render" in reason
    assert "parallel_starts=1" in reason
    assert diagnose(0, 9.0, [step, render, step], [0])[0] == "hung"
    assert diagnose(0, 9.0, [step, render, step], [0, 1])[0] == "hung"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "end"), [("", "SIGKILL"), ("hang_holding_gil", "SIGKILL"), ("", "SIGINT"), ("hang", "SIGINT")]
)
def test_no_worker_survives_its_parent(tmp_path, poison, end):
    script = textwrap.dedent(f"""
        import os, signal, threading, numpy as np
        from rlinf_plugins.envs import EnvPool, InitialState, PoolConfig
        from rlinf_plugins.testing.envs import Mishap, ToyFactory
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit an ignored one
        mishaps = {{0: Mishap(poison="{poison}", where="step", marker="{tmp_path}/hung")}} if "{poison}" else {{}}
        pool = EnvPool(ToyFactory(mishaps=mishaps), 2, PoolConfig())
        pool.reset([InitialState(), InitialState(trial=1)])
        pool.send(np.zeros((2, 1, 3)), [0, 1])
        pool.recv(1)
        print("up", flush=True)
        threading.Event().wait()
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) == 2
    parent.send_signal(signal.Signals[end])
    parent.wait(30)
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def _kill_worker(pool, slot, number):
    worker = pool._desk.crew.slots[slot].worker
    os.kill(worker.pid, number)
