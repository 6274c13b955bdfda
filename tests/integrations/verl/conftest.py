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
def read_actor():
    """Read the actor's parameters from a folder of checkpoints: ``read_actor(folder, step)``."""
    import torch

    def read(folder: Path, step: int) -> dict:
        path = folder / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt"
        state = torch.load(path, weights_only=False)
        return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in state.items()}

    return read


@pytest.fixture(scope="session")
def largest_relative_difference():
    """Compare two sets of parameters by name, each difference over the norm of the right one."""

    def compare(left: dict, right: dict) -> float:
        assert left.keys() == right.keys()
        return max(((left[k] - right[k]).norm() / right[k].norm().clamp_min(1e-12)).item() for k in left)

    return compare


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


def make_profile(path: Path, config, *, rollout=(6.0, 5.0), train=(4.0, 3.0)) -> str:
    """Write a job's profile, whose stages take so long on one and on two devices; return the override naming it."""
    import time

    from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile
    from rlinf_verl.config import m2flow_config
    from rlinf_verl.job_flow import job_cluster, job_flow

    flow, cluster = job_flow(config), job_cluster(config, m2flow_config(config))
    (kind,) = cluster.kinds

    def samples(seconds, sizes=(flow.items,)):
        return tuple(
            Sample(devices=n, items=m, seconds=s * m / flow.items, device_kind=kind)
            for n, s in zip((1, 2), seconds, strict=True)
            for m in sizes
        )

    lengths = tuple([20.0] * 14 + [100.0] * 2)
    stages = {"rollout": StageProfile(samples=samples(rollout), lengths=lengths)}
    trained = [stage.name for stage in flow.stages if stage.name != "rollout"]
    for name in trained:
        share = 0.75 if name == "actor" else 0.25 / (len(trained) - 1)
        stages[name] = StageProfile(samples=samples([share * s for s in train], (2, flow.items)))
    Profile(flow=flow.name, fingerprint=Fingerprint.of(cluster), created=time.time(), stages=stages).write(path)
    return f"trainer.v1.m2flow.profile.path={path}"


@pytest.fixture(scope="session")
def write_profile():
    """The function that writes a profile; see :func:`make_profile`."""
    return make_profile
