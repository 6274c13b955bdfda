"""Per-request sampling parameters and the sampler of a batch of unlike requests.

The log-prob of a sampled token is taken, as in veRL's ``rollout.logprobs_mode``, either under the distribution the
token was drawn from (``processed_logprobs``: after repetition penalty, temperature, top-k, top-p and min-p,
renormalised) or under the model's own (``raw_logprobs``). A greedy request has no temperature, so its processed
log-prob is the model's own, after the repetition penalty.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf_plugins.core.config import suggest
from rlinf_plugins.core.errors import RequestRejectedError

LOGPROB_MODES = ("processed_logprobs", "raw_logprobs")
_ALIASES = {"max_new_tokens": "max_tokens"}
_IGNORED = frozenset({"logprobs", "n", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_tokens: Most tokens to generate.
        min_tokens: End-of-sequence and stop tokens are impossible before this many tokens.
        temperature: 0 is greedy.
        top_k: Number of likeliest tokens kept; 0 or -1 keeps all.
        top_p: Smallest set of likeliest tokens whose probability reaches this is kept.
        min_p: Tokens less likely than this share of the likeliest are dropped.
        repetition_penalty: Logits of tokens in the prompt or output are divided (positive) or multiplied (negative).
        stop_token_ids: Generation ends after any of these, besides the model's end-of-sequence ids.
        stop: Generation ends once the decoded output contains any of these strings.
        ignore_eos: The model's end-of-sequence ids do not end the generation.
        seed: Makes this request's draws its own, whatever else is in the batch.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None

    @classmethod
    def from_request(cls, values: Mapping[str, Any], *, max_tokens: int) -> "SamplingParams":
        """Read what a veRL agent loop sends (vLLM's names; ``max_new_tokens`` is understood too).

        Args:
            values: Sampling parameters of the request; ``None`` values mean "not given".
            max_tokens: Limit for a request that names none.

        Raises:
            RequestRejectedError: An unknown name, or a value that is out of range.
        """
        known: dict[str, Any] = {"max_tokens": max_tokens}
        for name, value in values.items():
            name = _ALIASES.get(name, name)
            if name in _IGNORED or value is None:
                continue
            if name not in cls.__dataclass_fields__:
                hint = suggest(name, cls.__dataclass_fields__)
                raise RequestRejectedError(f"unknown sampling parameter {name!r}; {hint}")
            known[name] = value
        if values.get("n") not in (None, 1):
            raise RequestRejectedError(f"n={values['n']}: one request gives one sequence; send the request n times")
        known["stop_token_ids"] = frozenset(known.get("stop_token_ids", ()))
        stop = known.get("stop", ())
        known["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        params = cls(**known)
        params._check()
        return params

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return self.temperature == 0

    def _check(self) -> None:
        for name, good, rule in (
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens={self.max_tokens}"),
            ("temperature", 0 <= self.temperature < float("inf"), ">= 0 and finite"),
            ("top_k", self.top_k >= -1, ">= 1, or 0 or -1 for all"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "> 0 and finite"),
        ):
            if not good:
                raise RequestRejectedError(f"sampling parameter {name}={getattr(self, name)!r} must be {rule}")


@dataclass(frozen=True, slots=True)
class Draw:
    """One sampled token for each row: ``tokens`` [B] int64, ``log_probs`` [B] float32, ``finite`` [B] bool."""

    tokens: torch.Tensor
    log_probs: torch.Tensor
    finite: torch.Tensor


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    rngs: Sequence[random.Random],
    *,
    seen: Sequence[Sequence[int]],
    banned: Sequence[Sequence[int]],
    raw_log_probs: bool,
) -> Draw:
    """Sample one token a row.

    Each row draws from its own ``random.Random`` by inverting the cumulative distribution, so a seeded request does
    not depend on its neighbours in the batch.

    Args:
        logits: [B, V], any float type.
        params: B sampling parameters.
        rngs: B generators; a greedy row leaves its own untouched.
        seen: B lists of token ids (prompt and output) for the repetition penalty.
        banned: B lists of token ids that must not be drawn now (``min_tokens``).
        raw_log_probs: Take log-probs under the model's own distribution.

    Returns:
        The draw; a row whose logits hold NaN or no finite value has ``finite`` False, and its token is meaningless.
    """
    raw = logits.float()
    finite = ~raw.isnan().any(-1) & ~(raw == float("inf")).any(-1) & (raw > float("-inf")).any(-1)
    raw = torch.where(finite[:, None], raw, torch.zeros_like(raw))
    scores = _restrict(_temper(_penalise(raw, params, seen, banned), params), params)
    log_p = torch.log_softmax(scores, dim=-1)
    tokens = _invert(log_p, params, rngs)
    chosen = torch.log_softmax(raw, dim=-1) if raw_log_probs else log_p
    return Draw(tokens, chosen.gather(-1, tokens[:, None])[:, 0], finite)


def _penalise(
    scores: torch.Tensor,
    params: Sequence[SamplingParams],
    seen: Sequence[Sequence[int]],
    banned: Sequence[Sequence[int]],
) -> torch.Tensor:
    rows = [i for i, p in enumerate(params) if p.repetition_penalty != 1.0]
    if not rows and not any(banned):
        return scores
    scores = scores.clone()
    for i in rows:
        ids = torch.tensor(sorted(set(seen[i])), device=scores.device)
        old, penalty = scores[i, ids], params[i].repetition_penalty
        scores[i, ids] = torch.where(old > 0, old / penalty, old * penalty)
    for i, never in enumerate(banned):
        if never:
            scores[i, list(never)] = float("-inf")
    return scores


def _temper(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    if all(t == 1.0 for t in temperatures):
        return scores
    return scores / torch.tensor(temperatures, device=scores.device)[:, None]


def _restrict(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Drop what top-k, top-p and min-p exclude; equal scores at the border of top-k are all kept."""
    rows = [i for i, p in enumerate(params) if not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)]
    if not rows:
        return scores
    vocab = scores.shape[-1]
    part, some = scores[rows], [params[i] for i in rows]
    ordered, order = part.sort(dim=-1, descending=True)
    k = torch.tensor([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in some], device=scores.device)
    floor = ordered.gather(-1, (k - 1)[:, None])
    ordered = ordered.masked_fill(ordered < floor, float("-inf"))
    p = ordered.softmax(dim=-1)
    top_p = torch.tensor([s.top_p for s in some], device=scores.device)[:, None]
    min_p = torch.tensor([s.min_p for s in some], device=scores.device)[:, None]
    before = p.cumsum(dim=-1) - p  # the token that crosses top_p is kept, so the likeliest always is
    drop = ((before >= top_p) & (top_p < 1)) | (p < min_p * p[:, :1])
    ordered = ordered.masked_fill(drop, float("-inf"))
    scores = scores.clone()
    scores[rows] = torch.empty_like(part).scatter_(-1, order, ordered)
    return scores


def _invert(log_p: torch.Tensor, params: Sequence[SamplingParams], rngs: Sequence[random.Random]) -> torch.Tensor:
    tokens = log_p.argmax(dim=-1)
    rows = [i for i, p in enumerate(params) if not p.greedy]
    if not rows:
        return tokens
    cdf = log_p[rows].double().exp().cumsum(dim=-1)
    u = torch.tensor([rngs[i].random() for i in rows], dtype=torch.float64, device=log_p.device)
    drawn = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True)[:, 0]
    tokens[rows] = drawn
    return tokens
