"""Estimator ``episode_gae``: advantages for PPO where a trajectory is many rows and brings its own values.

Set with ``algorithm.adv_estimator=episode_gae``.

The values are those the policy's head gave at rollout, so no critic runs and nothing is computed twice.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict

from rlinf_plugins.core.errors import ConfigError
from rlinf_verl.config import NODE
from rlinf_verl.vla.loss_filter import groups_to_drop
from rlinf_verl.vla.loss_gae import ESTIMATOR, Bootstrap, EpisodeValues, episode_gae, normalise, over_tokens
from rlinf_verl.vla.loss_value import value_options

_FIELDS = ["response_mask", "chunk_rewards", "chunk_valid", "rollout_values", "final_values", "terminated"]


class EpisodeAdvantages:
    """Mixin for a veRL trainer: advantages over episodes where the estimator asks for it, and the group filter."""

    config: DictConfig

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.config.algorithm.adv_estimator == ESTIMATOR:
            batch = _estimate(self.config, batch, metrics)
        else:
            batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        bounds = OmegaConf.select(self.config, f"{NODE}.envs.keep_groups")
        return batch if bounds is None else _filter(batch, list(bounds), metrics)


def _estimate(config: DictConfig, batch: Any, metrics: dict[str, Any]) -> Any:
    if config.algorithm.use_kl_in_reward:
        raise ConfigError("algorithm.adv_estimator=episode_gae takes no KL in the reward; use actor.use_kl_loss")
    given = OmegaConf.to_container(config.actor_rollout_ref.model.override_config)
    options = value_options(given if isinstance(given, dict) else {})
    rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=_FIELDS)
    if "rollout_values" not in rows:
        raise ConfigError(
            "algorithm.adv_estimator=episode_gae needs a policy with a value head; set action_spec.value_head to "
            "'chunk' or 'action' in the checkpoint's config.json"
        )
    fields, numbers = row_advantages(
        batch.keys,
        {name: list(rows[name].unbind()) for name in _FIELDS},
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        bootstrap=options.value_bootstrap,
    )
    metrics.update(numbers)
    return _put(batch, fields)


def _filter(batch: Any, bounds: Sequence[float], metrics: dict[str, Any]) -> Any:
    """Zero the masks of the rows whose group is left out; veRL divides by what the masks leave."""
    rows = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "rm_scores"]
    )
    masks = list(rows["response_mask"].unbind())
    real = [row for row, mask in enumerate(masks) if bool(mask.any())]  # the others veRL added
    returns = [float(score.sum()) for score in rows["rm_scores"].unbind()]
    dropped = groups_to_drop([batch.keys[row] for row in real], [returns[row] for row in real], bounds)
    groups = {batch.keys[row].rsplit("_", 2)[0] for row in real}
    metrics["training/groups_kept"] = 1.0 - len(dropped) / len(groups)
    kept = [mask * 0 if key.rsplit("_", 2)[0] in dropped else mask for key, mask in zip(batch.keys, masks, strict=True)]
    return _put(batch, {"response_mask": kept, "loss_mask": kept})


def _put(batch: Any, fields: Mapping[str, Sequence[torch.Tensor]]) -> Any:
    nested = {name: torch.nested.as_nested_tensor(list(rows), layout=torch.jagged) for name, rows in fields.items()}
    output = TensorDict(nested, batch_size=len(batch.keys))
    return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=output)


def row_advantages(
    keys: Sequence[str],
    columns: Mapping[str, Sequence[torch.Tensor]],
    *,
    gamma: float,
    lam: float,
    bootstrap: Bootstrap,
) -> tuple[dict[str, list[torch.Tensor]], dict[str, float]]:
    """Estimate advantages of rows that come in any order.

    Args:
        keys: ``{uid}_{session}_{index}`` of each row; an episode's rows share all but the index.
        columns: Fields of the rows: ``response_mask``, ``chunk_rewards``, ``chunk_valid``, ``rollout_values``,
            ``final_values``, ``terminated``. Rows whose mask is not one entry per action token were added by veRL to
            fill a mini-batch; they get zeros.
        gamma: Discount.
        lam: GAE's lambda.
        bootstrap: What follows the last decision.

    Returns:
        By row ``advantages`` and ``returns`` ``[N]`` per token and ``chunk_returns`` ``[V]``; and metrics.
    """
    masks, valid, values = columns["response_mask"], columns["chunk_valid"], columns["rollout_values"]
    tokens = max(len(mask) for mask in masks)
    episodes: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        if len(masks[row]) == tokens and bool(masks[row].any()):
            episodes[key.rsplit("_", 1)[0]].append(row)
    advantages, returns, steps, order = [], [], [], []
    for members in episodes.values():
        members.sort(key=lambda row: int(keys[row].rsplit("_", 1)[1]))
        episode = EpisodeValues(
            rewards=torch.stack([columns["chunk_rewards"][row] for row in members]),
            valid=torch.stack([valid[row] for row in members]).bool(),
            values=torch.stack([values[row] for row in members]),
            final=columns["final_values"][members[-1]],
            terminated=bool(columns["terminated"][members[-1]].any()),
        )
        advantage, ret = episode_gae(episode, gamma, lam, bootstrap)
        per_step = episode.values.shape[1] > 1
        advantages.append(advantage)
        returns.append(ret)
        steps.append(episode.valid if per_step else episode.valid.any(dim=1, keepdim=True))
        order.append(members)
    scaled = normalise(advantages, steps)
    fields: dict[str, list[torch.Tensor]] = {
        "advantages": [torch.zeros(len(mask)) for mask in masks],
        "returns": [torch.zeros(len(mask)) for mask in masks],
        "chunk_returns": [torch.zeros_like(value) for value in values],
    }
    for members, advantage, ret in zip(order, scaled, returns, strict=True):
        chunk = len(valid[members[0]])
        spread = [over_tokens(table, chunk, tokens // chunk) for table in (advantage, ret)]
        for place, row in enumerate(members):
            fields["advantages"][row] = spread[0][place] * masks[row]
            fields["returns"][row] = spread[1][place] * masks[row]
            fields["chunk_returns"][row] = ret[place]
    return fields, _explained(returns, advantages, steps)


def _explained(
    returns: Sequence[torch.Tensor], advantages: Sequence[torch.Tensor], steps: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Mean return and the share of its variance the values explain."""
    ret = torch.cat([r[s] for r, s in zip(returns, steps, strict=True)])
    error = torch.cat([a[s] for a, s in zip(advantages, steps, strict=True)])
    explained = 1.0 - float(error.var(unbiased=False) / ret.var(unbiased=False).clamp(min=1e-8))
    return {"value/returns_mean": float(ret.mean()), "value/explained_variance": explained}
