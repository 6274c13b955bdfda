"""Tiny random checkpoints in the exact published layout, for tests, demos and smoke runs.

They know nothing: whatever they do well, they learnt after they were made.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla.checkpoint import save_policy
from rlinf_plugins.models.openvla.config import TEXT_VOCABULARY, ActionSpec, OpenVLAConfig
from rlinf_plugins.models.openvla.modeling import OpenVLAForActionPrediction
from rlinf_plugins.models.openvla.tiny_tokenizer import tiny_tokenizer

Variant = Literal["openvla", "openvla-oft"]

_SPECS = {
    "openvla": ActionSpec(),
    "openvla-oft": ActionSpec(decoding="parallel", chunk=8),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinySizes:
    """Sizes of a tiny checkpoint; the defaults make the smallest useful one, for tests.

    Attributes:
        vision_dims: Widths of the two ViTs.
        vision_depth: Blocks of each ViT; the last one is never run.
        vision_heads: Attention heads of the two ViTs.
        patch_size: Side of a patch in pixels: 14 as published (256 patches), 28 gives 64, 56 gives 16.
        hidden: Width of the language model.
        intermediate: Width of its feed-forward layers.
        layers: Decoder layers.
        heads: Attention heads of the language model.
        action_bins: Action tokens per number; 256 as published.
        layer_scale: Initial LayerScale of the first ViT. The published models start at 1e-5, which leaves a random
            ViT almost linear.
        image_size: Side of the images in pixels; 224 as published. Smaller ones cost less to prepare and to encode.
        gain: Standard deviation of linear layers' weights times the root of their inputs. None leaves them to timm and
            transformers, whose 0.02 suits wide networks and leaves a narrow one almost linear: it barely tells one
            observation from another, and learns slowly.
    """

    vision_dims: tuple[int, int] = (32, 48)
    vision_depth: int = 3
    vision_heads: tuple[int, int] = (2, 3)
    patch_size: int = 14
    hidden: int = 64
    intermediate: int = 176
    layers: int = 2
    heads: int = 4
    action_bins: int = 256
    layer_scale: float = 1.0
    image_size: int = 224
    gain: float | None = None

    @classmethod
    def learner(cls, action_bins: int = 8) -> "TinySizes":
        """Return sizes that learn a toy task in seconds.

        Images of 56 pixels in 16 patches, two decoder layers, few action tokens.

        Args:
            action_bins: Action tokens per number.
        """
        return cls(
            vision_dims=(32, 32),
            vision_heads=(2, 2),
            patch_size=14,
            image_size=56,
            hidden=64,
            intermediate=128,
            action_bins=action_bins,
            gain=1.0,
        )

    @classmethod
    def demo(cls) -> "TinySizes":
        """Return sizes that train on two CPU cores in minutes.

        About 7 million parameters, 6 of them in the two vocabulary matrices, and 64 patches an image.
        """
        return cls(
            vision_dims=(64, 64), vision_heads=(4, 4), patch_size=28, hidden=96, intermediate=256, layers=2, heads=4
        )


def make_tiny_checkpoint(
    path: str | Path,
    *,
    variant: Variant = "openvla",
    seed: int = 0,
    sizes: TinySizes | None = None,
    spec: ActionSpec | None = None,
    statistics: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random checkpoint: weights, configuration, tokenizer and statistics.

    Args:
        path: Folder; created if need be.
        variant: ``"openvla"`` or ``"openvla-oft"``; picks the action specification where ``spec`` is None.
        seed: Seeds the weights; the same seed gives the same file.
        sizes: Sizes; :class:`TinySizes` where None.
        spec: Action specification; it is recorded in ``config.json``.
        statistics: Content of ``dataset_statistics.json``; by default one data set, ``"tiny"``, whose actions are
            in [-1, 1] and whose last number is a gripper in [0, 1].
        dtype: Type of the weights on disk.

    Returns:
        The folder.

    Raises:
        ConfigError: An unknown variant.
    """
    if variant not in _SPECS:
        raise ConfigError(f"variant must be one of {', '.join(_SPECS)}, got {variant!r}")
    folder, sizes, spec = Path(path), sizes or TinySizes(), spec or _SPECS[variant]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = OpenVLAForActionPrediction(_config(sizes).with_spec(spec))
        _set_layer_scale(policy, sizes.layer_scale)
        if sizes.gain is not None:
            _set_gain(policy, sizes.gain)
    save_policy(policy.to(dtype), folder, statistics=statistics or {"tiny": tiny_statistics(spec)})
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<PAD>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "padding_side": "right"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special, indent=2))
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2))
    return folder


def tiny_statistics(spec: ActionSpec) -> dict[str, Any]:
    """Return statistics of one data set under which actions are used as they are decoded."""
    kinds = {"action": spec.dim} | ({"proprio": spec.proprio_dim} if spec.proprio_dim else {})
    tables: dict[str, Any] = {
        kind: {
            "mean": [0.0] * dim,
            "std": [1.0] * dim,
            "min": [-1.0] * dim,
            "max": [1.0] * dim,
            "q01": [-1.0] * dim,
            "q99": [1.0] * dim,
        }
        for kind, dim in kinds.items()
    }
    tables["action"]["mask"] = [True] * (spec.dim - 1) + [False]
    return tables | {"num_transitions": 0, "num_trajectories": 0}


def _config(sizes: TinySizes) -> OpenVLAConfig:
    towers = [
        {"embed_dim": dim, "depth": sizes.vision_depth, "num_heads": heads, "patch_size": sizes.patch_size}
        for dim, heads in zip(sizes.vision_dims, sizes.vision_heads, strict=True)
    ]
    return OpenVLAConfig(
        timm_model_kwargs=towers,
        n_action_bins=sizes.action_bins,
        image_sizes=[sizes.image_size, sizes.image_size],
        text_config={
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.heads,
            "vocab_size": TEXT_VOCABULARY + 64,
        },
    )


def _set_layer_scale(policy: nn.Module, value: float) -> None:
    for name, parameter in policy.named_parameters():
        if name.endswith(".scale_factor"):
            nn.init.constant_(parameter, value)


def _set_gain(policy: nn.Module, gain: float) -> None:
    """Scale linear layers, but for output layer and value head: small logits try everything, values start near 0."""
    for name, module in policy.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head") and "value_head" not in name:
            nn.init.normal_(module.weight, std=gain / module.in_features**0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
