"""What ``rlinf-plugins evaluate`` runs: an environment, its (task, initial state) pairs, and how the policy acts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlinf_plugins.core.config import from_mapping, suggest
from rlinf_plugins.core.errors import ConfigError, UnknownNameError
from rlinf_plugins.envs import EnvSpec, InitialState, all_pairs
from rlinf_verl.vla.loop_config import EmbodiedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite(EmbodiedConfig):
    """Environments as in training (``trainer.v1.m2flow.envs``), and what of them is evaluated.

    Attributes:
        tasks: Indices of the environment's tasks; None takes all.
        trials: Initial states of each task; None takes all the environment has.
        first_trial: First of them.
        temperature: 0 is greedy.
        top_k: Draw from this many tokens; 0 is all.
        seed: A pair's draws depend on it, on the pair and on nothing else.
        unnorm_key: Data set whose statistics turn tokens into the robot's units; None where the checkpoint has one.
        statistics: How ``dataset_statistics.json`` and the configuration's own statistics combine.
        extremes: Normalise by minimum and maximum (ALOHA).
        max_wait_ms: Longest time an observation waits for others to share a forward with.
    """

    tasks: list[int] | None = None
    trials: int | None = None
    first_trial: int = 0
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    unnorm_key: str | None = None
    statistics: Literal["replace", "merge"] = "replace"
    extremes: bool = False
    max_wait_ms: float = 5.0

    def validate(self, where: str) -> None:
        """Refuse an empty suite and settings a policy does not take."""
        EmbodiedConfig.validate(self, where)
        if self.tasks == [] or (self.trials is not None and self.trials < 1):
            raise ConfigError(f"{where}: tasks={self.tasks} and trials={self.trials} leave nothing to evaluate")
        if self.temperature < 0 or self.first_trial < 0:
            raise ConfigError(
                f"{where}.temperature and {where}.first_trial must not be negative, got {self.temperature} and "
                f"{self.first_trial}"
            )

    def pairs(self, spec: EnvSpec) -> list[InitialState]:
        """Return every (task, initial state) once, task by task: changing the task is what costs.

        Raises:
            ConfigError: A task or an initial state the environment does not have, or an unlimited number of them.
        """
        return all_pairs(spec, self.tasks, self.trials, self.first_trial)


def _libero(suite: str) -> dict[str, Any]:
    return {
        "factory": "rlinf_plugins.envs.libero:LiberoFactory",
        "kwargs": {"suite": suite, "wrist": False},
        "num_envs": 2,
        "cameras": ["main_images"],
        "view": "libero",
        "gripper": "libero",
        "pool": {"out_of_range": "clip"},
    }


def _plate(variant: str) -> dict[str, Any]:
    return {
        "factory": "rlinf_plugins.envs.maniskill:ManiSkillFactory",
        "kwargs": {"env_id": "RlinfPutOnPlate-v1", "image_size": 224, "options": {"variant": variant}},
        "num_envs": 4,
        "cameras": ["main_images"],
        "gripper": "widowx",
        "trials": 64,
        "first_trial": 10000,
        "temperature": 0.6,
        "pool": {"out_of_range": "clip", "episode": {"max_steps": 80}},
    }


SUITES: dict[str, dict[str, Any]] = {
    **{name: _libero(name) for name in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")},
    **{
        f"put_on_plate_{variant}": _plate(variant) for variant in ("train", "object", "plate", "texture", "instruction")
    },
    "maniskill": {
        "factory": "rlinf_plugins.envs.maniskill:ManiSkillFactory",
        "kwargs": {"env_id": "PushCube-v1", "image_size": 128, "control_mode": "pd_ee_delta_pos"},
        "cameras": ["main_images"],
        "trials": 16,
        "pool": {"out_of_range": "clip", "episode": {"max_steps": 50}},
    },
}
"""Suites by name. LIBERO's step caps are OpenVLA's (220, 280, 300, 520, 400); put-on-plate ends after RLinf's 80."""


def read_suite(name: str, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite.

    Args:
        name: One of :data:`SUITES`, or a YAML file.
        overrides: ``key=value``, e.g. ``kwargs.env_id=PickCube-v1`` or ``pool.episode.max_steps=100``.

    Raises:
        UnknownNameError: Neither a suite nor a file.
        ConfigError: Unreadable YAML, an unknown option, a wrong type or an impossible value.
    """
    if name in SUITES:
        base: Any = OmegaConf.create(SUITES[name])
    elif Path(name).is_file():
        try:
            base = OmegaConf.load(name)
        except Exception as error:  # whatever the YAML parser raises
            raise ConfigError(f"{name} is not readable YAML: {error}") from error
    else:
        raise UnknownNameError(f"there is no suite or file {name!r}; {suggest(name, SUITES)}")
    try:
        merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"suite {name}: overrides must be key=value, got {list(overrides)}: {error}") from error
    values: Any = OmegaConf.to_container(merged, resolve=True)
    return from_mapping(Suite, values, f"suite {name}")
