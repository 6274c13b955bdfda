"""The batched policy server's core: observations of many environments, joined into one forward.

Knows neither Ray nor veRL; a host (``rlinf_verl.rollout.host``) drives it. A batch is closed when it is full or when
its oldest request has waited for the latency bound. Requests of one forward may differ in prompt length, instruction
and seed; those that differ in sampling settings run in separate forwards.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import EngineStepError, NonFiniteLogitsError, RequestRejectedError, RlinfError
from rlinf_plugins.models.openvla.modeling import ActionOutput, OpenVLAForActionPrediction
from rlinf_plugins.models.openvla.processing import OpenVLAProcessor
from rlinf_plugins.models.openvla.prompts import pad_prompts
from rlinf_plugins.models.openvla.sampling import Sampling
from rlinf_verl.rollout.weights import ResidentWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRequest:
    """One observation that wants an action.

    Attributes:
        id: Id of the request.
        instruction: Task in words.
        images: Of each camera, uint8 ``[H, W, 3]``.
        proprio: float ``[D]``, raw, or None.
        sampling: How tokens are drawn.
        seed: Makes this request's draws its own; None draws from the engine's stream.
    """

    id: str
    instruction: str
    images: Sequence[np.ndarray]
    proprio: np.ndarray | None
    sampling: Sampling
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the policy chose for one observation; arrays are empty where ``error`` or ``finish`` says so.

    Attributes:
        request_id: Whose it is.
        finish: ``"acted"``, ``"aborted"`` or ``"failed"``.
        version: Version of the weights.
        prompt: Prompt ids.
        proprio: float32 ``[D]``, normalised as the policy saw it, or None.
        tokens: int64 ``[chunk, dim]``.
        log_probs: float32 ``[chunk, dim]``.
        values: float32 ``[V]``, or None without a value head.
        actions: float64 ``[chunk, dim]`` in the robot's units.
        error: Why it failed.
    """

    request_id: str
    finish: str
    version: int | None
    prompt: list[int] = field(default_factory=list)
    proprio: np.ndarray | None = None
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    values: np.ndarray | None = None
    actions: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    error: RlinfError | None = None


@dataclass(frozen=True, slots=True)
class _Prepared:
    request: PolicyRequest
    prompt: list[int]
    pixels: torch.Tensor
    proprio: torch.Tensor | None


class PolicyEngine:
    """Batches requests through one policy.

    Args:
        policy: The model, on its device.
        processor: Its image and text side.
        weights: Their state; requests are refused while they are not whole.
        max_batch: Observations in one forward.
        max_wait_s: Longest time the oldest request waits for company.
        seed: Seed of requests that bring none.
        clock: Source of time in seconds.
    """

    def __init__(
        self,
        policy: OpenVLAForActionPrediction,
        processor: OpenVLAProcessor,
        weights: ResidentWeights,
        *,
        max_batch: int,
        max_wait_s: float,
        seed: int = 0,
        clock: Clock = monotonic,
    ) -> None:
        self.weights = weights
        self._policy = policy.eval()
        self._processor = processor
        self._max_batch = max_batch
        self._max_wait = max_wait_s
        self._seeds = torch.Generator().manual_seed(seed)
        self._clock = clock
        self._waiting: deque[tuple[float, PolicyRequest]] = deque()
        self._device = policy.language_model.get_input_embeddings().weight.device

    @property
    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    @property
    def delay(self) -> float:
        """Seconds until the batch should run: 0 once it is full or its oldest request has waited long enough."""
        if not self._waiting or len(self._waiting) >= self._max_batch:
            return 0.0
        return max(0.0, self._waiting[0][0] + self._max_wait - self._clock())

    def submit(self, request: PolicyRequest) -> None:
        """Queue a request; may be called while another thread is in ``step``.

        Raises:
            WeightsNotLoadedError: There are no weights to serve it with.
        """
        self.weights.require()
        self._waiting.append((self._clock(), request))

    def abort(self, ids: Iterable[str] | None = None) -> list[Decision]:
        """Give requests back undecided (all, or those named)."""
        chosen = None if ids is None else set(ids)
        gone = [r for _, r in self._waiting if chosen is None or r.id in chosen]
        self._waiting = deque(entry for entry in self._waiting if entry[1] not in gone)
        return [self._undecided(request, "aborted") for request in gone]

    def step(self) -> list[Decision]:
        """Decide one batch; a request that cannot be served fails alone."""
        taken = [self._waiting.popleft()[1] for _ in range(min(self._max_batch, len(self._waiting)))]
        groups: dict[Sampling, list[_Prepared]] = {}
        done: list[Decision] = []
        for request in taken:
            try:
                groups.setdefault(request.sampling, []).append(self._prepare(request))
            except RlinfError as error:
                done.append(self._undecided(request, "failed", error))
            except Exception as cause:  # an observation nobody foresaw must not take its batch with it
                done.append(self._undecided(request, "failed", _failed("reading an observation", cause)))
        for sampling, group in groups.items():
            done += self._decide(group, sampling)
        return done

    def _prepare(self, request: PolicyRequest) -> _Prepared:
        proprio = None if request.proprio is None else np.asarray(request.proprio)[None]
        inputs = self._processor([request.instruction], [list(request.images)], proprio)
        prompt = inputs.input_ids[0].tolist()
        return _Prepared(request, prompt, inputs.pixel_values, inputs.proprio)

    def _decide(self, group: list[_Prepared], sampling: Sampling) -> list[Decision]:
        try:
            output = self._act(group, sampling)
        except Exception as cause:  # whatever the model raises is the reason these requests fail; others go on
            error = _failed(f"deciding on {len(group)} observations", cause)
            return [self._undecided(one.request, "failed", error) for one in group]
        actions = self._processor.actions(output.tokens)
        tokens, log_probs = output.tokens.cpu().numpy(), output.log_probs.float().cpu().numpy()
        values = None if output.values is None else output.values.float().cpu().numpy()
        return [
            self._decision(one, tokens[i], log_probs[i], None if values is None else values[i], actions[i])
            for i, one in enumerate(group)
        ]

    def _act(self, group: list[_Prepared], sampling: Sampling) -> ActionOutput:
        ids, mask = pad_prompts([one.prompt for one in group])
        states = [one.proprio for one in group if one.proprio is not None]
        return self._policy.act(
            ids.to(self._device),
            mask.to(self._device),
            sampling=sampling,
            generator=None if sampling.greedy else [self._generator(one.request) for one in group],
            pixel_values=torch.cat([one.pixels for one in group]).to(self._device),
            proprio=torch.cat(states).to(self._device) if states else None,
        )

    def _generator(self, request: PolicyRequest) -> torch.Generator:
        drawn = torch.randint(2**62, (), generator=self._seeds)
        return torch.Generator().manual_seed(int(drawn) if request.seed is None else request.seed)

    def _decision(
        self, one: _Prepared, tokens: np.ndarray, log_probs: np.ndarray, values: np.ndarray | None, actions: np.ndarray
    ) -> Decision:
        if not np.isfinite(log_probs).all() or (values is not None and not np.isfinite(values).all()):
            return self._undecided(one.request, "failed", _not_finite(one.request))
        return Decision(
            request_id=one.request.id,
            finish="acted",
            version=self.weights.version,
            prompt=one.prompt,
            proprio=None if one.proprio is None else one.proprio[0].numpy(),
            tokens=tokens,
            log_probs=log_probs,
            values=values,
            actions=actions,
        )

    def _undecided(self, request: PolicyRequest, finish: str, error: RlinfError | None = None) -> Decision:
        return Decision(request_id=request.id, finish=finish, version=self.weights.version, error=error)


def _failed(doing: str, cause: Exception) -> EngineStepError:
    error = EngineStepError(f"the policy failed while {doing}: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def _not_finite(request: PolicyRequest) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"request {request.id}: the policy's log-probs or values are not finite; look at the last optimizer step "
        "(gradient norm, learning rate) or at the rollout's dtype"
    )


def sampling_of(params: dict[str, Any]) -> Sampling:
    """Turn veRL's sampling parameters into the policy's; temperature 0 is greedy.

    Only ``temperature`` and ``top_k`` apply to action tokens. A ``top_p`` below 1 is refused: training would not
    know of it.
    """
    top_p = params.get("top_p") or 1.0
    if top_p != 1.0:
        raise RequestRejectedError(f"top_p={top_p}: action tokens are sampled with temperature and top_k only")
    temperature = params.get("temperature", 1.0)
    sampling = Sampling(
        temperature=float(temperature or 1.0), top_k=max(0, params.get("top_k") or 0), greedy=temperature == 0
    )
    sampling.validate("sampling")
    return sampling
