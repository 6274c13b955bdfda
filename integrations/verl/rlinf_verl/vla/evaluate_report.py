"""What an evaluation found: success rates with intervals, and apart from them the episodes that could not be judged."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One (task, initial state).

    Attributes:
        task: Index of the task.
        trial: Initial state.
        instruction: Task in words; empty where the episode never began.
        success: Whether the task was solved at any step; None where it could not be judged.
        length: Steps taken.
        ret: Sum of the rewards.
        failure: Why it could not be judged: the kind of the environment's failure, or the policy error's type.
        reason: The same in words.
    """

    task: int
    trial: int
    instruction: str = ""
    success: bool | None
    length: int = 0
    ret: float = 0.0
    failure: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Successes among the episodes that were judged.

    Attributes:
        successes: Solved.
        episodes: Judged.
        failures: Not judged, by kind.
        low: Lower end of the interval.
        high: Upper end.
    """

    successes: int
    episodes: int
    failures: dict[str, int]
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Share that was solved; NaN where nothing was judged."""
        return self.successes / self.episodes if self.episodes else float("nan")


def rate_of(verdicts: Sequence[Verdict], confidence: float = 0.95) -> Rate:
    """Count, with the Wilson score interval (Wilson, 1927): it stays honest at 0 and 1 and with few episodes.

    Args:
        verdicts: Of one task, or of all.
        confidence: Of the interval.
    """
    from scipy.stats import binomtest

    judged = [verdict.success for verdict in verdicts if verdict.success is not None]
    failures = Counter(verdict.failure for verdict in verdicts if verdict.success is None)
    low, high = 0.0, 1.0
    if judged:
        interval = binomtest(sum(judged), len(judged)).proportion_ci(confidence, method="wilson")
        low, high = float(interval.low), float(interval.high)
    return Rate(successes=sum(judged), episodes=len(judged), failures=dict(failures), low=low, high=high)


def by_task(verdicts: Sequence[Verdict]) -> dict[int, Rate]:
    """Return the rate of each task, in the tasks' order."""
    tasks = sorted({verdict.task for verdict in verdicts})
    return {task: rate_of([verdict for verdict in verdicts if verdict.task == task]) for task in tasks}


def table(verdicts: Sequence[Verdict], names: Sequence[str], title: str) -> Table:
    """Lay the rates out for a terminal.

    Args:
        verdicts: All of them.
        names: The tasks' names.
        title: Above the table.
    """
    grid = Table(title=title, title_justify="left")
    for column in ("task", "success", "95 % interval", "solved / judged", "not judged"):
        grid.add_column(column, justify="left" if column == "task" else "right", overflow="fold")
    for task, rate in by_task(verdicts).items():
        grid.add_row(names[task], *_cells(rate))
    grid.add_section()
    grid.add_row("all", *_cells(rate_of(verdicts)))
    return grid


def _cells(rate: Rate) -> list[str]:
    failures = ", ".join(f"{count} {kind}" for kind, count in sorted(rate.failures.items()))
    share = f"{rate.rate:.1%}" if rate.episodes else "-"
    return [share, f"{rate.low:.1%} - {rate.high:.1%}", f"{rate.successes} / {rate.episodes}", failures or "0"]


def write_json(path: Path, verdicts: Sequence[Verdict], names: Sequence[str], about: dict[str, Any]) -> None:
    """Write rates and every verdict.

    Args:
        path: The file.
        verdicts: All of them.
        names: The tasks' names.
        about: What was evaluated, e.g. checkpoint and suite.
    """
    tasks = {names[task]: asdict(rate) for task, rate in by_task(verdicts).items()}
    content = {**about, "all": asdict(rate_of(verdicts)), "tasks": tasks, "episodes": [asdict(v) for v in verdicts]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
