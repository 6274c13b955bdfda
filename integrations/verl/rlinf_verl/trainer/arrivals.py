"""Arrivals: the event a sampler waits for instead of polling.

Whoever ran a prompt's rollouts publishes it here once its terminal status stands in TransferQueue; the trainer's
sampler waits for a count. TransferQueue stays the owner of rows and status: an arrival only says that looking is
worthwhile.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFailure:
    """One rollout that ended without a trajectory.

    Attributes:
        uid: Prompt the rollout belonged to.
        session_id: Which of the prompt's rollouts.
        kind: Type name of the exception.
        message: Its message.
        where: Innermost frame, as ``file:line in function``.
    """

    uid: str
    session_id: int
    kind: str
    message: str
    where: str


class Arrivals:
    """Counts prompts that reached a terminal status, per partition; runs as an async Ray actor without devices."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        self._last: dict[str, float] = defaultdict(time.time)
        self._failures: dict[str, list[RolloutFailure]] = defaultdict(list)
        self._changed = asyncio.Condition()

    async def report(self, partition_id: str, failures: list[RolloutFailure]) -> None:
        """Keep failed rollouts; call it before the terminal status of their prompt stands in TransferQueue.

        A sampler may see that status without waiting for the announcement, and would miss what is reported later.
        """
        async with self._changed:
            self._failures[partition_id].extend(failures)

    async def publish(self, partition_id: str) -> None:
        """Announce one more prompt of ``partition_id`` whose terminal status stands in TransferQueue."""
        async with self._changed:
            self._counts[partition_id] += 1
            self._last[partition_id] = time.time()
            self._changed.notify_all()

    async def last(self, partition_id: str) -> float:
        """Return when the last prompt of ``partition_id`` was announced, in seconds since the epoch."""
        return self._last[partition_id]

    async def wait_for(self, partition_id: str, count: int) -> int:
        """Return the number of arrivals of ``partition_id`` as soon as it is at least ``count``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._counts[partition_id] >= count)
            return self._counts[partition_id]

    async def take_failures(self, partition_id: str) -> list[RolloutFailure]:
        """Return the failures of ``partition_id`` not taken before, oldest first."""
        async with self._changed:
            return self._failures.pop(partition_id, [])
