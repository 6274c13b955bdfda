"""The trainer's side of device sharing: which of veRL's hooks and stages holds which residents."""

from contextlib import ExitStack
from typing import Any

from verl.utils.debug import marked_timer

from rlinf_verl.config import M2FlowConfig
from rlinf_verl.trainer.sharing import ROLLOUT, Sharing, ray_lock
from rlinf_verl.trainer.sharing_tenants import tenants_of

STEP = (ROLLOUT, "actor", "ref", "critic", "actor", "critic", "actor", ROLLOUT)
"""Residents in the order a step of veRL's uses them; those that do not exist are left out."""


class SharesDevices:
    """A base of trainers, before veRL's own: each stage brings what it needs to the devices.

    It takes the place of ``sync``'s barrier, where all replicas sleep after generation and wake after the update.
    """

    options: M2FlowConfig
    sharing: Sharing
    config: Any
    timing_raw: dict[str, float]
    reward_loop_manager: Any

    def on_init_end(self) -> None:
        """Take charge of the devices and wake the replicas with the actor's weights."""
        tenants = tenants_of(self, self.options)
        self.sharing = Sharing(tenants, ray_lock(tenants.capacity))
        print(f"[rlinf-plugins] device sharing: {self.sharing.describe()}", flush=True)
        self._generation = ExitStack()
        self.sharing.sync_weights()
        self.sharing.take_metrics()  # the first arrival belongs to no step

    def on_step_begin(self) -> None:
        """Announce the step's uses."""
        self.sharing.begin_step(STEP)

    def on_sample_begin(self) -> None:
        """Hold the replicas while they generate."""
        self._generation.enter_context(self.sharing.use(ROLLOUT))

    def on_sample_end(self) -> None:
        """Let go of the replicas; they leave when somebody needs the room."""
        self._generation.close()
        self.sharing.generated()
        if self.curr_step_profile:  # type: ignore[attr-defined]
            self._stop_rollout_profiling()  # type: ignore[attr-defined]

    def on_step_end(self) -> None:
        """Bring the new weights to the replicas and report the step's switches."""
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.sharing.sync_weights()
        self._pending_sync_metrics = self.sharing.take_metrics()

    def on_validate_begin(self) -> None:
        """Hold the replicas while they generate."""
        self._generation.enter_context(self.sharing.use(ROLLOUT))

    def on_validate_end(self) -> None:
        """Let go of the replicas."""
        self._generation.close()

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and let go of the devices however it ends."""
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            self.sharing.close()

    def _compute_reward_colocate(self, *args: Any, **kwargs: Any) -> Any:
        self.sharing.rollout_away()  # the reward model wakes on the same devices by itself
        return super()._compute_reward_colocate(*args, **kwargs)  # type: ignore[misc]

    def _compute_old_log_prob(self, *args: Any, **kwargs: Any) -> Any:
        bypass = (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False)
        with self.sharing.use(*([] if bypass else ["actor"])):  # bypassed, the rollout's own are taken
            return super()._compute_old_log_prob(*args, **kwargs)  # type: ignore[misc]

    def _compute_ref_log_prob(self, *args: Any, **kwargs: Any) -> Any:
        with self.sharing.use("ref" if "ref" in self.sharing else "actor"):
            return super()._compute_ref_log_prob(*args, **kwargs)  # type: ignore[misc]

    def _compute_values(self, *args: Any, **kwargs: Any) -> Any:
        with self.sharing.use("critic"):
            return super()._compute_values(*args, **kwargs)  # type: ignore[misc]

    def _update_critic(self, *args: Any, **kwargs: Any) -> Any:
        with self.sharing.use("critic"):
            return super()._update_critic(*args, **kwargs)  # type: ignore[misc]

    def _update_actor(self, *args: Any, **kwargs: Any) -> Any:
        with self.sharing.use("actor"):
            return super()._update_actor(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self) -> None:
        with self.sharing.use(*self.sharing.saved_together):
            super()._save_checkpoint()  # type: ignore[misc]
