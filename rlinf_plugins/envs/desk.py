"""The book-keeping between a pool's callers and its workers: calls are begun, episodes recorded, results read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlinf_plugins.core.errors import PoolUsageError
from rlinf_plugins.core.supervision import pack
from rlinf_plugins.envs.actions import ActionCheck
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.crew import Crew
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.ledger import Ledger
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.results import Batch, StepResult
from rlinf_plugins.envs.slot import Call, Slot, Status


class Desk:
    """Begins calls and reads their results.

    Args:
        factories: One per slot.
        config: Options of the pool.

    Attributes:
        crew: The workers.
        ledger: The episodes.
        failures: Why the last episode of a slot failed; cleared by its next reset.
        recycled: Workers replaced for their memory.
        spec: What the environments take and give.
    """

    def __init__(self, factories: Sequence[EnvFactory], config: PoolConfig) -> None:
        self._config = config
        self.crew = Crew(factories, config, on_finish=self._finished, on_loss=self._lost)
        self.ledger = Ledger(self.crew.board)
        self.failures: dict[int, Failure] = {}
        self.recycled = 0
        self._known: set[int] = set()  # slots that were reset or restored at least once
        self._tasks = [""] * len(factories)
        try:
            self.crew.wait_ready()
        except BaseException:
            self.crew.close()
            raise
        assert self.crew.spec is not None
        assert self.crew.data is not None
        self.spec, self._data = self.crew.spec, self.crew.data
        self._check = ActionCheck(self.spec, config.max_chunk, config.out_of_range == "clip")
        self._step_messages = [pack(("step", count)) for count in range(config.max_chunk + 1)]
        self.everyone = list(range(len(factories)))

    def choose(self, slots: Sequence[int] | None) -> list[int]:
        """Return ``slots`` as checked integers; all of them for None."""
        return self.everyone if slots is None else choose_slots(slots, len(self.everyone))

    def running(self, slots: Sequence[int]) -> set[int]:
        """Return those of ``slots`` whose process is up and waits for a command."""
        return {slot for slot in slots if self.crew.slots[slot].status is Status.IDLE}

    def shape(self, actions: object, rows: int) -> np.ndarray:
        """Return ``actions`` as float32 ``[rows, steps, action_dim]``.

        Raises:
            ActionError: Wrong shape or type.
        """
        return self._check.shape(actions, rows)

    def begin_resets(self, chosen: list[int], initial: Sequence[InitialState]) -> list[Call]:
        """Start an episode in each of ``chosen``, or in none if one cannot.

        Raises:
            PoolUsageError: Other than one initial state per slot, one the environments do not have, or a busy slot.
        """
        if len(initial) != len(chosen):
            raise PoolUsageError(f"{len(chosen)} slots need as many initial states, got {len(initial)}")
        calls = []
        with self.crew.lock:
            for slot, start in zip(chosen, initial, strict=True):
                check_initial(self.spec, start)
                self.crew.check(slot, "reset")
            for slot, start in zip(chosen, initial, strict=True):
                message = pack(("reset", (start, self._begin(slot, start))))
                calls.append(self.crew.begin(Call(slot, "reset", message, self._config.deadlines.reset)))
        return calls

    def _begin(self, slot: int, initial: InitialState) -> int:
        """Open an episode and return its number."""
        self._known.add(slot)
        self.failures.pop(slot, None)
        return self.ledger.begin(slot, initial)

    def begin_save(self, slot: int) -> Call:
        """Start taking a snapshot; the caller has the lock."""
        return self.crew.begin(Call(slot, "save", pack(("save", None)), self._config.deadlines.snapshot))

    def begin_load(self, slot: int, state: bytes, initial: InitialState | None = None) -> Call:
        """Start restoring a snapshot, as a new episode that began at ``initial`` or as the open one it was taken of.

        The caller has the lock.
        """
        number = self.ledger.number(slot) if initial is None else self._begin(slot, initial)
        return self.crew.begin(Call(slot, "load", pack(("load", (state, number))), self._config.deadlines.snapshot))

    def begin_steps(self, chosen: list[int], chunk: np.ndarray) -> list[Call]:
        """Start a chunk in each of ``chosen``; actions ``[rows, steps, action_dim]`` as :meth:`shape` gives them."""
        chunk, refused = self._check.refuse(chunk, chosen)
        count = chunk.shape[1]
        seconds = self._config.deadlines.step * count
        calls = []
        crew, is_open = self.crew, self.ledger.is_open
        with crew.lock:
            for slot in chosen:
                if is_open(slot):
                    crew.check(slot, "step")
                elif slot not in self._known:
                    raise PoolUsageError(f"environment {slot} was never reset")
            for slot, reason in refused.items():
                self._refuse(slot, reason, chunk[chosen.index(slot)])
            for row, slot in enumerate(chosen):
                call = Call(slot, "step", self._step_messages[count], seconds, count)
                if is_open(slot):
                    self._data.actions[slot, :count] = chunk[row]
                    crew.begin(call)
                else:
                    self._blank(slot)  # nothing happens in an environment whose episode is over
                    call.done = True
                    call.failure = self.failures.get(slot)
                calls.append(call)
        return calls

    def _blank(self, slot: int) -> None:
        data = self._data
        for rows in (data.rewards, data.valid, data.terminated, data.truncated, data.metrics):
            rows[slot] = 0

    def _refuse(self, slot: int, reason: str, chunk: np.ndarray) -> None:
        if not self.ledger.is_open(slot):
            return
        self._fail(
            Failure(
                kind="invalid_action",
                slot=slot,
                phase="step",
                step=int(self.crew.board.steps[slot]),
                reason=reason,
                action=tuple(tuple(float(value) for value in step) for step in chunk),
            )
        )

    def _fail(self, failure: Failure) -> None:
        self.failures[failure.slot] = failure
        self.ledger.close(failure.slot, "failed", failure)

    def _lost(self, failure: Failure) -> None:
        """A worker was lost with its episode; called by the crew under its lock."""
        if self.ledger.is_open(failure.slot):
            self._fail(failure)

    def _finished(self, call: Call) -> None:
        """A call was answered or failed; called by the crew under its lock."""
        slot, board = call.slot, self.crew.board
        if call.failure is not None:
            self._fail(call.failure)
            self._blank(slot)
            return
        if call.name == "step":
            if board.flags[slot, 4]:
                self.ledger.close(slot, "finished")
                self.crew.slots[slot].budget.progress()
                self._recycle_if_grown(self.crew.slots[slot])
        elif call.name in ("reset", "load"):
            self._tasks[slot] = call.answer
            self.ledger.describe(slot, call.answer)

    def _recycle_if_grown(self, slot: Slot) -> None:
        budget = self._config.memory_budget
        if budget is not None and self.crew.board.private[slot.index] > budget and slot.status is Status.IDLE:
            self.recycled += 1
            self.crew.recycle(slot)

    def wait(self, calls: Sequence[Call]) -> None:
        """Wait until all of ``calls`` are done."""
        pump = self.crew.pump
        for call in calls:
            while not call.done:
                pump()

    def result(self, call: Call) -> StepResult:
        """Return what a call gave."""
        slot, count, data = call.slot, call.count, self._data
        copy = self._config.copy_observations
        return StepResult(
            slot=slot,
            observation={name: rows[slot].copy() if copy else rows[slot] for name, rows in data.observation.items()},
            task_description=self._tasks[slot],
            rewards=data.rewards[slot, :count].copy(),
            terminated=data.terminated[slot, :count].copy(),
            truncated=data.truncated[slot, :count].copy(),
            valid=data.valid[slot, :count].copy(),
            metrics={name: data.metrics[slot, :count, i].copy() for i, name in enumerate(self.spec.metrics)},
            done=not self.ledger.is_open(slot),
            failure=self.failures.get(slot),
        )

    def batch(self, chosen: list[int], count: int) -> Batch:
        """Return the state of ``chosen`` after a chunk of ``count`` steps (0 after a reset)."""
        data = self._data
        rows: Any = slice(None) if chosen is self.everyone else chosen
        copy = self._config.copy_observations and rows == slice(None)  # indexing by a list copies already
        seen = {name: array[rows].copy() if copy else array[rows] for name, array in data.observation.items()}
        return Batch(
            slots=list(chosen),
            observation=seen,
            task_descriptions=[self._tasks[slot] for slot in chosen],
            rewards=data.rewards[rows, :count].copy(),
            terminated=data.terminated[rows, :count].copy(),
            truncated=data.truncated[rows, :count].copy(),
            valid=data.valid[rows, :count].copy(),
            metrics={name: data.metrics[rows, :count, i].copy() for i, name in enumerate(self.spec.metrics)},
            done=np.fromiter((not self.ledger.is_open(slot) for slot in chosen), bool, len(chosen)),
            failures={slot: self.failures[slot] for slot in chosen if slot in self.failures},
        )


def choose_slots(slots: Sequence[int] | None, count: int) -> list[int]:
    """Return ``slots`` as checked integers; all of a pool of ``count`` for None.

    Raises:
        PoolUsageError: One is repeated or does not exist.
    """
    chosen = list(range(count)) if slots is None else [int(slot) for slot in slots]
    for slot in chosen:
        if not 0 <= slot < count:
            raise PoolUsageError(f"there is no environment {slot}; the pool has 0..{count - 1}")
    if len(set(chosen)) < len(chosen):
        raise PoolUsageError(f"slots are repeated: {chosen}")
    return chosen


def check_initial(spec: EnvSpec, initial: InitialState) -> None:
    """Refuse an initial state that the environments do not have.

    Raises:
        PoolUsageError: There is no such task (the message lists them) or no such trial.
    """
    if not 0 <= initial.task < len(spec.tasks):
        names = ", ".join(f"{index}: {name}" for index, name in enumerate(spec.tasks))
        raise PoolUsageError(f"{spec.name} has no task {initial.task}; it has {names}")
    if initial.trial < 0 or (spec.trials is not None and initial.trial >= spec.trials):
        have = "any number from 0" if spec.trials is None else f"{spec.trials} (0..{spec.trials - 1})"
        raise PoolUsageError(f"{spec.name} has no initial state {initial.trial} of a task; it has {have}")
