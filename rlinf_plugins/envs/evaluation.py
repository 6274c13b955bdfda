"""Evaluation counts each (task, initial state) once, however many episodes started there."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_plugins.envs.initial_states import repeats
from rlinf_plugins.envs.play import Policy, Sending, play
from rlinf_plugins.envs.protocol import InitialState
from rlinf_plugins.envs.results import EpisodeRecord


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Episodes and what they say of a policy.

    Attributes:
        records: One per episode, in the order in which they were asked for.
        initial: Where each was to start.
    """

    records: Sequence[EpisodeRecord]
    initial: Sequence[InitialState]

    @property
    def repeated(self) -> int:
        """Episodes that start where an earlier one did; they do not weigh more."""
        return repeats(self.initial)

    @property
    def failed(self) -> list[EpisodeRecord]:
        """Episodes an environment failed; they say nothing of the policy and count neither way."""
        return [record for record in self.records if record.failure is not None]

    @property
    def judged(self) -> int:
        """(Task, initial state) pairs of which at least one episode was played to its end."""
        return len(self._judged())

    def rate(self, task: int | None = None, *, at_end: bool = False) -> float:
        """Return the share of initial states from which the task is solved, each counted once; NaN if none was judged.

        Args:
            task: Of this task only.
            at_end: Solved at the last step, instead of at any.
        """
        pairs = {pair: records for pair, records in self._judged().items() if task in (None, pair.task)}
        name = "success_at_end" if at_end else "success_once"
        shares = [sum(getattr(record, name) for record in records) / len(records) for records in pairs.values()]
        return sum(shares) / len(shares) if shares else float("nan")

    def _judged(self) -> dict[InitialState, list[EpisodeRecord]]:
        pairs: dict[InitialState, list[EpisodeRecord]] = {}
        for record in self.records:
            if record.failure is None:
                pairs.setdefault(record.initial, []).append(record)
        return pairs

    def __str__(self) -> str:
        pairs = len(set(self.initial))
        said = f"success {self.rate():.1%} of {self.judged} of {pairs} initial states in {len(self.records)} episodes"
        said += f", {self.repeated} of them repeated" if self.repeated else ""
        return said + (f", {len(self.failed)} failed by their environment" if self.failed else "")


def evaluate(pool: Sending, policy: Policy, initial: Sequence[InitialState], *, stages: int = 2) -> Evaluation:
    """Play an episode from each of ``initial`` and count.

    Args:
        pool: The environments.
        policy: The policy.
        initial: Where they start, e.g. ``all_pairs(pool.spec)``; one that is named twice is played twice, counts
            once, and is warned about.
        stages: As in :func:`rlinf_plugins.envs.play.play`.

    Raises:
        RestartStormError: No environment is left.
    """
    again = repeats(initial)
    if again:
        warnings.warn(
            f"{len(initial)} episodes have {len(initial) - again} initial states: {again} start where another did; "
            "each initial state counts once",
            stacklevel=2,
        )
    played: dict[InitialState, list[EpisodeRecord]] = {}
    for record in play(pool, policy, initial, stages=stages):
        played.setdefault(record.initial, []).append(record)
    for records in played.values():
        records.sort(key=lambda record: record.number, reverse=True)
    return Evaluation(records=[played[start].pop() for start in initial], initial=tuple(initial))
