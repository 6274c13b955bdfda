"""What the pool gives back: one environment's step, a batch of them, and the record of an episode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.protocol import InitialState

Ending: TypeAlias = Literal["finished", "failed", "abandoned"]
"""``finished``: it terminated or was truncated; ``failed``: see its failure; ``abandoned``: it was reset, restored over
or closed by the caller before its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeRecord:
    """One episode; every episode that began has exactly one.

    Attributes:
        number: Running number within the pool, in the order of their beginning.
        slot: Environment that ran it.
        initial: Where it started.
        task: Its instruction.
        ending: How it ended.
        length: Steps taken.
        ret: Sum of the rewards given.
        success_once: Whether the task was solved at any step.
        success_at_end: Whether it was solved at the last step.
        terminated: Whether its end was reached.
        truncated: Whether it was cut off.
        failure: What went wrong, if it failed.
    """

    number: int
    slot: int
    initial: InitialState
    task: str
    ending: Ending
    length: int
    ret: float
    success_once: bool
    success_at_end: bool
    terminated: bool
    truncated: bool
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One environment after a reset, a chunk or a restore.

    Attributes:
        slot: Which environment.
        observation: Its arrays by name; empty if it failed before its first observation.
        task_description: Its instruction.
        rewards: float32 ``[steps]``; empty after a reset.
        terminated: bool ``[steps]``.
        truncated: bool ``[steps]``.
        valid: bool ``[steps]``: the step was taken and belongs to the episode.
        metrics: float32 ``[steps]`` by name.
        done: The episode is over (it failed, or terminated or was truncated).
        failure: What went wrong, if it failed; the next reset clears it.
    """

    slot: int
    observation: dict[str, np.ndarray]
    task_description: str
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    metrics: dict[str, np.ndarray]
    done: bool
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Several environments after a reset or a chunk; row ``i`` of everything belongs to ``slots[i]``.

    Attributes:
        slots: Which environments.
        observation: Stacked arrays by name, ``[rows, ...]``; rows of a failed environment are what it last drew.
        task_descriptions: Their instructions.
        rewards: float32 ``[rows, steps]``; no steps after a reset.
        terminated: bool ``[rows, steps]``.
        truncated: bool ``[rows, steps]``.
        valid: bool ``[rows, steps]``.
        metrics: float32 ``[rows, steps]`` by name.
        done: bool ``[rows]``: the episode is over.
        failures: What went wrong, by slot.
        final_observation: With ``auto_reset``, the last observation of each episode that ended in this call, by slot;
            ``observation`` then holds the first of the next episode.
    """

    slots: list[int]
    observation: dict[str, np.ndarray]
    task_descriptions: list[str]
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    metrics: dict[str, np.ndarray]
    done: np.ndarray
    failures: dict[int, Failure] = field(default_factory=dict)
    final_observation: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def row_of(batch: Batch, row: int) -> StepResult:
    """Return one row of a batch as a result of its own."""
    slot = batch.slots[row]
    return StepResult(
        slot=slot,
        observation={name: array[row] for name, array in batch.observation.items()},
        task_description=batch.task_descriptions[row],
        rewards=batch.rewards[row],
        terminated=batch.terminated[row],
        truncated=batch.truncated[row],
        valid=batch.valid[row],
        metrics={name: array[row] for name, array in batch.metrics.items()},
        done=bool(batch.done[row]),
        failure=batch.failures.get(slot),
    )


def stack(results: Sequence[StepResult]) -> Batch:
    """Return results of several environments as a batch, row by row."""
    first = results[0]
    return Batch(
        slots=[one.slot for one in results],
        observation={name: np.stack([one.observation[name] for one in results]) for name in first.observation},
        task_descriptions=[one.task_description for one in results],
        rewards=np.stack([one.rewards for one in results]),
        terminated=np.stack([one.terminated for one in results]),
        truncated=np.stack([one.truncated for one in results]),
        valid=np.stack([one.valid for one in results]),
        metrics={name: np.stack([one.metrics[name] for one in results]) for name in first.metrics},
        done=np.array([one.done for one in results]),
        failures={one.slot: one.failure for one in results if one.failure is not None},
    )
