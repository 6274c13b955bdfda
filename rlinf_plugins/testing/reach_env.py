"""A task that needs no eyes: walk a point to the origin from one of five fixed places.

The smallest honest check that a policy learns over several steps: no pixels, no physics, few initial states.
"""

import math
from dataclasses import dataclass

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.envs.protocol import EnvSpec, InitialState, Observation, Outcome

_STARTS = 5
_STRIDE = 0.5
_TOLERANCE = 0.35


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachFactory:
    """Makes :class:`ReachEnv`.

    Attributes:
        steps: Steps an episode may take.
    """

    steps: int = 4

    def __call__(self) -> "ReachEnv":
        """Return a new environment."""
        return ReachEnv(self)


class ReachEnv:
    """A point on a plane; trial ``t`` starts on the unit circle at ``2 pi t / 5``.

    An action ``[dx, dy]`` in [-1, 1] moves it by half of that. The reward is the distance a step has closed; within
    0.35 of the origin the episode ends and what is left counts as closed, so that an episode earns 1 by arriving and
    at most 0.65 otherwise. After ``steps`` steps it is cut off. Observation: ``states`` float32 ``[2]``, and an image
    that is always the same, for policies that want one.

    Args:
        options: Size of the task.
    """

    def __init__(self, options: ReachFactory) -> None:
        self._options = options
        self.spec = EnvSpec(
            name="Reach",
            action_low=(-1.0, -1.0),
            action_high=(1.0, 1.0),
            observation={
                "states": Field(shape=(2,), dtype="float32"),
                "main_images": Field(shape=(8, 8, 3), dtype="uint8"),
            },
            metrics=("success",),
            tasks=("move to the middle",),
            trials=_STARTS,
            max_episode_steps=options.steps,
        )
        self._image = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
        self._at = np.zeros(2)
        self._taken = 0

    def reset(self, initial: InitialState) -> str:
        """Go to the trial's place."""
        angle = 2 * math.pi * (initial.trial % _STARTS) / _STARTS
        self._at, self._taken = np.array([math.cos(angle), math.sin(angle)]), 0
        return self.spec.tasks[0]

    def step(self, action: np.ndarray) -> Outcome:
        """Move."""
        before = np.hypot(*self._at)
        self._at = np.clip(self._at + _STRIDE * np.asarray(action, dtype=np.float64), -1.5, 1.5)
        self._taken += 1
        left = np.hypot(*self._at)
        success = bool(left <= _TOLERANCE)
        return Outcome(
            reward=float(before if success else before - left),
            terminated=success,
            truncated=not success and self._taken >= self._options.steps,
            metrics={"success": success},
        )

    def observe(self) -> Observation:
        """Return position and image."""
        return {"states": self._at.astype(np.float32), "main_images": self._image}

    def close(self) -> None:
        """Release nothing."""
