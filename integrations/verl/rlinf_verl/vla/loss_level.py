"""The level at which the policy's ratio is formed: a token, an action or the whole chunk.

veRL's loss works on tokens. Log-probabilities of the tokens of one action add up to the action's, so a micro-batch is
rewritten with one entry per action (or chunk) just before veRL's loss sees it; rows in TransferQueue stay per token.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.models.openvla.config import ActionSpec
from rlinf_plugins.models.openvla.modeling import ActionOutput

Level = Literal["token", "action", "chunk"]

_SUMMED = ("old_log_probs", "ref_log_prob")


def level_of(override_config: Mapping[Any, Any]) -> Level:
    """Read ``model.override_config.log_prob_level``; ``token`` where it is not given.

    Raises:
        ConfigError: Another word.
    """
    level: Level = override_config.get("log_prob_level", "token")
    if level not in get_args(Level):
        raise ConfigError(
            f"actor_rollout_ref.model.override_config.log_prob_level must be one of {', '.join(get_args(Level))}, "
            f"got {level!r}"
        )
    return level


def tokens_per_unit(spec: ActionSpec, level: Level) -> int:
    """Return how many consecutive action tokens share one ratio."""
    return {"token": 1, "action": spec.dim, "chunk": spec.tokens}[level]


def count_units(data: Mapping[str, Any], width: int) -> torch.Tensor:
    """Return the number of units with a valid token, what veRL's ``token-mean`` divides by.

    Args:
        data: Rows with ``loss_mask``, nested.
        width: Tokens of a unit.
    """
    return torch.stack([_units(mask, width).bool().any(dim=1).sum() for mask in data["loss_mask"].unbind()]).sum()


def at_level(output: ActionOutput, data: TensorDict, width: int) -> tuple[ActionOutput, TensorDict]:
    """Rewrite the policy's output and a micro-batch with one entry per ``width`` tokens.

    Args:
        output: The policy's output.
        data: The micro-batch; not changed.
        width: Tokens of a unit.

    Returns:
        Log-probabilities and entropies ``[B, units, 1]``, summed over valid tokens; and rows whose masks, advantages
        and old log-probabilities have one entry a unit.

    Raises:
        ConfigError: Importance weights per token, which have no meaning for larger units.
    """
    if width == 1:
        return output, data
    if "rollout_is_weights" in data:
        raise ConfigError(
            "algorithm.rollout_correction.rollout_is weighs tokens; use override_config.log_prob_level=token with it"
        )
    masks = list(data["response_mask"].unbind())
    tokens = output.log_probs[0].numel()
    rows = torch.stack([mask if len(mask) == tokens else mask.new_zeros(tokens) for mask in masks])
    changed = data.copy()
    for name in ("responses", "response_mask", "loss_mask"):
        changed[name] = _nested([_units(row, width).bool().any(dim=1).to(row.dtype) for row in data[name].unbind()])
    for name in (*_SUMMED, "advantages"):
        if name in data:
            changed[name] = _nested(
                [_reduce(row, mask, width, name) for row, mask in zip(data[name].unbind(), masks, strict=True)]
            )
    lengths = zip(data["prompts"].unbind(), changed["responses"].unbind(), strict=True)
    changed["input_ids"] = _nested([torch.cat([prompt, response]) for prompt, response in lengths])

    def summed(values: torch.Tensor) -> torch.Tensor:
        return (values.flatten(1) * rows).view(len(rows), -1, width).sum(dim=2, keepdim=True)

    entropy = None if output.entropy is None else summed(output.entropy)
    return output._replace(log_probs=summed(output.log_probs), entropy=entropy), changed


def _units(row: torch.Tensor, width: int) -> torch.Tensor:
    """``[N]`` to ``[N / width, width]``; a row that veRL added to fill a mini-batch is one unit."""
    return row.view(-1, width) if len(row) % width == 0 else row.view(1, -1)


def _reduce(row: torch.Tensor, mask: torch.Tensor, width: int, name: str) -> torch.Tensor:
    total = _units(row * mask, width).sum(dim=1)
    return total if name in _SUMMED else total / _units(mask, width).sum(dim=1).clamp(min=1)


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
