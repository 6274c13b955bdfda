"""An engine that plays back scripted turns, for testing agent loops without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PlayedOutput:
    """The part of veRL's ``TokenOutput`` that a loop reads."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = "completed"
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class PlayedEngine:
    """Plays scripted turns token by token and honours the stop parameters it is given.

    Every token gets a log-prob of its own, so that a shift by one shows.

    Args:
        tokenizer: Decodes for stop strings.
        turns: Token ids of each turn, in order; empty turns after the last.
        log_probs: Whether log-probs are reported.

    Attributes:
        prompts: The prompt of each request.
        produced: Every token handed out, with its log-prob.
    """

    def __init__(self, tokenizer: Any, turns: Sequence[Sequence[int]], *, log_probs: bool = True) -> None:
        self._tokenizer = tokenizer
        self._turns = [list(turn) for turn in turns]
        self._log_probs = log_probs
        self._rest: list[int] = []
        self.prompts: list[list[int]] = []
        self.produced: list[tuple[int, float]] = []

    async def __call__(self, prompt_ids: Sequence[int], params: dict[str, Any]) -> PlayedOutput:
        """Continue the turn under way, or begin the next."""
        self.prompts.append(list(prompt_ids))
        if not self._rest:
            self._rest = self._turns.pop(0) if self._turns else []
        out = self._until_stop(params)
        if "stop_token_ids" not in params:  # only an engine that stops on ids is asked to go on
            self._rest = []
        first = len(self.produced) + 1
        probs = [-float(first + place) for place in range(len(out))]
        self.produced.extend(zip(out, probs, strict=True))
        return PlayedOutput(out, probs if self._log_probs else None)

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: dict[str, Any], **_: Any
    ) -> PlayedOutput:
        """Answer as veRL's server manager does."""
        return await self(prompt_ids, sampling_params)

    def _until_stop(self, params: dict[str, Any]) -> list[int]:
        out: list[int] = []
        while self._rest and len(out) < params["max_tokens"]:
            out.append(self._rest.pop(0))
            if out[-1] in params.get("stop_token_ids", ()):
                break
            if any(stop in self._tokenizer.decode(out) for stop in params.get("stop", ())):
                break
        return out
