"""The Ray actor that hosts a share of a distributed pool's environments."""

from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rlinf_plugins.core.errors import PoolUsageError, RlinfError
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.pool import EnvPool
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.results import Batch, EpisodeRecord, StepResult, row_of

Answer: TypeAlias = StepResult | RlinfError


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What an actor says to a call.

    Attributes:
        answers: What the environments gave, or why one could not be asked; slots are the actor's own.
        records: Episodes that ended since the last reply.
    """

    answers: list[Answer]
    records: list[EpisodeRecord]


class EnvActor:
    """Hosts environments; slots are counted from 0 in each actor, episodes as the driver counts them.

    Args:
        factories: One per environment.
        config: Options of the pool.
    """

    def __init__(self, factories: Sequence[EnvFactory], config: PoolConfig) -> None:
        self._pool = EnvPool(factories, config=config)
        self._numbers: list[deque[int]] = [deque() for _ in factories]  # of the episodes of a slot, oldest first

    async def spec(self) -> EnvSpec:
        """Return what the environments take and give; answers once they are up."""
        return self._pool.spec

    async def reset(self, slot: int, initial: InitialState, number: int) -> Reply:
        """Start the driver's episode ``number``."""
        self._numbers[slot].append(number)
        reply = await self._one(self._pool.async_reset(slot, initial))
        if isinstance(reply.answers[0], PoolUsageError):
            self._numbers[slot].remove(number)  # it never began
        return reply

    async def step(self, slot: int, actions: Any) -> Reply:
        """Execute a chunk: ``[steps, action_dim]``."""
        return await self._one(self._pool.async_step(slot, actions))

    async def save(self, slots: list[int]) -> dict[int, bytes]:
        """Return snapshots."""
        return self._pool.save(slots)

    async def load(self, snapshots: dict[int, bytes], numbers: dict[int, int]) -> Reply:
        """Continue from snapshots, as the driver's episodes ``numbers``."""
        for slot, number in numbers.items():
            self._numbers[slot].append(number)
        return await self._many(self._pool.load(snapshots))

    async def offload(self) -> int:
        """End the processes; return the bytes kept of their episodes."""
        return self._pool.offload()

    async def onload(self) -> Reply:
        """Bring the processes and their episodes back."""
        return await self._many(self._pool.onload())

    async def records(self) -> list[EpisodeRecord]:
        """Return the episodes that ended since they were last asked for."""
        return [replace(one, number=self._numbers[one.slot].popleft()) for one in self._pool.drain_records()]

    async def stats(self) -> dict[str, int]:
        """Return the pool's counters."""
        return self._pool.stats()

    async def close(self) -> list[EpisodeRecord]:
        """End the processes; return the last records."""
        self._pool.close()
        return await self.records()

    async def _one(self, call: Awaitable[StepResult]) -> Reply:
        try:
            answer: Answer = await call
        except RlinfError as error:  # as a value, so that the records come with it
            answer = error
        return Reply(answers=[answer], records=await self.records())

    async def _many(self, batch: Batch | None) -> Reply:
        rows = range(len(batch.slots)) if batch is not None else ()
        return Reply(answers=[row_of(batch, row) for row in rows if batch], records=await self.records())


def failed_result(spec: EnvSpec, last: StepResult | None, slot: int, steps: int, failure: Failure) -> StepResult:
    """Return what a chunk of ``steps`` gives where the environment is gone: what it last showed, no valid step."""
    if last is None:
        nothing = {name: np.zeros(field.shape, field.dtype) for name, field in spec.observation.items()}
    no = np.zeros(steps, bool)
    return StepResult(
        slot=slot,
        observation=nothing if last is None else last.observation,
        task_description="" if last is None else last.task_description,
        rewards=np.zeros(steps, np.float32),
        terminated=no,
        truncated=no.copy(),
        valid=no.copy(),
        metrics={name: np.zeros(steps, np.float32) for name in spec.metrics},
        done=True,
        failure=failure,
    )
