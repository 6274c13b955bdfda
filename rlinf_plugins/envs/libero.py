"""LIBERO environments for the pool: every suite that is installed, one simulation per process.

Imports LIBERO only in the process that makes the environment.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.envs.libero_suite import check_installation, episode_steps, open_suite
from rlinf_plugins.envs.libero_world import World
from rlinf_plugins.envs.protocol import Environment, EnvSpec, InitialState, Observation, Outcome
from rlinf_plugins.envs.rendering import prepare_mujoco

CAMERAS = {"main_images": "agentview", "wrist_images": "robot0_eye_in_hand"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LiberoFactory:
    """Makes a LIBERO environment in the process that runs it.

    Observations: ``main_images`` and ``wrist_images`` (uint8 ``[size, size, 3]``, upright), and ``states`` (float32
    ``[8]``): hand position, hand orientation as axis times angle, finger positions. Actions are LIBERO's: six
    components of a hand motion and the gripper (-1 opens, 1 closes), each in [-1, 1].

    A process keeps the scene of its last task; another task takes seconds to build, another initial state does not.

    Attributes:
        suite: E.g. ``"libero_spatial"``; LIBERO-PRO's variants too.
        image_size: Edge of the images in pixels.
        wrist: Draw the wrist camera too; drawing is most of the cost.
        settle_steps: Steps after a reset in which the objects come to rest; not part of the episode.
        max_episode_steps: Time limit in steps; None is the one of OpenVLA's evaluation (220 to 520, by suite).
        environment: Variables of the worker's process.
    """

    suite: str
    image_size: int = 256
    wrist: bool = True
    settle_steps: int = 10
    max_episode_steps: int | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})

    def check(self) -> None:
        """Refuse what would fail in every worker, without starting the simulator.

        Raises:
            ConfigError: A number makes no sense.
            MissingExtraError: LIBERO is not installed.
            UnsupportedVersionError: MuJoCo is a release with which tasks start in wrong states.
        """
        limit = 1 if self.max_episode_steps is None else self.max_episode_steps
        if self.image_size < 1 or self.settle_steps < 0 or limit < 1:
            raise ConfigError(
                f"LiberoFactory: image_size and max_episode_steps must be positive and settle_steps not negative, got "
                f"{self.image_size}, {self.max_episode_steps}, {self.settle_steps}"
            )
        check_installation()

    def __call__(self) -> Environment:
        """Return a new environment.

        Raises:
            ConfigError: A number makes no sense.
            MissingExtraError: LIBERO is not installed.
            UnsupportedVersionError: MuJoCo is a release with which tasks start in wrong states.
            UnknownNameError: There is no such suite; the message lists them.
            MissingAssetError: A file of the suite is not installed.
        """
        self.check()
        prepare_mujoco()
        return LiberoEnv(self)


class LiberoEnv:
    """One LIBERO simulation; the reward is 1 in a step that leaves the task solved.

    Args:
        factory: What to make.
    """

    def __init__(self, factory: LiberoFactory) -> None:
        self._factory = factory
        self._tasks = open_suite(factory.suite)
        self._cameras = {name: camera for name, camera in CAMERAS.items() if factory.wrist or name == "main_images"}
        self._limit = factory.max_episode_steps or episode_steps(factory.suite)
        self._initial, self._steps = InitialState(), 0
        self._world = World(self._tasks[0].scene, factory.image_size)
        low, high = self._world.bounds()
        image = Field(shape=(factory.image_size, factory.image_size, 3), dtype="uint8")
        self.spec = EnvSpec(
            name=factory.suite,
            action_low=tuple(float(value) for value in low),
            action_high=tuple(float(value) for value in high),
            observation={**dict.fromkeys(self._cameras, image), "states": Field(shape=(8,), dtype="float32")},
            tasks=tuple(task.name for task in self._tasks),
            trials=min(len(task.states) for task in self._tasks),
            max_episode_steps=self._limit,
            snapshot_tolerance=0.0,
        )

    def reset(self, initial: InitialState) -> str:
        """Start from initial state ``trial`` of ``task``."""
        task = self._tasks[initial.task]
        self._enter(initial)
        self._world.start(task.states[initial.trial], self._factory.settle_steps)
        return task.instruction

    def step(self, action: np.ndarray) -> Outcome:
        """Apply one action; draws nothing."""
        reward, solved = self._world.step(action)
        self._steps += 1
        over = self._steps >= self._limit
        return Outcome(reward=reward, terminated=solved, truncated=over, metrics={"success": solved})

    def observe(self) -> Observation:
        """Draw what the policy sees."""
        return self._world.observe(self._cameras)

    def save(self) -> bytes:
        """Return the whole state; a replay from it is bit-equal, frames included."""
        return pickle.dumps((self._initial, self._steps, self._world.save()))

    def load(self, state: bytes) -> None:
        """Continue from a saved state."""
        initial, steps, world = pickle.loads(state)
        self._enter(initial)
        self._steps = steps
        self._world.load(world)

    def close(self) -> None:
        """Release the simulation."""
        self._world.close()

    def _enter(self, initial: InitialState) -> None:
        """Have the scene of the initial state's task."""
        if initial.task != self._initial.task:
            self._world.close()
            self._world = World(self._tasks[initial.task].scene, self._factory.image_size)
        self._initial, self._steps = initial, 0
