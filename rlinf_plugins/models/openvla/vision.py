"""The fused vision backbone: DINOv2 and SigLIP patch features side by side."""

from typing import Any

import timm
import timm.layers
import torch
from torch import nn

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla.config import OpenVLAConfig


class LayerScale(nn.Module):
    """timm's LayerScale with the parameter named as the checkpoints name it, so that names need no translation.

    Args:
        initial: ``[dim]`` scale per channel.
    """

    def __init__(self, initial: torch.Tensor) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(initial.detach().clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scale ``[..., dim]``."""
        return tokens * self.scale_factor


class FusedVisionBackbone(nn.Module):
    """Two timm ViTs, each read at the output of its next-to-last block, without final norm or prefix tokens.

    The last block, the norm and SigLIP's pooling head take no part in the forward pass, but the published
    checkpoints hold them, so they exist here and round-trip.

    Args:
        config: The checkpoint's configuration.

    Raises:
        ConfigError: A timm model that is not registered.
    """

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        overrides = config.timm_model_kwargs or [{}, {}]
        towers = [
            _create(name, size, act, extra)
            for name, size, act, extra in zip(
                config.timm_model_ids, config.image_sizes, config.timm_override_act_layers, overrides, strict=True
            )
        ]
        self.featurizer, self.fused_featurizer = towers
        for tower in towers:
            _rename_layer_scales(tower)

    @property
    def width(self) -> int:
        """Width of the concatenated features."""
        return int(self.featurizer.embed_dim + self.fused_featurizer.embed_dim)

    @property
    def patches(self) -> int:
        """Patches per image."""
        return int(self.featurizer.patch_embed.num_patches)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Encode images.

        Args:
            pixel_values: ``[B, 6 * images, H, W]``; of each six channels the first three are normalised for DINOv2,
                the others for SigLIP.

        Returns:
            ``[B, images * patches, width]``, DINOv2's features first on the last axis.
        """
        batch, channels, height, width = pixel_values.shape
        images = pixel_values.reshape(batch * channels // 6, 6, height, width)
        fused = torch.cat(
            [_features(self.featurizer, images[:, :3]), _features(self.fused_featurizer, images[:, 3:])], dim=-1
        )
        return fused.reshape(batch, -1, fused.shape[-1])

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute the blocks' activations in the backward pass instead of keeping them."""
        for tower in (self.featurizer, self.fused_featurizer):
            tower.set_grad_checkpointing(enabled)


def _features(tower: Any, images: torch.Tensor) -> torch.Tensor:
    layer = len(tower.blocks) - 2
    (features,) = tower.forward_intermediates(
        images, indices=[layer], norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )
    return features  # type: ignore[no-any-return]


def _rename_layer_scales(tower: nn.Module) -> None:
    for block in tower.modules():
        for name, child in list(block.named_children()):
            if isinstance(child, timm.layers.LayerScale):
                setattr(block, name, LayerScale(child.gamma))


def _create(name: str, image_size: int, act_layer: str | None, overrides: dict[str, Any]) -> Any:
    if not timm.is_model(name.split(".")[0]):
        raise ConfigError(f"config.json: timm_model_ids names {name!r}, which timm {timm.__version__} does not know")
    extra = dict(overrides) | ({"act_layer": act_layer} if act_layer else {})
    return timm.create_model(name, pretrained=False, num_classes=0, img_size=image_size, **extra)
