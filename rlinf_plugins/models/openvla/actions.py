"""Action tokens: the last ids of the text vocabulary stand for bins of [-1, 1], highest first."""

import numpy as np
import numpy.typing as npt

from rlinf_plugins.models.openvla.config import TEXT_VOCABULARY, ActionSpec
from rlinf_plugins.models.openvla.statistics import Bounds

Array = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]


class ActionCodec:
    """Translates token ids to actions and back.

    Args:
        bins: Bin edges over [-1, 1]; one action token each, so there is one centre fewer and the two lowest ids
            decode to the same, highest centre.
    """

    def __init__(self, bins: int = 256) -> None:
        self._edges = np.linspace(-1.0, 1.0, bins)
        self._centres = (self._edges[:-1] + self._edges[1:]) / 2.0

    @property
    def edges(self) -> Array:
        """``[bins]`` bin edges."""
        return self._edges.copy()

    @property
    def centres(self) -> Array:
        """``[bins - 1]`` bin centres."""
        return self._centres.copy()

    def decode(self, tokens: npt.ArrayLike) -> Array:
        """Return normalised values in (-1, 1) of token ids; ids outside the action range are clipped into it."""
        index = np.clip(TEXT_VOCABULARY - np.asarray(tokens, dtype=np.int64) - 1, 0, len(self._centres) - 1)
        return self._centres[index]  # type: ignore[no-any-return]

    def encode(self, values: npt.ArrayLike) -> Tokens:
        """Return token ids of normalised values; values outside [-1, 1] are clipped."""
        clipped = np.clip(np.asarray(values, dtype=np.float64), -1.0, 1.0)
        return (TEXT_VOCABULARY - np.digitize(clipped, self._edges)).astype(np.int64)

    def to_actions(self, tokens: npt.ArrayLike, bounds: Bounds, spec: ActionSpec) -> Array:
        """Return ``[B, chunk, dim]`` actions in the robot's units for ``[B, chunk, dim]`` token ids."""
        margin = 1e-8 if spec.decoding == "parallel" else 0.0
        return bounds.denormalise(self.decode(tokens), margin)


def libero_gripper(actions: Array) -> Array:
    """Turn the last number from [0, 1] (1 open) into LIBERO's -1 open, 1 closed."""
    out = actions.copy()
    out[..., -1] = -np.sign(2.0 * out[..., -1] - 1.0)
    return out


def widowx_gripper(actions: Array) -> Array:
    """Turn the last number from [0, 1] (1 open) into the ManiSkill WidowX's 1 open, -1 closed."""
    out = actions.copy()
    out[..., -1] = 2.0 * (out[..., -1] > 0.5) - 1.0
    return out
