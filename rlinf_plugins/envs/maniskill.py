"""ManiSkill environments for the pool: state or RGB, one simulation per process on CPU.

Imports ManiSkill only in the process that makes the environment.
"""

import importlib.util
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.core.errors import (
    ConfigError,
    EnvContractError,
    RenderingSetupError,
    UnknownNameError,
)
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.assets import no_questions
from rlinf_plugins.envs.protocol import Environment, EnvSpec, InitialState, Observation, Outcome
from rlinf_plugins.envs.rendering import check_vulkan, prepare_vulkan

PUT_ON_PLATE = "RlinfPutOnPlate-v1"
_MAIN_CAMERAS = ("3rd_view_camera", "base_camera")
_WRIST_CAMERAS = ("hand_camera", "wrist_camera")


@dataclass(frozen=True, kw_only=True, slots=True)
class ManiSkillFactory:
    """Makes a ManiSkill environment in the process that runs it.

    Observations: ``main_images`` and, where the robot has one, ``wrist_images`` (uint8 ``[size, size, 3]``), and
    ``states`` (float32): with RGB what the robot feels of itself (joint positions and velocities), with ``state``
    everything the task offers.

    Attributes:
        env_id: Registered name, e.g. ``"PickCube-v1"``, or ``"RlinfPutOnPlate-v1"``.
        obs_mode: ``"rgb"`` or ``"state"``; the latter draws nothing, but ManiSkill needs a Vulkan driver even so.
        image_size: Edge of the images in pixels.
        control_mode: ManiSkill's controller; None is the robot's default.
        reward_mode: ManiSkill's reward; None is the task's default.
        options: Further arguments of the environment, e.g. ``{"variant": "plate"}``.
        environment: Variables of the worker's process.
    """

    env_id: str
    obs_mode: Literal["rgb", "state"] = "rgb"
    image_size: int = 128
    control_mode: str | None = "pd_ee_delta_pose"
    reward_mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})

    def check(self) -> None:
        """Refuse what would fail in every worker, without starting the simulator.

        Raises:
            MissingExtraError: ManiSkill is not installed.
            MissingAssetError: There is no Vulkan driver, or the environment names one that is not there.
        """
        if importlib.util.find_spec("mani_skill") is None:
            require("mani_skill", "maniskill")  # raises, with the command that installs it
        check_vulkan()

    def __call__(self) -> Environment:
        """Return a new environment.

        Raises:
            MissingExtraError: ManiSkill is not installed.
            UnknownNameError: There is no such task; the message lists them.
            MissingAssetError: The task needs files that are not there, or there is no Vulkan driver.
        """
        backend = prepare_vulkan()
        require("mani_skill.envs", "maniskill")
        return ManiSkillEnv(self, backend)


class ManiSkillEnv:
    """One ManiSkill simulation on CPU.

    Args:
        factory: What to make.
        backend: Render backend from :func:`prepare_vulkan`.
    """

    def __init__(self, factory: ManiSkillFactory, backend: str) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._factory = factory
        self._base = _make(factory, backend)
        self._visual = factory.obs_mode == "rgb"
        if self._visual:
            # Stepping with the observation mode "none" draws nothing; images are drawn when they are asked for.
            self._base._obs_mode = "none"
        self._limit = _time_limit(self._base, factory.env_id)
        self._bounds, self._groups = _action_bounds(self._base.single_action_space)
        self._initial = InitialState()
        self._base.reset(seed=0)
        self._cameras = _cameras(self._base) if self._visual else {}
        self.spec = self._describe()

    def _describe(self) -> EnvSpec:
        base = self._base
        info = base.evaluate()
        names = getattr(base, "task_names", None) or [_instruction(base) or self._factory.env_id]
        return EnvSpec(
            name=self._factory.env_id,
            action_low=tuple(float(value) for value in self._bounds[0]),
            action_high=tuple(float(value) for value in self._bounds[1]),
            observation={
                name: Field(shape=array.shape, dtype=str(array.dtype)) for name, array in self.observe().items()
            },
            metrics=tuple(name for name, value in info.items() if _is_number(value)),
            tasks=tuple(names),
            max_episode_steps=self._limit,
            snapshot_tolerance=1e-5,
        )

    def reset(self, initial: InitialState) -> str:
        """Start the episode of seed ``trial`` (and of object ``task``, where the task has several)."""
        self._initial = initial
        self._base.reset(seed=initial.trial, options={"task": initial.task})
        return _instruction(self._base) or self.spec.tasks[initial.task]

    def step(self, action: np.ndarray) -> Outcome:
        """Apply one action; draws nothing."""
        base = self._base
        given: Any = action
        if self._groups:
            given = {name: action[start:end] for name, (start, end) in self._groups.items()}
        self._seen, reward, terminated, _, info = base.step(given)
        metrics = {name: float(info[name]) for name in self.spec.metrics}
        over = self._limit is not None and int(base._elapsed_steps[0]) >= self._limit
        return Outcome(reward=float(reward), terminated=bool(terminated), truncated=over, metrics=metrics)

    def observe(self) -> Observation:
        """Draw what the policy sees."""
        base = self._base
        if not self._visual:
            return {"states": _numbers(base.get_obs())}
        drawn = base._get_obs_sensor_data()
        seen = {name: drawn[camera]["rgb"][0].cpu().numpy() for name, camera in self._cameras.items()}
        return {**seen, "states": _numbers(base.agent.get_proprioception())}

    def save(self) -> bytes:
        """Return physics, controllers, task counters, elapsed steps and what the episode was drawn from."""
        base = self._base
        state = _to_numpy(base.get_state_dict())
        elapsed = base._elapsed_steps.clone().cpu().numpy()
        rng = [generator.get_state() for generator in base._batched_episode_rng.rngs]
        return pickle.dumps((self._initial, state, elapsed, rng))

    def load(self, state: bytes) -> None:
        """Continue from a saved state: what a reset draws is drawn anew, then everything that moves is put in place."""
        initial, saved, elapsed, rng = pickle.loads(state)
        self.reset(initial)
        base = self._base
        base.set_state_dict(_to_torch(saved, self._torch))
        base._elapsed_steps[:] = self._torch.as_tensor(elapsed)
        for generator, inner in zip(base._batched_episode_rng.rngs, rng, strict=True):
            generator.set_state(inner)

    def close(self) -> None:
        """Release the simulation."""
        self._base.close()


def _make(factory: ManiSkillFactory, backend: str) -> Any:
    import gymnasium
    from mani_skill.utils.registration import REGISTERED_ENVS

    if factory.env_id == PUT_ON_PLATE:
        import rlinf_plugins.envs.put_on_plate  # noqa: F401  # registers it
    if factory.env_id not in REGISTERED_ENVS:
        raise UnknownNameError(f"ManiSkill has no task {factory.env_id!r}; it has {', '.join(sorted(REGISTERED_ENVS))}")
    if backend.startswith("pci:"):
        _keep_pci_names()
    size = {"width": factory.image_size, "height": factory.image_size, "shader_pack": "minimal"}
    arguments: dict[str, Any] = {
        "obs_mode": factory.obs_mode,
        "num_envs": 1,
        "sim_backend": "physx_cpu",
        "render_backend": backend if factory.obs_mode == "rgb" else "none",
        "sensor_configs": size,
        **factory.options,
    }
    if factory.control_mode is not None:
        arguments["control_mode"] = factory.control_mode
    if factory.reward_mode is not None:
        arguments["reward_mode"] = factory.reward_mode
    fetch = f"fetch them with: python -m mani_skill.utils.download_asset {factory.env_id}"
    try:
        with no_questions(factory.env_id, fetch):
            return gymnasium.make(factory.env_id, **arguments).unwrapped
    except RuntimeError as error:
        if "rendering device" not in str(error):
            raise
        raise RenderingSetupError(
            f"{factory.env_id}: the Vulkan driver {os.environ.get('VK_ICD_FILENAMES', 'of this system')} does not work "
            f"({error}); without a GPU it must be Mesa's lavapipe >= 24.3: run `make system` in a checkout"
        ) from error
    except KeyError as error:
        raise ConfigError(f"{factory.env_id}: no such choice {error}: {arguments}") from error


def _keep_pci_names() -> None:
    """Let ManiSkill take ``pci:0`` as the name of a device; 3.0.1 splits it at the colon and loses the number."""
    from mani_skill.envs.utils.system import backend

    split = backend.parse_backend_device_id
    if getattr(split, "keeps_pci", False):
        return

    def parse(name: str) -> Any:
        return (name, None) if name.startswith("pci:") else split(name)

    parse.keeps_pci = True  # type: ignore[attr-defined]
    backend.parse_backend_device_id = parse


def _time_limit(base: Any, env_id: str) -> int | None:
    from mani_skill.utils.registration import REGISTERED_ENVS

    limit: int | None = getattr(base.spec, "max_episode_steps", None) or REGISTERED_ENVS[env_id].max_episode_steps
    return limit


def _action_bounds(space: Any) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, tuple[int, int]]]:
    """Return the bounds, and where each robot's part lies if there are several."""
    parts = getattr(space, "spaces", None)
    if parts is None:
        if len(space.shape) != 1:
            raise EnvContractError(f"the action space {space} is not a vector")
        return (space.low, space.high), {}
    groups, at = {}, 0
    for name, part in parts.items():
        groups[name] = (at, at + part.shape[0])
        at += part.shape[0]
    low = np.concatenate([part.low for part in parts.values()])
    return (low, np.concatenate([part.high for part in parts.values()])), groups


def _cameras(base: Any) -> dict[str, str]:
    names = list(base._sensors)
    if not names:
        raise EnvContractError(f"{type(base).__name__} has no camera: use obs_mode='state'")
    wrist = next((name for name in names if name in _WRIST_CAMERAS), None)
    main = next((name for name in _MAIN_CAMERAS if name in names), None)
    main = main or next((name for name in names if name != wrist), names[0])
    return {"main_images": main} | ({"wrist_images": wrist} if wrist and wrist != main else {})


def _instruction(base: Any) -> str | None:
    ask = getattr(base, "get_language_instruction", None)
    return str(ask()[0]) if ask is not None else None


def _is_number(value: Any) -> bool:
    return hasattr(value, "shape") and int(np.prod(value.shape)) == 1


def _numbers(value: Any) -> np.ndarray:
    """Flatten nested tensors of one environment into one float32 vector."""
    if isinstance(value, dict):
        parts = [_numbers(part) for part in value.values()]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return np.asarray(value.cpu().numpy(), np.float32).reshape(-1)


def _to_numpy(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _to_numpy(part) for name, part in state.items()}
    return state.cpu().numpy().copy() if hasattr(state, "cpu") else state


def _to_torch(state: Any, torch: Any) -> Any:
    if isinstance(state, dict):
        return {name: _to_torch(part, torch) for name, part in state.items()}
    return torch.as_tensor(state) if isinstance(state, np.ndarray) else state
