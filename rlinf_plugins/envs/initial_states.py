"""Where episodes start: a function of their place in the run, never of what ran faster."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.envs.protocol import EnvSpec, InitialState


def all_pairs(
    spec: EnvSpec, tasks: Sequence[int] | None = None, trials: int | None = None, first_trial: int = 0
) -> list[InitialState]:
    """Return every (task, initial state) once, task by task: changing the task is what costs.

    Args:
        spec: Of the environment.
        tasks: Indices of tasks; None takes all.
        trials: Initial states of each task; None takes all the environment has.
        first_trial: First of them.

    Raises:
        ConfigError: A task or an initial state the environment does not have, an unlimited number of them, or none.
    """
    chosen = list(range(len(spec.tasks))) if tasks is None else list(dict.fromkeys(tasks))
    unknown = [task for task in chosen if not 0 <= task < len(spec.tasks)]
    if unknown:
        raise ConfigError(f"{spec.name} has tasks 0 to {len(spec.tasks) - 1}; it has no {unknown}")
    if trials is None and spec.trials is None:
        raise ConfigError(f"{spec.name} has any number of initial states; say how many with trials=N")
    last = (spec.trials or 0) if trials is None else first_trial + trials
    if spec.trials is not None and last > spec.trials:
        raise ConfigError(f"{spec.name} has trials 0 to {spec.trials - 1} of each task, got up to {last - 1}")
    pairs = [InitialState(task=task, trial=trial) for task in chosen for trial in range(first_trial, last)]
    if not pairs:
        raise ConfigError(f"tasks={tasks}, trials={trials} and first_trial={first_trial} leave no initial state")
    return pairs


@dataclass(frozen=True, kw_only=True)
class InitialStates:
    """An endless sequence of initial states: every pair once in each pass, in an order drawn anew for each pass.

    Attributes:
        pairs: From :func:`all_pairs`.
        group_size: Episodes in a row that start alike, for group-relative advantages.
        seed: Of the order; None keeps that of ``pairs``.
    """

    pairs: Sequence[InitialState]
    group_size: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.pairs or self.group_size < 1:
            raise ConfigError(
                f"InitialStates needs a pair and a positive group_size, got {len(self.pairs)} and {self.group_size}"
            )

    def at(self, position: int) -> InitialState:
        """Return where episode ``position`` of the run starts, from 0."""
        passed, place = divmod(position // self.group_size, len(self.pairs))
        if self.seed is not None:
            place = int(np.random.default_rng([self.seed, passed]).permutation(len(self.pairs))[place])
        return self.pairs[place]

    def row(self, epoch: int, slots: int, *, rank: int = 0, ranks: int = 1) -> list[InitialState]:
        """Return where the episodes of one pool start in an epoch, one for each slot.

        Ranks, epochs and the pipeline stages that share a pool's slots draw from the same sequence, so that none
        repeats what another has.

        Args:
            epoch: Number of the pool's round of episodes, from 0.
            slots: Number of its environments.
            rank: Which of the job's pools.
            ranks: Number of those.
        """
        first = (epoch * ranks + rank) * slots
        return [self.at(first + slot) for slot in range(slots)]

    def take(self, episodes: int) -> list[InitialState]:
        """Return the first ``episodes`` of the sequence; more than there are pairs start again from the first ones."""
        return [self.at(position) for position in range(episodes)]


def repeats(initial: Iterable[InitialState]) -> int:
    """Return how many of the episodes start where an earlier one did."""
    starts = list(initial)
    return len(starts) - len(set(starts))
