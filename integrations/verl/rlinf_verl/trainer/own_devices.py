"""Rollout on devices of its own: modes ``spatial`` and ``hybrid``.

veRL builds the parts as for its ``separate_async``: standalone replicas in pools of their own, and a checkpoint engine
that carries the weights to them. What is different is the order: the step stays on-policy, as in ``sync``. Under
``hybrid`` the trainer's devices hold replicas too. They generate from the start of a step until enough groups are
complete, then sleep, and the replicas that stay continue their answers.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.rollout.llm_server import LLMServerManager

from rlinf_verl.config import M2FlowConfig
from rlinf_verl.trainer.migration import MigratingClient


class Unshared:
    """Stands for device sharing where each device serves one purpose: there is nothing to bring or to take away."""

    saved_together: tuple[str, ...] = ()
    waited_s = 0.0

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

    llm_server_manager: Any
    checkpoint_manager: Any
    _lent = False

    @property
    def lends(self) -> bool:
        """Whether the trainer's devices generate too, until they are needed."""
        return self.options.mode == "hybrid"

    @property
    def separate(self) -> bool:
        """Whether rollout has devices of its own."""
        return self.options.mode != "temporal"

    def _setup(self) -> None:
        self._enable_hybrid_replicas = self.options.mode != "spatial"
        super()._setup()  # type: ignore[misc]
        if not self.separate:
            return
        self.sharing: Any = Unshared()
        lent = self.llm_server_manager.get_replicas()
        self.rollout_servers = LLMServerManager.create(config=self.config, start_rank=len(lent))
        self.rollout_weights = CheckpointEngineManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,  # type: ignore[attr-defined]
            replicas=self.rollout_servers.get_replicas(),
        )

    def get_llm_client(self) -> Any:
        """Return the client of the replicas that generate."""
        if not self.separate:
            return super().get_llm_client()  # type: ignore[misc]
        return self.rollout_servers.get_client(client_cls=MigratingClient if self.lends else None)

    def on_init_end(self) -> None:
        """Bring the weights of the start or of the checkpoint to the replicas."""
        if self.separate:
            self._sync_weights()
        else:
            super().on_init_end()  # type: ignore[misc]

    def _sync_weights(self) -> dict[str, Any]:
        metrics = dict(self.rollout_weights.update_weights(self.global_steps) or {})
        if self.lends:
            self._lend()
        return metrics

    def _lend(self) -> None:
        """Let the trainer's devices generate: wake their replicas with the actor's weights."""
        self.checkpoint_manager.update_weights(self.global_steps)
        self.checkpoint_manager.resume_generation_replicas()
        servers = zip(self.llm_server_manager.server_addresses, self.llm_server_manager.server_handles, strict=True)
        ray.get(self.rollout_servers.global_load_balancer.add_servers.remote(dict(servers)))
        self._lent = True

    def reclaim(self) -> None:
        """Take the trainer's devices back; requests that run there continue on the replicas that stay."""
        if not self._lent:
            return
        self._lent = False
        with marked_timer("reclaim", self.timing_raw, color="cyan"):
            addresses = self.llm_server_manager.server_addresses
            ray.get(self.rollout_servers.global_load_balancer.remove_servers.remote(addresses))
            self.checkpoint_manager.abort_replicas(reject_request=True)
            self.checkpoint_manager.sleep_replicas()

    def on_step_begin(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_step_begin()  # type: ignore[misc]

    def on_sample_begin(self) -> None:
        """Nothing changes hands where devices are apart."""
        if not self.separate:
            super().on_sample_begin()  # type: ignore[misc]

    def on_sample_end(self) -> None:
        """Take lent devices back, if that has not been done before."""
        if not self.separate:
            super().on_sample_end()  # type: ignore[misc]
            return
        self.reclaim()
        if self.curr_step_profile:  # type: ignore[attr-defined]
            self._stop_rollout_profiling()  # type: ignore[attr-defined]

    def on_step_end(self) -> None:
        """Bring the new weights to the replicas."""
        if not self.separate:
            super().on_step_end()  # type: ignore[misc]
            return
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = self._sync_weights()

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
