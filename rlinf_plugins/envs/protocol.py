"""The contract between the pool and an environment. Adapters and users' own environments implement it.

An environment is one simulated world in one process. Its initial state is a pure function of the ids it is reset
with; drawing an observation is apart from stepping, because rendering is most of the cost and a policy that acts in
chunks looks only at their ends.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.core.errors import EnvContractError

Observation: TypeAlias = Mapping[str, np.ndarray]
"""Named arrays of one environment. Usual names: ``main_images`` and ``wrist_images`` (uint8 ``[height, width, 3]``),
``states`` (float32 ``[dim]``). The pool adds ``task_descriptions`` (str)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialState:
    """Which world an episode starts from.

    Attributes:
        task: Index into the environment's tasks.
        trial: Index of the initial state within the task.
    """

    task: int = 0
    trial: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """What an environment takes and gives; constant over its life.

    Attributes:
        name: Name of the environment, for messages and files.
        action_low: Lower bound of each action component, ``-inf`` where unbounded.
        action_high: Upper bound of each action component.
        observation: Shape and type of each observation array.
        metrics: Names of the numbers a step reports beside its reward, e.g. ``("success",)``.
        tasks: Names of the tasks; ``InitialState.task`` indexes them.
        trials: Number of distinct initial states of each task; None where the supply is unlimited.
        max_episode_steps: The environment's own time limit in steps; None if it has none.
        resets_exactly: Whether equal ids and equal actions give bit-equal episodes.
        snapshot_tolerance: Largest absolute difference between an episode and its replay from a snapshot; None where
            snapshots are not supported.
    """

    name: str
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    observation: dict[str, Field]
    metrics: tuple[str, ...] = ("success",)
    tasks: tuple[str, ...] = ("default",)
    trials: int | None = None
    max_episode_steps: int | None = None
    resets_exactly: bool = True
    snapshot_tolerance: float | None = None

    @property
    def action_dim(self) -> int:
        """Number of components of an action."""
        return len(self.action_low)

    def images(self) -> list[str]:
        """Return the names of the observation arrays that are images, the main one first."""
        fields = self.observation.items()
        names = [n for n, f in fields if f.dtype == "uint8" and len(f.shape) == 3 and f.shape[-1] in (3, 4)]
        return sorted(names, key=lambda name: name != "main_images")

    def validate(self) -> None:
        """Refuse a contradictory specification.

        Raises:
            EnvContractError: Names the attribute at fault.
        """
        if not self.action_low or len(self.action_low) != len(self.action_high):
            raise EnvContractError(
                f"{self.name}: action_low has {len(self.action_low)} components and action_high {len(self.action_high)}"
            )
        for low, high in zip(self.action_low, self.action_high, strict=True):
            if math.isnan(low) or math.isnan(high) or low >= high:
                raise EnvContractError(f"{self.name}: action bounds [{low}, {high}] are empty")
        if not self.observation:
            raise EnvContractError(f"{self.name}: the observation has no arrays")
        if not self.tasks:
            raise EnvContractError(f"{self.name}: there is no task")
        if self.trials is not None and self.trials < 1:
            raise EnvContractError(f"{self.name}: trials={self.trials} leaves no initial state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one step did.

    Attributes:
        reward: The environment's own reward.
        terminated: The task's end was reached: success, or a failure that cannot be undone.
        truncated: The episode was cut off from outside, e.g. by a time limit; its value is not zero.
        metrics: Numbers by name, as declared in the specification; missing ones count as 0.
    """

    reward: float
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One environment in one process."""

    spec: EnvSpec

    def reset(self, initial: InitialState) -> str:
        """Start an episode and return the instruction that describes its task.

        The state is a function of ``initial`` alone: not of earlier episodes, of time or of global random state.
        """
        ...

    def step(self, action: np.ndarray) -> Outcome:
        """Apply one action, float32 ``[action_dim]``, finite and within bounds. Renders nothing."""
        ...

    def observe(self) -> Observation:
        """Return what a policy sees now; changes nothing."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


@runtime_checkable
class Snapshotting(Protocol):
    """An environment whose whole state can be saved and restored, in this process or in another one."""

    def save(self) -> bytes:
        """Return everything that determines the rest of the episode."""
        ...

    def load(self, state: bytes) -> None:
        """Continue from ``state``; afterwards the environment behaves as the saved one would have."""
        ...


class EnvFactory(Protocol):
    """Makes one environment in the process that will run it.

    Must be picklable (``cloudpickle`` is used, so closures and lambdas are fine). May have an attribute
    ``environment: Mapping[str, str]`` of variables to set before the process starts.
    """

    def __call__(self) -> Environment:
        """Return a new environment."""
        ...
