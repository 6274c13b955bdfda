"""Real crashes, hangs and stops of workers: one episode fails with its cause, the others go on."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import psutil
import pytest

from rlinf_plugins.core.errors import EnvStartError, RestartStormError
from rlinf_plugins.envs import InitialState, PoolConfig
from rlinf_plugins.envs.board import Phase
from rlinf_plugins.envs.failures import diagnose
from rlinf_plugins.testing.envs import Mishap, NullFactory, ToyFactory

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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["reset", "observe"])
def test_a_crash_during_a_reset_is_an_episode_on_record(make_pool, where):
    pool = make_pool(ToyFactory(mishaps={1: Mishap(poison="kill", where=where)}), 2)
    assert list(pool.reset(START).failures) == [1]
    assert [(r.ending, r.length, r.initial.trial) for r in pool.drain_records()] == [("failed", 0, 1)]


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
@pytest.mark.parametrize("poison", ["", "hang_holding_gil"])
def test_no_worker_survives_a_killed_parent(tmp_path, poison):
    script = textwrap.dedent(f"""
        import os, threading, numpy as np
        from rlinf_plugins.envs import EnvPool, InitialState, PoolConfig
        from rlinf_plugins.testing.envs import Mishap, ToyFactory
        mishaps = {{0: Mishap(poison="{poison}", where="step", marker="{tmp_path}/hung")}} if "{poison}" else {{}}
        pool = EnvPool(ToyFactory(mishaps=mishaps), 2, PoolConfig())
        pool.reset([InitialState(), InitialState(trial=1)])
        pool.send(np.zeros((2, 1, 3)), [0, 1])
        pool.recv(1)
        print("up", flush=True)
        threading.Event().wait()
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    workers = psutil.Process(parent.pid).children(recursive=True)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def test_the_options_are_checked(make_pool):
    pool = make_pool(NullFactory(), 1, PoolConfig(max_chunk=2))
    pool.reset(START[:1])
    assert pool.step_chunk(np.zeros((1, 2, 7))).valid.all()


def _kill_worker(pool, slot, number):
    worker = pool._desk.crew.slots[slot].worker
    os.kill(worker.pid, number)
