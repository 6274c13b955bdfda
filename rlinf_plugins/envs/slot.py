"""One slot of the pool, as the supervisor sees it: a worker process, what it is doing, and what it is waited for."""

from collections.abc import Callable
from enum import Enum
from typing import Any

from rlinf_plugins.core.supervision import RestartBudget, Worker
from rlinf_plugins.envs.failures import Failure, FailureKind


class Status(Enum):
    """State of a slot.

    ``DOWN`` waits for its restart, ``STARTING`` for the worker's first frame, ``IDLE`` for a command, ``BUSY`` for an
    answer; ``GIVEN_UP`` is not restarted any more; ``PARKED`` has no process until it is onloaded; ``CLOSED`` is over.
    """

    DOWN = "down"
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    GIVEN_UP = "given up"
    PARKED = "parked"
    CLOSED = "closed"


class Call:
    """One command to one worker.

    Attributes:
        slot: Index of the slot.
        name: The command.
        message: Its bytes.
        seconds: Time the worker has.
        count: Number of action steps, for ``step``.
        done: Whether it is answered, or failed.
        answer: What the worker answered.
        failure: Why it was not answered.
        abandoned: Nobody waits for it any more.
        callback: Called with the call when it is done; in any thread.
    """

    __slots__ = (
        "abandoned",
        "answer",
        "callback",
        "count",
        "done",
        "failure",
        "message",
        "name",
        "seconds",
        "slot",
    )

    def __init__(self, slot: int, name: str, message: bytes, seconds: float, count: int = 0) -> None:
        self.slot, self.name, self.message, self.seconds, self.count = slot, name, message, seconds, count
        self.callback: Callable[[Call], None] | None = None
        self.done = False
        self.abandoned = False
        self.answer: Any = None
        self.failure: Failure | None = None


class Slot:
    """State of one slot; changed only under the crew's lock.

    Attributes:
        index: Which slot.
        status: Its state.
        worker: Its process, while there is one.
        call: The command being executed.
        held: A command that is sent as soon as the worker can take it.
        deadline: When the worker counts as hung; None while nothing is waited for.
        since: When the present wait began.
        restart_at: When a slot that is down is started.
        budget: Failures in a row.
        hang: Verdict on a worker that is about to be killed for not answering.
        raised: The worker's own error, if it reported one before it ended.
        cut_off: It is not listened to any more, because it is ending.
        leaving: The worker was told to end.
        starts: Processes started for this slot.
    """

    def __init__(self, index: int, budget: RestartBudget) -> None:
        self.index = index
        self.budget = budget
        self.status = Status.DOWN
        self.worker: Worker | None = None
        self.call: Call | None = None
        self.held: Call | None = None
        self.deadline: float | None = None
        self.since = 0.0
        self.restart_at = 0.0
        self.hang: tuple[FailureKind, str] | None = None
        self.raised: tuple[str, str, str] | None = None
        self.cut_off = False
        self.leaving = False
        self.starts = 0

    def expect(self, now: float, seconds: float) -> None:
        """Start waiting for the worker."""
        self.since = now
        self.deadline = now + seconds

    def answered(self) -> None:
        """Stop waiting for the worker; it answered after all if it was given up on just now."""
        self.deadline = None
        self.hang = None

    def waits_long(self, now: float) -> bool:
        """Return whether the worker has used at least half of its time without an answer."""
        if self.hang is not None:
            return True
        return self.deadline is not None and now - self.since >= (self.deadline - self.since) / 2
