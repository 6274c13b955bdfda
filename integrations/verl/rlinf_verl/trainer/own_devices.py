"""Rollout on devices of its own: modes ``spatial`` and ``hybrid``.

veRL builds the parts as for its ``separate_async``: standalone replicas in pools of their own, and a checkpoint engine
that carries the weights to them. What is different is the order: the step stays on-policy, as in ``sync``.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.rollout.llm_server import LLMServerManager

from rlinf_verl.config import M2FlowConfig


class Unshared:
    """Stands for device sharing where each device serves one purpose: there is nothing to bring or to take away."""

    saved_together: tuple[str, ...] = ()

    def __contains__(self, resident: str) -> bool:
        return True

    def use(self, *residents: str) -> AbstractContextManager[None]:
        """Nothing to bring to the devices."""
        return nullcontext()

    def rollout_away(self) -> None:
        """The rollout is elsewhere as it is."""

    def close(self) -> None:
        """Nothing to let go of."""


class OwnDevices:
    """A base of trainers, before device sharing: rollout replicas outside the trainer's pool."""

    options: M2FlowConfig
    config: Any
    timing_raw: dict[str, float]
    global_steps: int

    @property
    def separate(self) -> bool:
        """Whether rollout has devices of its own."""
        return self.options.mode != "temporal"

    def _setup(self) -> None:
        self._enable_hybrid_replicas = not self.separate
        super()._setup()  # type: ignore[misc]
        if not self.separate:
            return
        self.sharing: Any = Unshared()
        self.rollout_servers = LLMServerManager.create(config=self.config)
        self.rollout_weights = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,  # type: ignore[attr-defined]
            replicas=self.rollout_servers.get_replicas(),
        )

    def get_llm_client(self) -> Any:
        """Return the client of the replicas that generate."""
        if not self.separate:
            return super().get_llm_client()  # type: ignore[misc]
        return self.rollout_servers.get_client()

    def on_init_end(self) -> None:
        """Bring the weights of the start or of the checkpoint to the replicas."""
        if self.separate:
            self.rollout_weights.update_weights(self.global_steps)
        else:
            super().on_init_end()  # type: ignore[misc]

    def on_step_begin(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_step_begin()  # type: ignore[misc]

    def on_sample_begin(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_sample_begin()  # type: ignore[misc]

    def on_sample_end(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_sample_end()  # type: ignore[misc]
        elif self.curr_step_profile:  # type: ignore[attr-defined]
            self._stop_rollout_profiling()  # type: ignore[attr-defined]

    def on_step_end(self) -> None:
        """Bring the new weights to the replicas."""
        if not self.separate:
            super().on_step_end()  # type: ignore[misc]
            return
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = dict(self.rollout_weights.update_weights(self.global_steps) or {})

    def on_validate_begin(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_validate_begin()  # type: ignore[misc]

    def on_validate_end(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_validate_end()  # type: ignore[misc]

    def _rollout_server_managers(self) -> list[Any]:
        managers: list[Any] = super()._rollout_server_managers()  # type: ignore[misc]
        return [*managers, self.rollout_servers] if self.separate else managers

    def _get_n_gpus_for_throughput(self) -> int:
        devices: int = super()._get_n_gpus_for_throughput()  # type: ignore[misc]
        rollout = self.config.actor_rollout_ref.rollout
        return devices + (rollout.nnodes * rollout.n_gpus_per_node if self.separate else 0)
