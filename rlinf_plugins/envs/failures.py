"""What went wrong with an environment, as data: a failed episode is a result, not an exception."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlinf_plugins.envs.board import Phase

FailureKind = Literal["crashed", "hung", "stalled", "raised", "invalid_action", "storm", "closed"]
"""``crashed``: the process ended; ``hung``: a deadline passed, or it was stopped; ``stalled``: a deadline passed while
all workers were in the same phase; ``raised``: the environment raised; ``invalid_action``: the policy's action was
refused; ``storm``: it failed again and again and was given up; ``closed``: the pool was closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why an episode failed.

    Attributes:
        kind: What sort of failure.
        slot: Which environment of the pool.
        phase: What the worker was doing.
        step: Steps of the episode that had been taken.
        reason: What happened, in words.
        signal: Name of the signal that ended the process, or empty.
        last_words: End of the worker's output, or the traceback.
        action: The chunk that was being executed, ``[steps][components]``; empty outside a step.
    """

    kind: FailureKind
    slot: int
    phase: str
    step: int
    reason: str
    signal: str = ""
    last_words: str = ""
    action: tuple[tuple[float, ...], ...] = ()

    def __str__(self) -> str:
        where = f"environment {self.slot} {self.kind} in {self.phase} at step {self.step}"
        if self.kind in ("raised", "crashed") or not self.last_words.strip():  # the reason has it
            return f"{where}: {self.reason}"
        return f"{where}: {self.reason}; last output: {self.last_words.strip()[-300:]}"


def diagnose(slot: int, seconds: float, phases: Sequence[Phase], waiting: Sequence[int]) -> tuple[FailureKind, str]:
    """Tell one hung worker from a stall of all of them.

    Args:
        slot: The worker whose deadline passed.
        seconds: The deadline.
        phases: What each worker of the pool is doing.
        waiting: The workers that have not answered for at least half of their deadline, ``slot`` among them.

    Returns:
        The kind of the failure and the reason in words.
    """
    phase = phases[slot]
    together = [other for other in waiting if phases[other] == phase]
    if len(together) < 2 or len(together) < len(waiting):
        return "hung", f"no answer within {seconds:g} s"
    advice = ""
    if phase in (Phase.FIRST_RENDER, Phase.FIRST_RESET, Phase.BUILD):
        advice = "; graphics drivers can deadlock when several processes start at once: set parallel_starts=1"
    return "stalled", (
        f"all {len(together)} waiting workers stopped in {phase.words} ({seconds:g} s without an answer), so the cause "
        f"is common to them, not this environment: a driver, a lock, or no CPU or memory left{advice}"
    )
