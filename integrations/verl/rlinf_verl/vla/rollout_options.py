"""Options of the policy server."""

from dataclasses import dataclass
from typing import Literal

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.rollout.options import HFOptions

NAME = "openvla"
"""``actor_rollout_ref.rollout.name`` of the policy server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLAOptions(HFOptions):
    """``actor_rollout_ref.rollout.engine_kwargs.openvla``, beside the options of the in-process engine.

    Attributes:
        unnorm_key: Data set whose statistics turn tokens into the robot's units; may be left out where the checkpoint
            knows one only.
        statistics: How ``dataset_statistics.json`` and the configuration's own statistics combine.
        extremes: Normalise by minimum and maximum (ALOHA) instead of percentiles.
        max_batch: Observations in one forward.
        max_wait_ms: Longest time an observation waits for company.
    """

    unnorm_key: str | None = None
    statistics: Literal["replace", "merge"] = "replace"
    extremes: bool = False
    max_batch: int = 64
    max_wait_ms: float = 5.0

    def validate(self, where: str) -> None:
        """Refuse empty batches and negative waits."""
        HFOptions.validate(self, where)
        if self.max_batch < 1:
            raise ConfigError(f"{where}.max_batch must be >= 1, got {self.max_batch}")
        if self.max_wait_ms < 0:
            raise ConfigError(f"{where}.max_wait_ms must be >= 0, got {self.max_wait_ms}")
