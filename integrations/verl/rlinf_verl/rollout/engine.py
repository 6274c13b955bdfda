"""The in-process engine: a Hugging Face causal LM, many unlike requests, one token a step.

Knows neither Ray nor veRL nor time. One thread calls ``step`` until ``busy`` is false; requests join and leave
between steps (continuous batching), so a short answer does not wait for a long one.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from rlinf_plugins.core.errors import EngineStepError, NonFiniteLogitsError, RequestRejectedError, RlinfError
from rlinf_verl.rollout.batch import KVBatch
from rlinf_verl.rollout.sampling import SamplingParams, sample
from rlinf_verl.rollout.weights import ResidentWeights

_TAIL = 8
"""Tokens decoded beyond the length of a stop string, for tokens that decode to less than a character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What the engine may hold at once and how it ends a generation.

    Attributes:
        max_rows: Most sequences in the batch.
        max_prefill_tokens: Most (padded) prompt tokens in one forward; a longer prompt runs alone.
        max_length: Most tokens of prompt and output together.
        eos_ids: Ids that end a generation unless the request ignores them.
        raw_log_probs: Log-probs of the model's own distribution, not of the one sampled from.
        seed: Seed of requests that bring none.
    """

    max_rows: int
    max_prefill_tokens: int
    max_length: int
    eos_ids: frozenset[int]
    raw_log_probs: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to continue: its id, prompt tokens and sampling parameters."""

    id: str
    prompt: Sequence[int]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The end of a request.

    Attributes:
        request_id: Whose it is.
        token_ids: Generated tokens, with the stop token if there is one.
        log_probs: Log-prob of each.
        finish: ``"stop"`` (end-of-sequence, stop id or stop string), ``"length"``, ``"aborted"`` or ``"failed"``.
        version: Version of the weights.
        error: Why it failed.
    """

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish: str
    version: int | None
    error: RlinfError | None = None


@dataclass(slots=True)
class _Row:
    request: Request
    rng: random.Random
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class HFEngine:
    """Continuous batching over a causal LM's forward.

    Args:
        model: Returns ``logits`` and takes ``past_key_values`` and ``logits_to_keep``, as causal LMs in transformers.
        limits: Bounds and defaults.
        weights: Their state; generation is refused while they are not whole.
        decode: Tokens -> text, for requests with stop strings; None refuses such requests.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        limits: EngineLimits,
        weights: ResidentWeights,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.weights = weights
        self._model = model.eval()
        self._limits = limits
        self._decode = decode
        embeddings: torch.nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
        self._vocab = embeddings.num_embeddings
        self._device = embeddings.weight.device
        self._batch = KVBatch(self._forward, self._device)
        self._rows: list[_Row] = []
        self._waiting: deque[Request] = deque()
        self._seeds = random.Random(limits.seed)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._rows)

    @property
    def delay(self) -> float:
        """Seconds the next step should wait for company: none, rows may join at every step."""
        return 0.0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache now."""
        return self._batch.nbytes

    def submit(self, request: Request) -> None:
        """Queue a request; may be called while another thread is in ``step``.

        Raises:
            RequestRejectedError: The request can never be served.
            WeightsNotLoadedError: There are no weights to serve it with.
        """
        self._check(request)
        self.weights.require()
        self._waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Generation]:
        """Advance every running request by one token, let waiting ones join, and return those that ended."""
        done = self._advance() if self._rows else []
        group = self._next_group()
        return done + self._admit(group) if group else done

    def abort(self, ids: Iterable[str] | None = None) -> list[Generation]:
        """End requests now (all, or those named) and return what they have so far."""
        chosen = None if ids is None else set(ids)
        ended = [r for r in self._waiting if chosen is None or r.id in chosen]
        self._waiting = deque(r for r in self._waiting if r not in ended)
        done = [self._end(_Row(request, random.Random()), "aborted") for request in ended]
        gone = [i for i, row in enumerate(self._rows) if chosen is None or row.request.id in chosen]
        done += [self._end(self._rows[i], "aborted") for i in gone]
        self._leave(set(gone))
        return done

    def _forward(self, **inputs: object) -> torch.Tensor:
        logits: torch.Tensor = self._model(**inputs, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def _check(self, request: Request) -> None:
        length, limit = len(request.prompt), self._limits.max_length
        if not length:
            raise RequestRejectedError(f"request {request.id}: the prompt is empty")
        if length >= limit:
            raise RequestRejectedError(
                f"request {request.id}: a prompt of {length} tokens leaves no room to generate within {limit} "
                "(rollout.max_model_len, or the model's own limit)"
            )
        bad = [token for token in request.prompt if not 0 <= token < self._vocab]
        if bad:
            raise RequestRejectedError(
                f"request {request.id}: token id {bad[0]} is outside the model's vocabulary of {self._vocab}"
            )
        if request.params.stop and self._decode is None:
            raise RequestRejectedError(f"request {request.id}: stop strings need a tokenizer, and there is none")

    def _next_group(self) -> list[Request]:
        """Oldest waiting requests that fit in the batch and in one forward."""
        group: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        while self._waiting and len(self._rows) + len(group) < self._limits.max_rows:
            wider = prompts | {tuple(self._waiting[0].prompt)}
            if group and len(wider) * max(map(len, wider)) > self._limits.max_prefill_tokens:
                break
            prompts = wider
            group.append(self._waiting.popleft())
        return group

    def _admit(self, group: list[Request]) -> list[Generation]:
        rows = [_Row(request, self._rng(request)) for request in group]
        try:
            logits = self._batch.join([request.prompt for request in group])
        except Exception as error:  # whatever the model raises is the reason these requests end; others go on
            return [self._end(row, "failed", _step_error("reading the prompt", error)) for row in rows]
        self._rows += rows
        return self._sample(logits, first=len(self._rows) - len(rows))

    def _advance(self) -> list[Generation]:
        newest = torch.tensor([row.tokens[-1] for row in self._rows], device=self._device)
        try:
            logits = self._batch.step(newest)
        except Exception as error:  # the cache is half written, so every running request ends here
            done = [self._end(row, "failed", _step_error("generating", error)) for row in self._rows]
            self._leave(set(range(len(self._rows))))
            return done
        return self._sample(logits, first=0)

    def _sample(self, logits: torch.Tensor, first: int) -> list[Generation]:
        """Give rows from ``first`` on their next token; rows that end leave."""
        rows = self._rows[first:]
        params = [row.request.params for row in rows]
        draw = sample(
            logits,
            params,
            [row.rng for row in rows],
            seen=[[*r.request.prompt, *r.tokens] if r.request.params.repetition_penalty != 1 else () for r in rows],
            banned=[self._banned(row) for row in rows],
            raw_log_probs=self._limits.raw_log_probs,
        )
        done, gone = [], set()
        columns = zip(rows, draw.tokens.tolist(), draw.log_probs.tolist(), draw.finite.tolist(), strict=True)
        for i, (row, token, log_prob, finite) in enumerate(columns, start=first):
            finish, error = self._append(row, token, log_prob) if finite else ("failed", _not_finite(row))
            if finish:
                gone.add(i)
                done.append(self._end(row, finish, error))
        self._leave(gone)
        return done

    def _append(self, row: _Row, token: int, log_prob: float) -> tuple[str, None]:
        row.tokens.append(token)
        row.log_probs.append(log_prob)
        params, count = row.request.params, len(row.tokens)
        if token in self._stop_ids(params) or (params.stop and self._stop_string(row)):
            return "stop", None
        full = count >= params.max_tokens or len(row.request.prompt) + count >= self._limits.max_length
        return ("length" if full else ""), None

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self._limits.eos_ids

    def _banned(self, row: _Row) -> Sequence[int]:
        params = row.request.params
        return tuple(self._stop_ids(params)) if len(row.tokens) < params.min_tokens else ()

    def _stop_string(self, row: _Row) -> bool:
        stop = row.request.params.stop
        tail = row.tokens[-(max(map(len, stop)) + _TAIL) :]
        text = self._decode(tail) if self._decode else ""
        return len(row.tokens) >= row.request.params.min_tokens and any(s in text for s in stop)

    def _rng(self, request: Request) -> random.Random:
        seed = request.params.seed
        return random.Random(self._seeds.getrandbits(64) if seed is None else seed)

    def _leave(self, gone: set[int]) -> None:
        if gone:
            stay = [i for i in range(len(self._rows)) if i not in gone]
            self._rows = [self._rows[i] for i in stay]
            self._batch.keep(stay)

    def _end(self, row: _Row, finish: str, error: RlinfError | None = None) -> Generation:
        return Generation(
            request_id=row.request.id,
            token_ids=row.tokens,
            log_probs=row.log_probs,
            finish=finish,
            version=self.weights.version,
            error=error,
        )


def _step_error(doing: str, cause: Exception) -> EngineStepError:
    error = EngineStepError(f"the model failed while {doing}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _not_finite(row: _Row) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"request {row.request.id}: the model's logits after {len(row.tokens)} tokens are not finite; look at the "
        "last optimizer step (gradient norm, learning rate) or at the rollout's dtype"
    )
