"""A policy plays episodes in a pool: it thinks about some environments while the others move."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from rlinf_plugins.core.errors import ConfigError, RestartStormError
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.protocol import InitialState
from rlinf_plugins.envs.results import EpisodeRecord, StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyInput:
    """What a policy is shown: one row for each environment that waits for it.

    Attributes:
        slots: Which environments.
        observation: Stacked arrays by name, ``[rows, ...]``.
        task_descriptions: Their instructions.
    """

    slots: list[int]
    observation: dict[str, np.ndarray]
    task_descriptions: list[str]


Policy: TypeAlias = Callable[[PolicyInput], np.ndarray]
"""Returns the actions of each row, ``[rows, steps, action_dim]``."""


class Sending(Protocol):
    """What is needed of a pool; both ``EnvPool`` and ``RayEnvPool`` have it."""

    def __len__(self) -> int:
        """Return the number of environments."""
        ...

    def send(self, actions: object, slots: Sequence[int]) -> None:
        """Start a chunk in each of ``slots``."""
        ...

    def send_reset(self, initial: Sequence[InitialState], slots: Sequence[int]) -> None:
        """Start an episode in each of ``slots``."""
        ...

    def recv(self, at_least: int = 1) -> list[StepResult]:
        """Return the environments that are ready."""
        ...

    def drain_records(self) -> list[EpisodeRecord]:
        """Return the episodes that ended."""
        ...


def play(
    pool: Sending,
    policy: Policy,
    initial: Iterable[InitialState],
    *,
    stages: int = 2,
    on_step: Callable[[StepResult], None] | None = None,
) -> Iterator[EpisodeRecord]:
    """Run one episode from each of ``initial``, in whichever environment is free, and yield the records.

    The policy is asked as soon as one stage's worth of environments is ready, whichever they are, so that one that
    takes long holds up no other; while it thinks, the rest moves. A finished environment starts its next episode at
    once.

    Args:
        pool: The environments; not driven by anyone else meanwhile.
        policy: The policy.
        initial: Where the episodes start.
        stages: Into how many parts the environments are split: 2 overlaps policy and simulation; 1 asks the policy
            about all that are not being reset at once, for a policy whose time does not depend on their number.
        on_step: Called with every answer of an environment, e.g. to collect transitions.

    Yields:
        One record for each of ``initial``, as the episodes end; also for those that failed.

    Raises:
        ConfigError: ``stages`` does not lie between 1 and the number of environments.
        RestartStormError: No environment is left; its episodes are not played.
    """
    if not 1 <= stages <= len(pool):
        raise ConfigError(f"stages must lie between 1 and the number of environments, {len(pool)}, got {stages}")
    pool.drain_records()  # of whatever was played before
    source, again = iter(initial), deque[InitialState]()
    free, resetting, moving = deque(range(len(pool))), set[int](), 0
    ready: deque[StepResult] = deque()
    current: dict[int, InitialState] = {}
    storm: Failure | None = None

    def start() -> int:
        """Begin an episode in every free environment, as long as there are any; return their number."""
        begun = 0
        while free and (at := again.popleft() if again else next(source, None)) is not None:
            slot = free.popleft()
            current[slot] = at
            resetting.add(slot)
            pool.send_reset([at], [slot])
            begun += 1
        return begun

    moving += start()
    while moving or ready:
        acting = moving - len(resetting) + len(ready)  # a reset can take as long as many steps: nobody waits for it
        rows = max(1, -(-acting // stages))
        for answer in pool.recv(max(0, min(rows - len(ready), moving))):
            moving -= 1
            resetting.discard(answer.slot)
            if on_step is not None:
                on_step(answer)
            if not answer.done:
                ready.append(answer)
            elif answer.failure is not None and answer.failure.kind == "storm":
                again.append(current[answer.slot])  # never began; another environment plays it
                storm = answer.failure
            else:
                free.append(answer.slot)
        yield from filter(_was_played, pool.drain_records())
        begun = start()
        moving += begun
        chosen = [] if begun else [ready.popleft() for _ in range(min(rows, len(ready)))]  # else more may be ready soon
        if chosen:
            shown = _show(chosen)
            pool.send(policy(shown), shown.slots)
            moving += len(chosen)
    yield from filter(_was_played, pool.drain_records())
    if storm is not None and not free and (again or next(source, None) is not None):
        raise RestartStormError(f"no environment is left to go on with: {storm}")


def _show(chosen: list[StepResult]) -> PolicyInput:
    return PolicyInput(
        slots=[one.slot for one in chosen],
        observation={name: np.stack([one.observation[name] for one in chosen]) for name in chosen[0].observation},
        task_descriptions=[one.task_description for one in chosen],
    )


def _was_played(record: EpisodeRecord) -> bool:
    """Leave out what was under way before, and what an environment that was given up never began."""
    return record.ending != "abandoned" and (record.failure is None or record.failure.kind != "storm")
