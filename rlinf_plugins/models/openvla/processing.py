"""From observations to policy inputs, and from action tokens to robot actions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rlinf_plugins.core.errors import ConfigError, ObservationError
from rlinf_plugins.models.openvla.actions import ActionCodec
from rlinf_plugins.models.openvla.checkpoint import read_config
from rlinf_plugins.models.openvla.config import ActionSpec
from rlinf_plugins.models.openvla.images import ImageProcessor
from rlinf_plugins.models.openvla.prompts import PromptEncoder
from rlinf_plugins.models.openvla.statistics import Statistics, load_statistics


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInputs:
    """Keyword arguments of the policy's ``act`` and ``forward``.

    Attributes:
        input_ids: ``[B, L]``.
        attention_mask: ``[B, L]``.
        pixel_values: ``[B, 6 * images, H, W]``.
        proprio: ``[B, proprio_dim]``, normalised; None where the policy takes none.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    pixel_values: torch.Tensor
    proprio: torch.Tensor | None

    def kwargs(self) -> dict[str, Any]:
        """Return the inputs as keyword arguments."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "pixel_values": self.pixel_values,
            "proprio": self.proprio,
        }


class OpenVLAProcessor:
    """Everything around the network for one checkpoint and one data set's statistics.

    Args:
        prompts: Text side.
        images: Image side.
        codec: Action tokens.
        statistics: Of all data sets the checkpoint knows.
        unnorm_key: The data set whose robot is being driven.
        spec: How the policy decodes actions.
        extremes: Normalise by minimum and maximum (ALOHA) instead of percentiles.
    """

    def __init__(
        self,
        *,
        prompts: PromptEncoder,
        images: ImageProcessor,
        codec: ActionCodec,
        statistics: Statistics,
        unnorm_key: str,
        spec: ActionSpec,
        extremes: bool = False,
    ) -> None:
        self.prompts, self.images, self.codec, self.spec = prompts, images, codec, spec
        self._action_bounds = statistics.bounds(unnorm_key, "action", dim=spec.dim, extremes=extremes)
        self._proprio_bounds = (
            statistics.bounds(unnorm_key, "proprio", dim=spec.proprio_dim, extremes=extremes)
            if spec.proprio_dim
            else None
        )

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        unnorm_key: str | None = None,
        spec: ActionSpec | None = None,
        statistics: Literal["replace", "merge"] = "replace",
        extremes: bool = False,
    ) -> "OpenVLAProcessor":
        """Read tokenizer, image settings and statistics of a checkpoint folder.

        Args:
            folder: The checkpoint.
            unnorm_key: Data set; may be left out where the checkpoint knows one only. An unknown one is an error that
                lists those present.
            spec: How actions are decoded; what ``config.json`` says where None.
            statistics: See :func:`~rlinf_plugins.models.openvla.statistics.load_statistics`.
            extremes: Normalise by minimum and maximum (ALOHA).

        Raises:
            ConfigError: No ``unnorm_key``, and not one data set to choose.
        """
        config = read_config(Path(folder))
        known = load_statistics(folder, config.norm_stats, statistics)
        if unnorm_key is None:
            if len(known.datasets) != 1:
                raise ConfigError(
                    f"{folder} knows {len(known.datasets)} data sets ({', '.join(sorted(known.datasets)) or 'none'}); "
                    "say which robot is driven with unnorm_key"
                )
            unnorm_key = next(iter(known.datasets))
        return cls(
            prompts=PromptEncoder.from_folder(folder),
            images=ImageProcessor(config.image_resize_strategy, config.image_sizes[0]),
            codec=ActionCodec(config.n_action_bins),
            statistics=known,
            unnorm_key=unnorm_key,
            spec=spec or config.spec(),
            extremes=extremes,
        )

    def __call__(
        self,
        instructions: Sequence[str],
        images: Sequence[Sequence[Any]],
        proprio: npt.ArrayLike | None = None,
    ) -> PolicyInputs:
        """Prepare a batch of observations.

        Args:
            instructions: ``B`` tasks in words.
            images: For each observation its camera images, ``uint8`` ``[H, W, 3]``.
            proprio: ``[B, proprio_dim]`` raw states.

        Raises:
            InstructionError: An empty instruction or one with special tokens.
            ObservationError: Counts, shapes or types that do not fit.
        """
        if len(instructions) != len(images):
            raise ObservationError(f"{len(instructions)} instructions but {len(images)} observations")
        for row, frames in enumerate(images):
            if len(frames) != self.spec.num_images:
                raise ObservationError(
                    f"observation {row} has {len(frames)} images, the policy takes {self.spec.num_images}"
                )
        ids, mask = self.prompts.batch(instructions)
        pixels = torch.stack([self.images(frames) for frames in images])
        return PolicyInputs(
            input_ids=ids, attention_mask=mask, pixel_values=pixels, proprio=self._states(proprio, len(images))
        )

    def actions(self, tokens: torch.Tensor) -> npt.NDArray[np.float64]:
        """Return ``[B, chunk, dim]`` actions in the robot's units for ``[B, chunk, dim]`` token ids.

        The gripper, masked in the statistics, stays in [0, 1]: see ``actions.libero_gripper`` and ``widowx_gripper``.
        """
        return self.codec.to_actions(tokens.cpu().numpy(), self._action_bounds, self.spec)

    def _states(self, proprio: npt.ArrayLike | None, batch: int) -> torch.Tensor | None:
        if self._proprio_bounds is None:
            return None
        states = np.asarray(proprio if proprio is not None else [], dtype=np.float64)
        if states.shape != (batch, self.spec.proprio_dim):
            raise ObservationError(
                f"proprio must have shape {[batch, self.spec.proprio_dim]}, got {list(states.shape)}"
            )
        return torch.from_numpy(self._proprio_bounds.normalise(states)).float()
