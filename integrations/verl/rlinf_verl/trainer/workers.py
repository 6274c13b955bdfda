"""veRL's workers, bound to their virtual device and sure that the plugin is loaded in their process.

They add what a streamed step needs beside veRL's whole ``update_actor`` / ``train_mini_batch``: the gradients of a
mini-batch in parts. ``begin_mini_batch``, any number of ``accumulate`` calls, then ``apply_gradients``.
"""

from functools import partial
from itertools import chain
from typing import Any

from tensordict import TensorDict
from verl.single_controller.base.decorator import (
    Dispatch,
    collect_all_to_all,
    dispatch_lazy_compute_data_proto,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.tensordict_utils import maybe_fix_3d_position_ids
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from rlinf_verl import handshake
from rlinf_verl.cpu.devices import bind_assigned_device
from rlinf_verl.trainer.accumulate import Denominator, GradientSum, fitting_micro_batch, total_over_ranks


def _rows_to(mesh: str) -> dict[str, Any]:
    """Dispatch rows over the data-parallel ranks of ``mesh``; nothing but completion is collected."""
    return {"dispatch_fn": partial(dispatch_lazy_compute_data_proto, mesh), "collect_fn": collect_all_to_all}


class M2FlowTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """Critic, and the actor's engine inside :class:`M2FlowActorRolloutRefWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        handshake.require()
        bind_assigned_device()
        super().__init__(*args, **kwargs)
        self._gradients: GradientSum | None = None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)  # type: ignore[untyped-decorator]
    def infer_batch(self, data: TensorDict) -> TensorDict:
        """Run veRL's forward pass; a fixed micro-batch shrinks until the rows of a chunk divide."""
        if not self.engine_config.use_dynamic_bsz and "micro_batch_size_per_gpu" not in data:
            limit = self.engine_config.infer_micro_batch_size_per_gpu
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=fitting_micro_batch(data.shape[0], limit))
        return super().infer_batch(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def begin_mini_batch(self) -> None:
        """Start summing the gradients of a mini-batch; what an unfinished one left is forgotten."""
        self._gradients = GradientSum(self.engine, self.loss_fn)
        self._gradients.begin()

    @register(dispatch_mode=_rows_to("train"))  # type: ignore[untyped-decorator]
    def accumulate(self, data: TensorDict) -> None:
        """Add the gradients of a chunk; it may be of any size that divides over the ranks."""
        self._summing().add(self._prepared(data))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def apply_gradients(self, denominator: Denominator, rows: int, last: bool) -> dict[str, Any]:
        """Apply the summed gradients as one optimizer step.

        Args:
            denominator: What the loss is divided by.
            rows: Rows of the mini-batch over all ranks.
            last: Whether this is the step's last update, after which veRL advances the learning rate.

        Returns:
            The update's metrics as ``train_mini_batch`` reports them; empty on ranks without outputs.
        """
        gradients = self._summing()
        seconds = gradients.seconds
        output = gradients.apply(denominator, rows)
        self._gradients = None
        lengths = total_over_ranks(output.pop("lengths"), self.engine.get_data_parallel_group())
        if last:
            output["metrics"]["lr"] = self.engine.lr_scheduler_step()
        if not self.engine.is_mp_src_rank_with_outputs():
            return {}
        reported = self._postprocess_output(
            output, global_token_num=lengths, delta_time=seconds, forward_only=False, images_seqlens=None
        )
        metrics: dict[str, Any] = tu.get(reported, "metrics")
        return {name: _over_ranks(value) for name, value in metrics.items()}

    def _summing(self) -> GradientSum:
        if self._gradients is None:
            raise RuntimeError("no mini-batch was begun; call begin_mini_batch first")
        return self._gradients

    def _prepared(self, data: TensorDict) -> TensorDict:
        """Complete veRL's settings of a batch; a fixed micro-batch shrinks until the rows divide."""
        maybe_fix_3d_position_ids(data)
        settings = {
            "use_remove_padding": self.model_config.get("use_remove_padding", False),
            "use_dynamic_bsz": self.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": self.engine_config.max_token_len_per_gpu,
            "use_fused_kernels": self.engine_config.use_fused_kernels,
        }
        if not self.engine_config.use_dynamic_bsz:
            limit = self.engine_config.micro_batch_size_per_gpu
            settings["micro_batch_size_per_gpu"] = fitting_micro_batch(data.shape[0], limit)
        tu.assign_non_tensor(data, **settings)
        return data


def _over_ranks(value: Any) -> Any:
    """Reduce what every rank reported of a metric, as ``train_mini_batch`` does."""
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], Metric):
        return Metric.aggregate_dp(value)
    return list(chain.from_iterable(value))


class M2FlowActorRolloutRefWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """Actor, rollout adapter and reference in one process."""

    actor_worker_cls = M2FlowTrainingWorker
    ref_worker_cls = M2FlowTrainingWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        handshake.require()
        bind_assigned_device()
        super().__init__(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def begin_mini_batch(self) -> None:
        """See :meth:`M2FlowTrainingWorker.begin_mini_batch`."""
        self.actor.begin_mini_batch()

    @register(dispatch_mode=_rows_to("actor"))  # type: ignore[untyped-decorator]
    def accumulate(self, data: TensorDict) -> None:
        """See :meth:`M2FlowTrainingWorker.accumulate`."""
        self.actor.accumulate(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def apply_gradients(self, denominator: Denominator, rows: int, last: bool) -> dict[str, Any]:
        """See :meth:`M2FlowTrainingWorker.apply_gradients`."""
        metrics: dict[str, Any] = self.actor.apply_gradients(denominator, rows, last)
        return metrics


WORKER_CLASSES = {ActorRolloutRefWorker: M2FlowActorRolloutRefWorker, TrainingWorker: M2FlowTrainingWorker}
"""veRL's class -> the one the trainer mode uses in its place."""
