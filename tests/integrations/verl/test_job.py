import os
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from rlinf_verl.job import TrainingJob

MARK = "RLINF_TEST_JOB"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A TrainingJob that runs ``code`` in place of veRL; every process it starts carries a mark."""
    monkeypatch.setenv(MARK, str(tmp_path))

    def make(code: str) -> TrainingJob:
        job = TrainingJob([], folder=tmp_path, log=tmp_path / "log", metrics=tmp_path / "metrics.jsonl")
        job.command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
        return job

    return make


def marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == str(folder):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def interrupt(job: TrainingJob, folder: Path, *, processes: int) -> None:
    """Press Ctrl-C after the job's first step, when it runs in at least so many processes."""
    interrupted = False
    try:
        with job:
            next(job.steps())
            assert len(marked(folder)) >= processes
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted


WRITE = """
import json, os, sys, time
def log(step):
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as file:
        file.write(json.dumps({"step": step, "data": {"n": step}}) + "\\n")
    print("step", step)
"""


def test_yields_every_step_and_the_exit_code(script):
    with script(WRITE + "for i in range(20): log(i)\nsys.exit(3)") as job:
        assert [entry["n"] for entry in job.steps()] == list(range(20))
        assert job.returncode == 3
    assert "step 19" in job.last_lines()


def test_a_silent_job_ends(script):
    with script("raise SystemExit('no luck')") as job:
        assert list(job.steps()) == []
    assert job.returncode == 1
    assert "no luck" in job.last_lines()


GRANDCHILDREN = (
    WRITE
    + """
import signal, subprocess
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
log(1)
"""
)


def test_an_interrupt_leaves_no_process(script, tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf_verl.job._GRACE_S", 0.5)
    job = script(GRANDCHILDREN + "time.sleep(600)")
    interrupt(job, tmp_path, processes=2)
    assert marked(tmp_path) == []


def test_a_crash_leaves_no_process(script, tmp_path):
    job = script(GRANDCHILDREN + "time.sleep(1)\nos._exit(9)")
    with job:
        list(job.steps())
    assert job.returncode == 9
    assert marked(tmp_path) == []


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_an_interrupted_verl_job_leaves_no_process(tiny_text, tmp_path, monkeypatch):
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("VERL_PLATFORM", "")
    overrides = ["+recipe=text_grpo_tiny", "trainer.v1.trainer_mode=m2flow", "trainer.logger=[console,file]"]
    job = TrainingJob(overrides, folder=tiny_text, log=tmp_path / "log", metrics=tmp_path / "metrics.jsonl")
    interrupt(job, tmp_path, processes=5)
    assert marked(tmp_path) == [], job.last_lines()
