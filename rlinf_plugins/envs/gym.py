"""Gymnasium environments for the pool, Gymnasium-Robotics among them.

Imports Gymnasium only in the process that makes the environment.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.core.errors import EnvContractError, UnknownNameError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.protocol import Environment, EnvSpec, InitialState, Observation, Outcome
from rlinf_plugins.envs.rendering import prepare_mujoco


@dataclass(frozen=True, kw_only=True, slots=True)
class GymFactory:
    """Makes a Gymnasium environment with a continuous action vector.

    Observations: ``states`` (float32), the flattened observation; an image observation is ``main_images``. With
    ``render_size`` the environment is drawn as ``main_images`` too.

    Attributes:
        env_id: Registered id, e.g. ``"FetchPickAndPlace-v4"``, or a callable that makes the environment.
        modules: Modules to import first, because they register environments, e.g. ``("gymnasium_robotics",)``.
        options: Arguments of the environment.
        render_size: Edge of the drawn images in pixels; 0 draws none.
        success: Key of the step's ``info`` that says that the task is solved; without it, ``terminated`` says so.
        task: Instruction.
        trials: Number of initial states; None is no limit.
        deterministic: Equal seeds and actions give equal episodes. A snapshot is then the seed and the actions so far,
            and restoring takes them again; without it there are no snapshots.
        environment: Variables of the worker's process.
    """

    env_id: str | Callable[..., Any]
    modules: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    render_size: int = 0
    success: str = "is_success"
    task: str = ""
    trials: int | None = None
    deterministic: bool = True
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})

    def __call__(self) -> Environment:
        """Return a new environment.

        Raises:
            UnknownNameError: The id is not registered.
            EnvContractError: Its spaces are not vectors of numbers or images.
        """
        if self.render_size:
            prepare_mujoco()
        for module in self.modules:
            require(module, "robotics")
        return GymEnv(self)


class GymEnv:
    """One Gymnasium environment. Resets are seeded by task and trial.

    Args:
        factory: What to make.
    """

    def __init__(self, factory: GymFactory) -> None:
        self._factory = factory
        self._env = _make(factory)
        space = self._env.action_space
        if len(getattr(space, "shape", None) or ()) != 1 or not hasattr(space, "low"):
            raise EnvContractError(f"{factory.env_id}: the action space must be a Box with one axis, it is {space}")
        self._seen, _ = self._env.reset(seed=0)
        limit = self._env.spec.max_episode_steps if self._env.spec is not None else None
        name = factory.env_id if isinstance(factory.env_id, str) else type(self._env.unwrapped).__name__
        self.spec = EnvSpec(
            name=name.replace("/", "-"),
            action_low=tuple(float(value) for value in space.low),
            action_high=tuple(float(value) for value in space.high),
            observation={
                key: Field(shape=array.shape, dtype=str(array.dtype)) for key, array in self.observe().items()
            },
            tasks=(factory.task or name,),
            trials=factory.trials,
            max_episode_steps=limit,
            resets_exactly=factory.deterministic,
            snapshot_tolerance=0.0 if factory.deterministic else None,
        )
        self._initial = InitialState()
        self._taken: list[np.ndarray] = []

    def reset(self, initial: InitialState) -> str:
        """Start the episode of seed ``trial``."""
        self._seen, _ = self._env.reset(seed=initial.trial)
        self._initial, self._taken = initial, []
        return self.spec.tasks[initial.task]

    def step(self, action: np.ndarray) -> Outcome:
        """Apply one action."""
        self._taken.append(np.array(action))
        self._seen, reward, terminated, truncated, info = self._env.step(action)
        success = bool(info.get(self._factory.success, terminated))
        return Outcome(
            reward=float(reward),
            terminated=bool(terminated) or success,
            truncated=bool(truncated),
            metrics={"success": success},
        )

    def observe(self) -> Observation:
        """Return the last observation, and a drawn image if asked for."""
        seen = self._seen
        image = isinstance(seen, np.ndarray) and seen.dtype == np.uint8 and seen.ndim == 3
        observation = {"main_images": seen} if image else {"states": _flat(seen)}
        if self._factory.render_size:
            observation["main_images"] = self._draw()
        return observation

    def _draw(self) -> np.ndarray:
        """Draw, and leave MuJoCo as it was: Gymnasium-Robotics moves its markers and recomputes poses when it draws."""
        inner = self._env.unwrapped
        data = getattr(inner, "data", None)
        if data is None or type(data).__module__.partition(".")[0] != "mujoco":
            return np.asarray(self._env.render(), np.uint8)
        names = [name for name in dir(data) if isinstance(getattr(data, name), np.ndarray)]
        kept, markers = {name: getattr(data, name).copy() for name in names}, inner.model.site_pos.copy()
        try:
            return np.asarray(self._env.render(), np.uint8)
        finally:
            inner.model.site_pos[:] = markers
            for name, array in kept.items():
                if getattr(data, name).shape == array.shape:  # lists of contacts may differ; a step makes them anew
                    getattr(data, name)[...] = array

    def save(self) -> bytes:
        """Return the seed and the actions taken since: Gymnasium has no common way to save a state."""
        return pickle.dumps((self._initial, self._taken))

    def load(self, state: bytes) -> None:
        """Take the saved actions again."""
        initial, taken = pickle.loads(state)
        self.reset(initial)
        for action in taken:
            self.step(action)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()


def _make(factory: GymFactory) -> Any:
    import gymnasium

    options = dict(factory.options)
    if factory.render_size:
        options |= {"render_mode": "rgb_array", "width": factory.render_size, "height": factory.render_size}
    if not isinstance(factory.env_id, str):
        return factory.env_id(**options)
    try:
        return gymnasium.make(factory.env_id, **options)
    except gymnasium.error.UnregisteredEnv as error:
        known = ", ".join(sorted(gymnasium.registry))
        raise UnknownNameError(f"Gymnasium has no {factory.env_id!r} ({error}); it has {known}") from error


def _flat(value: Any) -> np.ndarray:
    if isinstance(value, Mapping):
        return np.concatenate([_flat(part) for part in value.values()])
    if isinstance(value, tuple):
        return np.concatenate([_flat(part) for part in value])
    return np.asarray(value, np.float32).reshape(-1)
