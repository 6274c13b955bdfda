"""The training engine of OpenVLA policies: veRL's FSDP2 engine around the policy's own forward.

veRL's engine shifts next-token log-probabilities over a whole vocabulary; a policy that decodes a chunk in parallel, or
whose support is the action vocabulary, cannot be read that way. Everything else (sharding, gradient accumulation,
clipping, offload, schedules, checkpoints) is veRL's.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import Metric
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine.utils import detach_tree

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla import ImageProcessor, OpenVLAForActionPrediction, load_policy, save_policy
from rlinf_plugins.models.openvla.lora import TARGETS, adapters_off, add_adapters, merged_weights
from rlinf_plugins.models.openvla.statistics import FILE as STATISTICS
from rlinf_verl.vla.engine_rows import pack_outputs, read_inputs
from rlinf_verl.vla.loss_level import at_level, count_units, level_of, tokens_per_unit
from rlinf_verl.vla.loss_value import valid_values, value_loss, value_options

MODEL_TYPE = "openvla"
"""``model.model_type``; veRL's engine configuration keeps the strategy's name, so the engine has a type of its own."""

WRAPPED = ("Block", "LlamaDecoderLayer", "FusedProjector", "ProprioProjector", "ValueHead")
"""Classes that are sharded on their own: vision blocks, decoder layers, projectors, value head. veRL adds the embedding
and the output layer."""


def keep_unread_blocks_whole(policy: OpenVLAForActionPrediction) -> None:
    """Give the last block of each vision tower a class of its own, so that it is not among :data:`WRAPPED`.

    It is in the checkpoint but in no forward pass. Where weights compute in bfloat16, FSDP2 accumulates the gradients
    of every unit, and fails on one that was never gathered; inside the root's unit it is.
    """
    backbone: Any = policy.vision_backbone
    for tower in (backbone.featurizer, backbone.fused_featurizer):
        block = tower.blocks[-1]
        block.__class__ = type("UnreadBlock", (type(block),), {})


def wrapped_classes(policy: torch.nn.Module) -> list[str]:
    """Return those of :data:`WRAPPED` that the policy has."""
    present = {type(module).__name__ for module in policy.modules()}
    return [name for name in WRAPPED if name in present]


@EngineRegistry.register(model_type=MODEL_TYPE, backend="fsdp2", device=["cuda", "cpu"])
class OpenVLAEngine(FSDPEngine):  # type: ignore[misc]
    """FSDP2 engine for OpenVLA and OpenVLA-OFT; the checkpoint's ``action_spec`` decides which.

    Args:
        model_config: veRL's ``HFModelConfig``.
        engine_config: veRL's ``FSDPEngineConfig`` with ``strategy="fsdp2"``.
        optimizer_config: veRL's ``FSDPOptimizerConfig``.
        checkpoint_config: veRL's ``CheckpointConfig``; ``hf_model`` in ``save_contents`` writes the published layout.

    Raises:
        ConfigError: Settings that have no meaning for an action policy.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any, **kwargs: Any
    ) -> None:
        _check(model_config, engine_config)
        contents = list(checkpoint_config.save_contents)
        self._exports = "hf_model" in contents
        kept = [name for name in contents if name != "hf_model"]
        checkpoint_config = dataclasses.replace(checkpoint_config, save_contents=kept)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, **kwargs)
        hf_config = model_config.hf_config
        self._images = ImageProcessor(hf_config.image_resize_strategy, hf_config.image_sizes[0])
        self._value_options = value_options(model_config.override_config)
        self._level = level_of(model_config.override_config)

    @property
    def policy(self) -> OpenVLAForActionPrediction:
        """The policy inside the wrappers."""
        return self.module  # type: ignore[no-any-return]

    def _build_module(self) -> torch.nn.Module:
        default = "bf16" if self.engine_config.forward_only else "fp32"
        dtype = PrecisionType.to_dtype(self.engine_config.model_dtype or default)
        policy = load_policy(self.model_config.local_path, dtype=dtype)
        policy.set_gradient_checkpointing(self.model_config.enable_gradient_checkpointing)
        keep_unread_blocks_whole(policy)
        policy._no_split_modules = wrapped_classes(policy)
        return policy

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if not self._is_lora:
            return super()._build_fsdp_module(module)  # type: ignore[no-any-return]
        # veRL picks embedding and output layer by name unless they are tied. The output layer's name is that of peft's
        # wrapper then, whose class cannot be sharded: call them tied for a moment and pick both by class.
        policy: Any = module
        policy._no_split_modules = [*wrapped_classes(policy), "Embedding", "VocabularyHead"]
        config = policy.config
        tied = getattr(config, "tie_word_embeddings", False)
        config.tie_word_embeddings = True
        try:
            return super()._build_fsdp_module(module)  # type: ignore[no-any-return]
        finally:
            config.tie_word_embeddings = tied

    def _build_lora_module(self, module: torch.nn.Module) -> torch.nn.Module:
        chosen = self.model_config.target_modules
        targets = TARGETS if chosen == "all-linear" else list(chosen)
        add_adapters(module, rank=self.model_config.lora_rank, alpha=self.model_config.lora_alpha, targets=targets)
        return module

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """Stream the weights under checkpoint names, adapters merged; on all ranks, for rollout and export alike."""
        if not self._is_lora:
            return super().get_per_tensor_param(layered_summon, base_sync_done, **kwargs)  # type: ignore[no-any-return]
        return merged_weights(self.policy, device=get_device_id()), None

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Compute as the policy the adapters were added to, which is the reference policy."""
        return adapters_off(self.policy)

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        head: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (head if "value_head." in name else rest).append(parameter)
        groups: list[dict[str, Any]] = [{"params": rest}]
        if head:
            lr = self._value_options.value_lr
            groups.append({"params": head, "lr": self.optimizer_config.lr if lr is None else lr})
        return build_optimizer(groups, self.optimizer_config)  # type: ignore[no-any-return]

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run a mini-batch in micro-batches; see veRL.

        What the losses are averaged over is counted here for the whole mini-batch on all ranks, so that gradients do
        not depend on how it is split: units of ``log_prob_level`` for the policy, valid values for the value head.
        """
        if not forward_only:
            units = count_units(data, tokens_per_unit(self.policy.spec, self._level))
            tu.assign_non_tensor(data, num_units=self._total(units))
            if self.policy.value_head is not None and "chunk_returns" in data:
                tu.assign_non_tensor(data, num_values=self._total(valid_values(data, self.policy.spec.values).sum()))
        return super().forward_backward_batch(data, loss_function, forward_only)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run the policy on one micro-batch.

        Args:
            micro_batch: Rows as ``rlinf_verl.vla.rows`` defines them.
            loss_function: veRL's loss; None where only outputs are wanted.
            forward_only: No gradients are needed.

        Returns:
            The loss, and what veRL aggregates: ``model_output``, ``loss``, ``metrics``.
        """
        device = get_device_id()
        inputs = read_inputs(micro_batch, self.policy.spec, self._images, device)
        micro_batch = micro_batch.to(device)
        with self._autocast():
            output = self.module(**inputs.arguments)
        model_output = pack_outputs(output, micro_batch, inputs.real)
        loss, metrics = torch.tensor(1.0, device=device), {}
        if loss_function is not None:
            judged, rows = at_level(output, micro_batch, tokens_per_unit(self.policy.spec, self._level))
            units = tu.get_non_tensor_data(data=micro_batch, key="num_units", default=None)
            if units is not None:
                tu.assign_non_tensor(rows, batch_num_tokens=units)
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(
                model_output=pack_outputs(judged, rows, inputs.real), data=rows, dp_group=group
            )
            total = tu.get_non_tensor_data(data=micro_batch, key="num_values", default=None)
            if total is not None and output.values is not None:
                ranks = self.get_data_parallel_size()
                extra, numbers = value_loss(output.values, micro_batch, self._value_options, total, ranks)
                loss = loss + extra
                metrics |= {f"value/{name}": Metric("sum", value) for name, value in numbers.items()}
        return loss, {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save shards to resume from and, where asked for, ``huggingface/`` in the published layout."""
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        if self._exports:
            self.export(Path(local_path) / "huggingface")

    def export(self, folder: Path) -> None:
        """Write the policy in the published layout; call it on all ranks.

        Args:
            folder: Where ``load_policy`` will find it.
        """
        gathered, _ = self.get_per_tensor_param()
        weights = {name: value.detach().cpu() for name, value in gathered}
        if self.rank == 0:
            save_policy(self.policy, folder, weights=weights)
            for name in (STATISTICS, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
                source = Path(self.model_config.local_path) / name
                if source.is_file():
                    shutil.copyfile(source, folder / name)
        torch.distributed.barrier()

    def _total(self, count: torch.Tensor) -> int:
        """Sum over data-parallel ranks, at least 1 since losses are divided by it."""
        total = count.to(get_device_id())
        torch.distributed.all_reduce(total, group=self.get_data_parallel_group())
        return max(1, int(total.item()))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


def _check(model_config: Any, engine_config: Any) -> None:
    wrong = {
        "model.use_remove_padding": (model_config.use_remove_padding, False),
        "model.use_fused_kernels": (model_config.use_fused_kernels, False),
        "model.use_liger": (model_config.use_liger, False),
        "model.lora_adapter_path": (model_config.lora_adapter_path, None),
        "fsdp_config.strategy": (engine_config.strategy, "fsdp2"),
        "fsdp_config.ulysses_sequence_parallel_size": (engine_config.ulysses_sequence_parallel_size, 1),
    }
    for name, (found, needed) in wrong.items():
        if found != needed:
            raise ConfigError(f"the openvla engine needs {name}={str(needed).lower()}, got {found}")
