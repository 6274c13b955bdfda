"""Dataset statistics: what "1.0" means for a robot, per data set a checkpoint was trained on."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlinf_plugins.core.errors import CheckpointError, UnknownNameError

FILE = "dataset_statistics.json"

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The range that maps to [-1, 1].

    Attributes:
        low: ``[dim]``, what maps to -1.
        high: ``[dim]``, what maps to 1.
        mask: ``[dim]``, false where a value passes through unchanged (a gripper).
    """

    low: Array
    high: Array
    mask: npt.NDArray[np.bool_]

    def denormalise(self, values: Array, margin: float = 0.0) -> Array:
        """Map ``[..., dim]`` from [-1, 1] to the robot's units; OFT checkpoints use a ``margin`` of 1e-8."""
        scaled = 0.5 * (values + 1.0) * (self.high - self.low + margin) + self.low
        return np.where(self.mask, scaled, values)

    def normalise(self, values: Array) -> Array:
        """Map ``[..., dim]`` from the robot's units to [-1, 1], clipped."""
        scaled = 2.0 * (values - self.low) / (self.high - self.low + 1e-8) - 1.0
        return np.clip(np.where(self.mask, scaled, values), -1.0, 1.0)


class Statistics:
    """Statistics of every data set a checkpoint knows.

    Args:
        datasets: Content of ``dataset_statistics.json`` or of ``norm_stats`` in ``config.json``.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.datasets = dict(datasets)

    def resolve(self, key: str) -> str:
        """Return the data set's name for ``key``: itself, or with ``_no_noops`` appended.

        Raises:
            UnknownNameError: Neither exists; those present are listed.
        """
        for candidate in (key, f"{key}_no_noops"):
            if candidate in self.datasets:
                return candidate
        present = ", ".join(sorted(self.datasets)) or "none"
        raise UnknownNameError(f"the checkpoint has no statistics for unnorm_key {key!r}; present: {present}")

    def bounds(self, key: str, kind: Literal["action", "proprio"], *, dim: int, extremes: bool = False) -> Bounds:
        """Return the normalisation range of one data set.

        Args:
            key: Data set.
            kind: Actions or proprioceptive states.
            dim: Size the policy works with.
            extremes: Use the minimum and maximum (ALOHA) instead of the 1st and 99th percentile.

        Raises:
            UnknownNameError: No such data set, or it has no statistics of this kind.
            CheckpointError: The statistics are of another dimension, or a field is absent.
        """
        name = self.resolve(key)
        if kind not in self.datasets[name]:
            raise UnknownNameError(
                f"statistics of {name!r} hold no {kind!r}; present: {', '.join(self.datasets[name])}"
            )
        values = self.datasets[name][kind]
        low, high = ("min", "max") if extremes else ("q01", "q99")
        for field in (low, high):
            if len(values.get(field, ())) != dim:
                raise CheckpointError(
                    f"statistics of {name!r}: {kind}.{field} has {len(values.get(field, ()))} numbers, "
                    f"the policy works with {dim}; check spec.dim, spec.proprio_dim and unnorm_key"
                )
        return Bounds(
            low=np.asarray(values[low], dtype=np.float64),
            high=np.asarray(values[high], dtype=np.float64),
            mask=np.asarray(values.get("mask", [True] * dim), dtype=np.bool_),
        )


def load_statistics(
    folder: str | Path, norm_stats: Mapping[str, Any] | None = None, mode: Literal["replace", "merge"] = "replace"
) -> Statistics:
    """Read the statistics of a checkpoint.

    Args:
        folder: The checkpoint.
        norm_stats: What its ``config.json`` holds.
        mode: Whether ``dataset_statistics.json`` replaces ``norm_stats`` (OpenVLA, SimpleVLA-RL) or is merged into it,
            its entries winning (RLinf). Without that file ``norm_stats`` is used in both modes.

    Raises:
        CheckpointError: The file is not a JSON object.
    """
    file = Path(folder) / FILE
    base = dict(norm_stats or {})
    if not file.is_file():
        return Statistics(base)
    try:
        own = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(own, dict):
        raise CheckpointError(f"{file} must hold an object of data sets, got {type(own).__name__}")
    return Statistics(base | own if mode == "merge" else own)
