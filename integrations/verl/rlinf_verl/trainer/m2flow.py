"""The trainer mode ``m2flow``: it schedules veRL's stages; the algorithm stays veRL's."""

from contextlib import AbstractContextManager
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from ray._private.state import available_resources_per_node
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl import handshake
from rlinf_verl.config import TRAINER_MODE, m2flow_config
from rlinf_verl.room import check_resources, free_nodes, job_requests
from rlinf_verl.search.metrics import search_metrics
from rlinf_verl.trainer.arrivals import Arrivals
from rlinf_verl.trainer.finished import KeepsFinished
from rlinf_verl.trainer.follows_plan import FollowsPlan
from rlinf_verl.trainer.measured import MeasuresStages
from rlinf_verl.trainer.metrics import reward_info_metrics
from rlinf_verl.trainer.minibatch import sized_for
from rlinf_verl.trainer.own_devices import OwnDevices
from rlinf_verl.trainer.replay import ArrivalReplayBuffer
from rlinf_verl.trainer.sharing_trainer import SharesDevices
from rlinf_verl.trainer.streamed import StreamedStep
from rlinf_verl.trainer.workers import WORKER_CLASSES
from rlinf_verl.vla.loss_advantage import EpisodeAdvantages


@register_trainer(TRAINER_MODE)
class M2FlowTrainer(  # type: ignore[misc]
    KeepsFinished, StreamedStep, OwnDevices, SharesDevices, EpisodeAdvantages, PPOTrainerSync
):
    """veRL's ``sync`` step under a schedule: stages take turns on one set of devices, or overlap on devices apart.

    Whatever the mode, the trainer's bases decide when a stage runs and on what part of the batch; what it computes is
    veRL's. The temporal mode differs from ``sync`` only in that the trainer sleeps until rollouts arrive instead of
    polling, that failed rollouts are reported with their cause and capped, and that a dead or stalled rollout ends the
    job with an error that names it.
    """

    def __new__(cls, config: DictConfig) -> "M2FlowTrainer":
        """Make the trainer that measures where a profile is named or a plan is followed."""
        options = m2flow_config(config)
        measures = cls is M2FlowTrainer and (options.profile.path is not None or options.predicted)
        return object.__new__(MeasuredM2FlowTrainer if measures else cls)

    def __init__(self, config: DictConfig) -> None:
        handshake.require()
        self.options = m2flow_config(config)
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        # veRL keys its data path (fetch size, refill, what a checkpoint holds) on this name, and every mode keeps the
        # contract of `sync`: nothing is in flight between two steps.
        self.trainer_mode = "sync"
        sampler = self.config.trainer.v1.sampler
        if sampler.custom_sampler.path:
            return super()._build_replay_buffer()
        metric = self._resolve_filter_groups_metric()
        refill_failed = bool(sampler.get("sync_refill_failed_groups", False))
        train_batch_size = self.config.data.train_batch_size
        rollout = self.config.actor_rollout_ref.rollout
        one_by_one = metric is not None or refill_failed
        return ArrivalReplayBuffer(
            max_failed_fraction=self.options.max_failed_fraction,
            rollouts_per_prompt={"train": rollout.n, "val": rollout.val_kwargs.n},
            stall_timeout_s=self.options.stall_timeout_s,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(TRAINER_MODE, {}),
            max_off_policy_threshold=sampler.max_off_policy_threshold,
            max_off_policy_strategy=sampler.max_off_policy_strategy,
            sampler_kwargs=sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            filter_groups_metric=metric,
            sync_refill_failed_groups=refill_failed,
            train_batch_size=train_batch_size,
            gen_batch_size=1 if one_by_one else self.config.data.get("gen_batch_size", None) or train_batch_size,
            max_inflight_gen_batches=self.config.algorithm.filter_groups.max_inflight_gen_batches if metric else 1,
        )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        self.role_worker_mapping: dict[Any, Any] = {
            role: ray.remote(WORKER_CLASSES[actor_class.__ray_actor_class__])
            for role, actor_class in self.role_worker_mapping.items()
        }
        pools = job_requests(self.resource_pool_manager.resource_pool_spec, self.config, separate=self.separate)
        check_resources(pools, free_nodes(ray.nodes(), available_resources_per_node()))

    def _balance_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._step_rows = len(batch)
        with self._mini_batches():
            return super()._balance_batch(batch, *args, **kwargs)

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        with self._mini_batches():
            return super()._update_actor(batch, metrics)

    def _mini_batches(self) -> AbstractContextManager[None]:
        return sized_for(self.config, self._step_rows, self.actor_rollout_wg.world_size)

    def _compute_metrics(self, batch: Any, metrics: dict, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        fields = [getattr(value, "data", value) for value in rows["extra_fields"]]  # veRL wraps them, or not
        infos = [row.get("reward_extra_info", {}) for row in fields]
        metrics.update(reward_info_metrics(batch.keys, batch.tags, infos))
        metrics.update(search_metrics(batch.tags, fields, self.options.max_failed_fraction))

    def fit(self, agent_loop_manager: Any) -> None:
        """Train; see :meth:`verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit`.

        Raises:
            ConfigError: The agent-loop manager cannot announce arrivals.
        """
        if isinstance(self.replay_buffer, ArrivalReplayBuffer):
            if not hasattr(agent_loop_manager, "attach_arrivals"):
                name = f"{type(agent_loop_manager).__module__}.{type(agent_loop_manager).__qualname__}"
                raise ConfigError(
                    f"agent_loop_manager_class {name} cannot announce finished rollouts; derive it from "
                    "rlinf_verl.trainer.agent_loop.ArrivalAgentLoopManager, or set "
                    "trainer.v1.sampler.custom_sampler to a buffer that polls"
                )
            arrivals = ray.remote(Arrivals).options(num_cpus=0, max_concurrency=64).remote()
            self.replay_buffer.attach(arrivals, agent_loop_manager.attach_arrivals(arrivals))
        super().fit(agent_loop_manager)


class MeasuredM2FlowTrainer(FollowsPlan, MeasuresStages, M2FlowTrainer):
    """The same with every stage call measured: for the profile that is named, and against the plan that is followed."""
