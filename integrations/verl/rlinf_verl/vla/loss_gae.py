"""Advantages and returns over whole episodes of action chunks.

veRL's estimators see one row at a time and no values; here a row is one decision and an episode is many rows, so the
recursion runs over the episode: ``A_t = r_t + gamma * V_{t+1} - V_t + gamma * lambda * A_{t+1}`` (Schulman et al.,
2016).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlinf_plugins.core.errors import ConfigError

ESTIMATOR = "episode_gae"
"""Its name as ``algorithm.adv_estimator``."""

Bootstrap = Literal["standard", "always"]
"""What follows the last decision of an episode.

``"standard"``: nothing after termination, the value of what was left behind after truncation. ``"always"``: that value
in both cases (RLinf's recipe, whose environments reset themselves).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeValues:
    """One episode, its ``T`` decisions in order.

    Attributes:
        rewards: float [T, chunk], 0 where not valid.
        valid: bool [T, chunk], steps that were taken.
        values: float [T, V]; ``V`` is 1 (one value per chunk) or ``chunk`` (one per step).
        final: float [V], value of what the episode left behind.
        terminated: Whether it reached its end.
    """

    rewards: torch.Tensor
    valid: torch.Tensor
    values: torch.Tensor
    final: torch.Tensor
    terminated: bool


def episode_gae(
    episode: EpisodeValues, gamma: float, lam: float, bootstrap: Bootstrap = "standard"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns ``[T, V]`` of one episode; both are 0 where no step was taken.

    With one value per chunk a decision is one step of the recursion and earns the sum of its rewards; with one value
    per step every step taken is one.

    Args:
        episode: The episode.
        gamma: Discount per decision, or per step.
        lam: GAE's lambda.
        bootstrap: See :data:`Bootstrap`.
    """
    per_step = episode.values.shape[1] > 1
    rewards = episode.rewards if per_step else episode.rewards.sum(dim=1, keepdim=True)
    valid = episode.valid if per_step else episode.valid.any(dim=1, keepdim=True)
    place = valid.flatten().nonzero().flatten().tolist()
    flat_rewards, flat_values = rewards.flatten(), episode.values.flatten()
    advantages = torch.zeros_like(flat_values)
    follows = bootstrap == "always" or not episode.terminated
    next_value = episode.final[0] if follows else torch.zeros_like(episode.final[0])
    running = torch.zeros_like(next_value)
    for index in reversed(place):
        delta = flat_rewards[index] + gamma * next_value - flat_values[index]
        running = delta + gamma * lam * running
        advantages[index], next_value = running, flat_values[index]
    returns = torch.where(valid.flatten(), advantages + flat_values, 0.0)
    return advantages.view_as(episode.values), returns.view_as(episode.values)


def normalise(advantages: Sequence[torch.Tensor], valid: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Shift and scale advantages to mean 0 and deviation 1 over the valid entries of all episodes (epsilon 1e-5).

    Args:
        advantages: Of each episode ``[T, V]``.
        valid: Of each episode bool ``[T, V]``.

    Raises:
        ConfigError: Nothing is valid.
    """
    taken = torch.cat([a[v] for a, v in zip(advantages, valid, strict=True)])
    if not taken.numel():
        raise ConfigError("no step of any episode is valid, so there is nothing to learn from")
    mean, deviation = taken.mean(), taken.std(unbiased=False)
    return [torch.where(v, (a - mean) / (deviation + 1e-5), 0.0) for a, v in zip(advantages, valid, strict=True)]


def over_tokens(per_value: torch.Tensor, chunk: int, dim: int) -> torch.Tensor:
    """Repeat ``[T, V]`` over the action tokens they judge: ``[T, chunk * dim]``."""
    repeats = dim if per_value.shape[1] == chunk else chunk * dim
    return per_value.repeat_interleave(repeats, dim=1)
