"""The value head's loss, added to veRL's policy loss so that one backward pass trains both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.vla.loss_gae import Bootstrap
from rlinf_verl.vla.rows import column


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueOptions:
    """How the value head learns; given as ``model.override_config.value_*``.

    Attributes:
        value_lr: Learning rate of the head; that of the policy where None.
        value_clip: Largest change from the value at rollout that the loss rewards; 0 leaves it unclipped.
        value_huber: Error beyond which the loss grows linearly.
        value_coef: Weight beside the policy loss.
        value_bootstrap: What follows the last decision of an episode; see ``rlinf_verl.vla.loss_gae``.
    """

    value_lr: float | None = None
    value_clip: float = 0.2
    value_huber: float = 10.0
    value_coef: float = 1.0
    value_bootstrap: Bootstrap = "standard"

    def validate(self, where: str) -> None:
        """Refuse what cannot be a rate, range or weight.

        Raises:
            ConfigError: A negative number, or a Huber threshold of 0.
        """
        for name in ("value_lr", "value_clip", "value_coef"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{where}.{name} must not be negative, got {value}")
        if self.value_huber <= 0:
            raise ConfigError(f"{where}.value_huber must be positive, got {self.value_huber}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the options."""
        return tuple(cls.__dataclass_fields__)


def value_options(override_config: Mapping[Any, Any]) -> ValueOptions:
    """Pick the value head's options out of ``model.override_config``.

    Raises:
        ConfigError: A wrong type or an impossible value.
    """
    chosen = {name: override_config[name] for name in ValueOptions.names() if name in override_config}
    return from_mapping(ValueOptions, chosen, "actor_rollout_ref.model.override_config")


def valid_values(data: Mapping[str, Any], outputs: int) -> torch.Tensor:
    """Return bool ``[B, V]``: values that belong to a step that was taken, in a row that is a decision.

    Args:
        data: Rows with ``response_mask``, nested.
        outputs: ``V``, values per row; they divide a row's tokens evenly.
    """
    rows = []
    for mask in data["response_mask"].unbind():
        whole = mask if len(mask) % outputs == 0 else mask.new_zeros(outputs)
        rows.append(whole.view(outputs, -1).bool().any(dim=1))
    return torch.stack(rows)


def value_loss(
    values: torch.Tensor, data: Mapping[str, Any], options: ValueOptions, total: float, ranks: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """Clipped Huber loss of the value head, averaged over the valid values of the whole mini-batch.

    ``max(h(R - v), h(R - clip(v, v_old - c, v_old + c)))``, with ``h`` the Huber function.

    Args:
        values: ``[B, V]`` of this micro-batch.
        data: Rows with ``chunk_returns`` and ``rollout_values`` ``[B, V]``, and ``response_mask``.
        options: Clip, threshold and weight.
        total: Valid values in the mini-batch over all ranks.
        ranks: Data-parallel ranks, over which gradients are averaged.

    Returns:
        The weighted loss, and metrics; they are partial sums like veRL's policy loss.
    """
    returns, old = (column(data, name).float() for name in ("chunk_returns", "rollout_values"))
    valid = valid_values(data, values.shape[1])
    losses = functional.huber_loss(values, returns, reduction="none", delta=options.value_huber)
    clipped_share = torch.zeros((), device=values.device)
    if options.value_clip:
        clipped = old + (values - old).clamp(-options.value_clip, options.value_clip)
        other = functional.huber_loss(clipped, returns, reduction="none", delta=options.value_huber)
        clipped_share = ((other > losses) & valid).float().sum()
        losses = torch.maximum(losses, other)
    loss = options.value_coef * losses.masked_fill(~valid, 0.0).sum() / total * ranks
    return loss, {"loss": loss.detach().item(), "clipfrac": clipped_share.item() / total * ranks}
