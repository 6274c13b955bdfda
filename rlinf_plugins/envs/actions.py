"""Actions are checked before a simulator sees them: a NaN can take the whole process down."""

from collections.abc import Sequence

import numpy as np

from rlinf_plugins.core.errors import ActionError
from rlinf_plugins.envs.protocol import EnvSpec

_SLACK = 1e-6  # rounding of a policy that clips in another precision


class ActionCheck:
    """Checks and shapes the actions of a pool.

    Args:
        spec: What the environments take.
        max_chunk: Longest chunk.
        clip: Clip actions that are out of range instead of refusing them.
    """

    def __init__(self, spec: EnvSpec, max_chunk: int, clip: bool) -> None:
        self._name, self._max_chunk, self._clip = spec.name, max_chunk, clip
        self._low = np.asarray(spec.action_low, np.float32)
        self._high = np.asarray(spec.action_high, np.float32)
        self._least, self._most = self._low - _SLACK, self._high + _SLACK

    def shape(self, actions: object, rows: int) -> np.ndarray:
        """Return ``actions`` as float32 ``[rows, steps, action_dim]``.

        Args:
            actions: Numbers ``[rows, steps, action_dim]``, or ``[rows, action_dim]`` for a single step.
            rows: Number of environments.

        Raises:
            ActionError: Wrong shape or type; no environment can take them.
        """
        array: np.ndarray = np.asarray(actions)
        if array.dtype.kind not in "fiu":
            raise ActionError(f"{self._name}: actions must be real numbers, got {array.dtype} of shape {array.shape}")
        if array.ndim == 2:
            array = array[:, None]
        dim = len(self._low)
        if array.ndim != 3 or array.shape[0] != rows or array.shape[2] != dim:
            raise ActionError(
                f"{self._name}: actions must be [{rows}, steps, {dim}] or [{rows}, {dim}], got {list(array.shape)}"
            )
        if not 1 <= array.shape[1] <= self._max_chunk:
            raise ActionError(
                f"{self._name}: a chunk has 1..{self._max_chunk} steps (option max_chunk), got {array.shape[1]}"
            )
        return array.astype(np.float32, copy=False)

    def refuse(self, actions: np.ndarray, slots: Sequence[int]) -> tuple[np.ndarray, dict[int, str]]:
        """Find the environments whose actions must not be executed.

        Args:
            actions: float32 ``[rows, steps, action_dim]``.
            slots: Slot of each row.

        Returns:
            The actions, clipped if so configured, and the reason for each refused slot.
        """
        inside = (actions >= self._least) & (actions <= self._most)  # False for NaN
        if inside.all():
            return actions, {}
        refused: dict[int, str] = {}
        for row, step, component in np.argwhere(~inside):
            value = float(actions[row, step, component])
            if self._clip and np.isfinite(value):
                continue
            low, high = self._low[component], self._high[component]
            refused.setdefault(
                slots[row], f"action component {component} of step {step} is {value:g}, outside [{low:g}, {high:g}]"
            )
        return (np.clip(actions, self._low, self._high) if self._clip else actions), refused
