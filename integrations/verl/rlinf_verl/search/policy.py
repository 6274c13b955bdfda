"""One Search-R1 trajectory, without veRL: the engine and the pool come in as functions.

Sampled tokens are kept as they were sampled, with their log-probs; a turn is cut between tokens; observations are
encoded on their own and masked.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import Any, Protocol

from rlinf_plugins.tools.results import Failure, Outcome, Passages, Query
from rlinf_verl.search.actions import INVALID_ACTION, Action, ActionKind, documents
from rlinf_verl.search.config import SearchR1Config
from rlinf_verl.search.tokens import TokenText
from rlinf_verl.search.trajectory import Trajectory


class Sampled(Protocol):
    """What an engine returns for one request; veRL's ``TokenOutput`` is one."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None


Sampler = Callable[[list[int], dict[str, Any]], Awaitable[Any]]
"""(prompt ids, sampling parameters) -> :class:`Sampled`."""
Searcher = Callable[[Query], Awaitable[Outcome[Passages]]]


class End(StrEnum):
    """Why a trajectory ended."""

    ANSWER = "answer"
    NO_ANSWER = "no_answer"
    """The last turn, which could not search, gave no answer."""
    BUDGET = "budget"
    """No room was left in the response."""
    TOOL_FAILED = "tool_failed"
    ABORTED = "aborted"
    """The engine stopped serving in the middle of a turn."""


@dataclass(kw_only=True, slots=True)
class Report:
    """What happened, for metrics.

    Attributes:
        end: Why it ended.
        turns: Turns sampled.
        searches: Searches that returned passages (or none) as they should.
        invalid_actions: Turns without a valid action.
        cut_observations: Observations that had to be shortened.
        failure: The failure that ended it, if one did.
        generate_s: Seconds spent waiting for the engine.
        search_s: Seconds spent waiting for the pool.
        actions: The actions in order, as (kind, text).
    """

    end: End = End.NO_ANSWER
    turns: int = 0
    searches: int = 0
    invalid_actions: int = 0
    cut_observations: int = 0
    failure: Failure | None = None
    generate_s: float = 0.0
    search_s: float = 0.0
    actions: list[tuple[str, str]] = field(default_factory=list)


class SearchPolicy:
    """Runs trajectories.

    Args:
        config: Turns, budgets, what counts as an action.
        text: The tokenizer.
        response_length: Tokens a response may have, observations included.
        stop: Sampling parameters that end a turn at an action.
        goes_on: Tokens at which the engine stops although no action may be complete; it is then asked to go on.
    """

    def __init__(
        self,
        config: SearchR1Config,
        text: TokenText,
        *,
        response_length: int,
        stop: dict[str, Any],
        goes_on: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._text = text
        self._length = response_length
        self._stop = stop
        self._goes_on = frozenset(goes_on)
        self._invalid = text.encode(INVALID_ACTION)

    async def run(self, prompt: list[int], sample: Sampler, search: Searcher) -> tuple[Trajectory, Report]:
        """Run one trajectory from ``prompt`` to its end; a failed search ends it, it does not raise."""
        trajectory, report = Trajectory(prompt=list(prompt)), Report()
        for turn in range(self._config.max_turns + 1):
            action, aborted = await self._turn(trajectory, report, sample)
            if action is not None:
                report.actions.append((action.kind.value, action.text))
            if action is not None and action.kind is ActionKind.ANSWER:
                report.end = End.ANSWER
                break
            if aborted:
                report.end = End.ABORTED
                break
            if self._room(trajectory) <= 0:
                report.end = End.BUDGET
                break
            if turn == self._config.max_turns:
                report.end = End.NO_ANSWER
                break
            ended = await self._respond(trajectory, report, action, search)
            if ended is not None:
                report.end = ended
                break
        return trajectory, report

    async def _turn(self, trajectory: Trajectory, report: Report, sample: Sampler) -> tuple[Action | None, bool]:
        """Sample one turn up to its action; returns the action and whether the engine gave up."""
        report.turns += 1
        ids: list[int] = []
        log_probs: list[float] | None = None
        limit = min(self._config.turn_tokens, self._room(trajectory))
        aborted = False
        while len(ids) < limit:
            params = {**self._stop, "max_tokens": limit - len(ids)}
            start = perf_counter()
            output: Sampled = await sample(trajectory.ids + ids, params)
            report.generate_s += perf_counter() - start
            ids.extend(output.token_ids)
            if output.log_probs:
                log_probs = (log_probs or []) + list(output.log_probs)
            aborted = output.stop_reason == "aborted"
            if aborted or not output.token_ids or ids[-1] not in self._goes_on:
                break
            if self._text.cut(ids, self._config.match)[1] is not None:
                break
        keep, action = self._text.cut(ids, self._config.match)
        trajectory.sampled(ids[:keep], None if log_probs is None else log_probs[:keep])
        return action, aborted or not ids

    async def _respond(
        self, trajectory: Trajectory, report: Report, action: Action | None, search: Searcher
    ) -> End | None:
        """Append what follows a turn without an answer; returns the reason where the trajectory must end here."""
        if action is None or not action.text:  # an empty query cannot be searched: the policy's mistake, not the tool's
            return self._object(trajectory, report)
        start = perf_counter()
        outcome = await search(Query(action.text, self._config.topk))
        report.search_s += perf_counter() - start
        if isinstance(outcome, Failure):
            if outcome.kind == "invalid_request":
                return self._object(trajectory, report)
            report.failure = outcome
            return End.TOOL_FAILED
        room = min(self._config.observation_tokens, self._room(trajectory) - self._config.answer_tokens)
        ids, was_cut = self._text.observation(documents(outcome.value), room)
        if not ids:
            return End.BUDGET
        report.searches += 1
        report.cut_observations += was_cut
        trajectory.observed(ids)
        return None

    def _object(self, trajectory: Trajectory, report: Report) -> End | None:
        report.invalid_actions += 1
        if len(self._invalid) + self._config.answer_tokens > self._room(trajectory):
            return End.BUDGET
        trajectory.observed(self._invalid)
        return None

    def _room(self, trajectory: Trajectory) -> int:
        return self._length - len(trajectory.response)
