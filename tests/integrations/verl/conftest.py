"""veRL on virtual devices, for every test of the integration."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# Read by veRL when it is first imported, in this process and in the Ray workers it starts.
os.environ.setdefault("VERL_PLATFORM", "cpu")


@dataclass(frozen=True)
class Job:
    """A finished veRL job: its exit code, its output and the metrics it logged, one mapping per step."""

    returncode: int
    output: str
    metrics: list[dict]

    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-60:])


def run_job(folder: Path, name: str, *overrides: str, env: dict[str, str] | None = None, timeout: float = 420.0) -> Job:
    """Run veRL's own command in ``folder`` and wait for it."""
    log = folder / f"{name}.jsonl"
    environment = {
        **os.environ,
        "VERL_FILE_LOGGER_PATH": str(log),
        "VERL_PLATFORM": "",
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", "trainer.logger=[console,file]", *overrides],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = log.read_text().splitlines() if log.exists() else []
    return Job(done.returncode, done.stdout, [json.loads(line)["data"] for line in lines])


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory) -> Path:
    """A folder with the tiny text job in it."""
    from rlinf_verl import tiny_text as job

    folder = tmp_path_factory.mktemp("tiny_text")
    job.make(folder / "runs" / "tiny-text")
    return folder


@pytest.fixture(scope="session")
def run_verl():
    """The function that runs a veRL job; see :func:`run_job`."""
    return run_job
