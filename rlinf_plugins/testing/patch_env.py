"""A task that only looking solves, in one step: say where a patch is and which colour it has.

The smallest honest check that an image policy learns: a constant policy gets chance, and no physics is in the way.
"""

from dataclasses import dataclass

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.envs.protocol import EnvSpec, InitialState, Observation, Outcome

_COLOURS = ((220, 30, 30), (30, 60, 220))
_TOLERANCE = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchFactory:
    """Makes :class:`PatchEnv`.

    Attributes:
        places: Places of the patch, left to right; with 1 only the colour has to be seen, and learning takes tens of
            updates instead of hundreds.
        image: Edge of the square image in pixels.
    """

    places: int = 3
    image: int = 56

    def __call__(self) -> "PatchEnv":
        """Return a new environment."""
        return PatchEnv(self)


class PatchEnv:
    """One image, one action ``[place, colour]``, both in [-1, 1]; half a point for each that is right.

    Trial ``t`` shows place ``t % places`` and colour ``t // places % 2``. The action for a place is the centre of its
    share of [-1, 1], within 0.15; for a colour its sign. The best a policy can do without looking is ``1 / 2 / places``
    and a quarter: 0.75 with one place.

    Args:
        options: Size of the task.
    """

    def __init__(self, options: PatchFactory) -> None:
        self._options = options
        self.spec = EnvSpec(
            name="Patch",
            action_low=(-1.0, -1.0),
            action_high=(1.0, 1.0),
            observation={"main_images": Field(shape=(options.image, options.image, 3), dtype="uint8")},
            metrics=("success",),
            tasks=("point at the patch",),
            trials=2 * options.places,
            max_episode_steps=1,
        )
        self._place = self._colour = 0

    def reset(self, initial: InitialState) -> str:
        """Show the trial's patch."""
        self._place = initial.trial % self._options.places
        self._colour = initial.trial // self._options.places % 2
        return self.spec.tasks[0]

    def step(self, action: np.ndarray) -> Outcome:
        """Judge the action; the episode ends."""
        target = (2 * self._place + 1) / self._options.places - 1
        place = abs(float(action[0]) - target) <= _TOLERANCE
        colour = (float(action[1]) > 0) == bool(self._colour)
        success = place and colour
        return Outcome(reward=0.5 * place + 0.5 * colour, terminated=True, metrics={"success": success})

    def observe(self) -> Observation:
        """Draw a grey image with the patch in it."""
        edge = self._options.image
        image = np.full((edge, edge, 3), 128, np.uint8)
        width = edge // self._options.places
        image[edge // 4 : -edge // 4, self._place * width : (self._place + 1) * width] = _COLOURS[self._colour]
        return {"main_images": image}

    def close(self) -> None:
        """Release nothing."""
