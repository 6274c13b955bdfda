"""From logits to action tokens and log-probabilities: one path for rollout and training.

The order is fixed: restrict to the action vocabulary, divide by the temperature, keep the ``top_k`` likeliest. Rollout
and training build the same :class:`ActionDistribution` from the same :class:`Sampling`, so their log-probabilities
agree whatever the settings. A token that training is asked about always belongs to the support, even where the policy
has moved and would no longer rank it among the ``top_k``: its log-probability stays finite.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlinf_plugins.core.errors import ConfigError

Generators = torch.Generator | Sequence[torch.Generator]
"""One generator for the batch, or one per row: then a row's tokens do not depend on its companions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How action tokens are drawn; the same value must be used in rollout and training.

    Attributes:
        temperature: Divides the logits, in greedy decoding too (it does not move the arg max, but the
            log-probabilities stay comparable with training).
        top_k: Keep this many tokens; 0 or -1 keeps all.
        greedy: Take the likeliest token instead of drawing one.
        vocabulary: ``"action"`` restricts to the action tokens. ``"full"`` takes all rows of the output layer, as the
            original evaluation script of OpenVLA does; its tokens may lie outside the action range.
    """

    temperature: float = 1.0
    top_k: int = 0
    greedy: bool = False
    vocabulary: Literal["action", "full"] = "action"

    def validate(self, where: str) -> None:
        """Reject impossible settings.

        Raises:
            ConfigError: A temperature that is not positive, or ``top_k`` below -1.
        """
        if not self.temperature > 0:
            raise ConfigError(f"{where}.temperature must be positive, got {self.temperature}; use greedy=true for 0")
        if self.top_k < -1:
            raise ConfigError(f"{where}.top_k must be positive, or 0 or -1 to keep all tokens; got {self.top_k}")


class ActionDistribution:
    """A categorical distribution over token ids at each of ``N`` positions.

    Args:
        logits: ``[B, N, V]`` over consecutive token ids; computed in float32 from here on.
        first_token: Token id of the first logit.
        sampling: Temperature and top-k.
    """

    def __init__(self, logits: torch.Tensor, first_token: int, sampling: Sampling) -> None:
        self._scaled = logits.float() / sampling.temperature
        self._first = first_token
        self._sampling = sampling

    def choose(self, generator: Generators | None) -> torch.Tensor:
        """Return token ids ``[B, N]``: the likeliest, or drawn with ``generator``.

        Raises:
            ConfigError: Sampling without a generator.
        """
        if self._sampling.greedy:
            return self._scaled.argmax(dim=-1) + self._first
        if generator is None:
            raise ConfigError("sampling needs an explicit torch.Generator; pass generator=, or Sampling(greedy=True)")
        mass = self._supported(None).softmax(dim=-1).double().cumsum(dim=-1)
        uniform = _uniform(mass.shape[:-1], generator, mass.device)
        index = (mass <= uniform.unsqueeze(-1) * mass[..., -1:]).sum(dim=-1)
        return index.clamp(max=mass.shape[-1] - 1) + self._first

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[B, N]`` log-probabilities of token ids ``[B, N]``."""
        index = (tokens - self._first).unsqueeze(-1)
        return self._supported(index).log_softmax(dim=-1).gather(-1, index).squeeze(-1)

    def log_prob_and_entropy(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[B, N]`` log-probabilities of ``tokens`` and the entropies over the same support, in nats."""
        index = (tokens - self._first).unsqueeze(-1)
        support = self._supported(index)
        log_probs = support.log_softmax(dim=-1)
        # 0 * -inf is undefined both ways through; outside the support the contribution is 0.
        finite = log_probs.masked_fill(support == -torch.inf, 0.0)
        return log_probs.gather(-1, index).squeeze(-1), -(finite.exp() * finite).masked_fill(
            support == -torch.inf, 0.0
        ).sum(dim=-1)

    def _supported(self, chosen: torch.Tensor | None) -> torch.Tensor:
        """Scaled logits, -inf outside the top-k; ``chosen`` indices ``[B, N, 1]`` always stay."""
        top_k = self._sampling.top_k
        if top_k <= 0 or top_k >= self._scaled.shape[-1]:
            return self._scaled
        keep = self._scaled >= self._scaled.topk(top_k, dim=-1).values[..., -1:]
        if chosen is not None:
            keep = keep.scatter(-1, chosen, True)
        return self._scaled.masked_fill(~keep, -torch.inf)


def reduce_log_probs(log_probs: torch.Tensor, level: Literal["token", "action", "chunk"]) -> torch.Tensor:
    """Sum log-probabilities (or entropies) to the level at which the policy loss works.

    Args:
        log_probs: ``[B, chunk, dim]``.
        level: ``"token"`` leaves them; ``"action"`` gives ``[B, chunk]``; ``"chunk"`` gives ``[B]``.
    """
    if level == "token":
        return log_probs
    return log_probs.sum(dim=-1) if level == "action" else log_probs.sum(dim=(-2, -1))


def _uniform(shape: torch.Size, generator: Generators, device: torch.device) -> torch.Tensor:
    if isinstance(generator, torch.Generator):
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return drawn.to(device)
    if len(generator) != shape[0]:
        raise ConfigError(f"one torch.Generator per row is needed: {shape[0]} rows, {len(generator)} generators")
    rows = [torch.rand(shape[1:], generator=one, dtype=torch.float64, device=one.device) for one in generator]
    return torch.stack([row.to(device) for row in rows])
