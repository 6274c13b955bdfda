"""LoRA adapters on the policy: added in place, trained beside the value head, merged on the way out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlinf_plugins.core.errors import ConfigError, MissingExtraError

TARGETS = (
    *("proj", "qkv", "fc1", "fc2", "q", "kv", "fc3", "out_proj"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"),
)
"""Layers that get an adapter, by the last part of their name: RLinf's choice."""


def add_adapters(policy: nn.Module, *, rank: int, alpha: float | None = None, targets: Sequence[str] = TARGETS) -> None:
    """Put an adapter beside every targeted layer and freeze everything else but the value head.

    The policy computes what it computed before: adapters start at zero.

    Args:
        policy: Changed in place; its checkpoint-named tensors are then those of :func:`merged_weights`.
        rank: Of the adapters.
        alpha: Scale times rank; the rank where None.
        targets: Last parts of layer names.

    Raises:
        ConfigError: A rank below 1, or targets that name no layer.
        MissingExtraError: ``peft`` is not installed.
    """
    if rank < 1:
        raise ConfigError(f"the rank of LoRA adapters must be at least 1, got {rank}")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingExtraError("LoRA needs peft: pip install 'rlinf-plugins[lora]'") from error
    config = LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        exclude_modules=r".*value_head\..*",
        init_lora_weights="gaussian",
    )
    try:
        inject_adapter_in_model(config, policy)
    except ValueError as error:
        raise ConfigError(f"LoRA targets {', '.join(targets)} name no layer of this policy: {error}") from error
    dtype = next(parameter.dtype for name, parameter in policy.named_parameters() if "lora_" not in name)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)  # one type in all of a shard
        parameter.requires_grad = "lora_" in name or name.startswith("value_head.")


def merged_weights(policy: nn.Module, device: torch.device | str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor under its checkpoint name, adapters added to their layers: ``W + alpha / r * B A``.

    Nothing in the policy changes. Sharded tensors are gathered one by one, so call it on all ranks.

    Args:
        policy: With or without adapters.
        device: Where tensors are gathered and added; where they are if None.
    """

    def whole(value: torch.Tensor) -> torch.Tensor:
        here = value if device is None else value.to(device)
        return here.full_tensor() if isinstance(here, DTensor) else here

    scales = {name: layer.scaling["default"] for name, layer in policy.named_modules() if _has_adapter(layer)}
    state = policy.state_dict()
    for name, value in state.items():
        if "lora_" in name:
            continue
        layer, _, kind = name.rpartition(".base_layer.")
        tensor = whole(value)
        if layer in scales and kind == "weight":
            down, up = (whole(state[f"{layer}.lora_{part}.default.weight"]).float().flatten(1) for part in "AB")
            tensor = (tensor.float() + scales[layer] * (up @ down).view_as(tensor)).to(tensor.dtype)
        yield name.replace(".base_layer.", "."), tensor


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone inside the block: the reference policy, without a second model."""
    adapted: list[Any] = [layer for layer in policy.modules() if _has_adapter(layer)]
    for layer in adapted:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted:
            layer._disable_adapters = False


def _has_adapter(layer: nn.Module) -> bool:
    return "default" in getattr(layer, "lora_A", {})
