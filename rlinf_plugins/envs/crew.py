"""The workers behind a pool, as the pool sees them: commands go in, answers come out.

Answers are read by the thread that waits for them (:meth:`Crew.pump`), so that a step costs no hand-over between
threads; starting, watching and ending processes is the supervisor's.
"""

import os
import select
import threading
from collections.abc import Callable, Sequence

from rlinf_plugins.core.buffers import anonymous_file
from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import EnvStartError, PoolUsageError
from rlinf_plugins.core.supervision import RestartBudget, Worker, unpack
from rlinf_plugins.envs.board import Board, Data
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec
from rlinf_plugins.envs.slot import Call, Slot, Status
from rlinf_plugins.envs.supervisor import Supervisor
from rlinf_plugins.envs.verdicts import storm
from rlinf_plugins.envs.worker import DONE


class Crew:
    """Worker processes of a pool.

    Args:
        factories: One per slot.
        config: Options of the pool.
        on_finish: Called under the lock with every finished call, before its callback.
        on_loss: Called under the lock with the failure of a worker that was lost, before its call is finished.

    Attributes:
        slots: State of each slot.
        config: Options of the pool.
        board: What the workers are doing.
        board_fd: Descriptor of the board.
        data: Shared arrays; None until the first worker is ready.
        data_fd: Descriptor of the shared arrays.
        spec: What the environments take and give; None until the first worker is ready.
        lock: Guards all state.
        start_error: Why a worker could not be started, if so.
        on_loss: See above.
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        config: PoolConfig,
        on_finish: Callable[[Call], None],
        on_loss: Callable[[Failure], None],
    ) -> None:
        self.config = config
        self._on_finish, self.on_loss = on_finish, on_loss
        self.board_fd, self.data_fd = anonymous_file("rlinf-board"), anonymous_file("rlinf-data")
        self.board = Board(self.board_fd, len(factories))
        self.data: Data | None = None
        self.spec: EnvSpec | None = None
        self.lock = threading.RLock()
        self.slots = [Slot(index, RestartBudget(config.restart)) for index in range(len(factories))]
        self.start_error: str | None = None
        self._listening: dict[int, Slot] = {}
        self._changes = 0  # workers gone; tells that a polled descriptor may be another one by now
        self._answers, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers.register(self._wake, select.EPOLLIN)
        self._supervisor = Supervisor(self, factories)
        self._supervisor.start()

    # --- commands: any thread ---------------------------------------------------------------------------------

    def begin(self, call: Call) -> Call:
        """Send a command, or hold it until the slot's worker is there; the caller has the lock.

        Raises:
            PoolUsageError: The slot executes another command, or is parked or closed.
        """
        self.check(call.slot, call.name)
        slot = self.slots[call.slot]
        if slot.status is Status.IDLE:
            self._send(slot, call)
        elif slot.status is Status.GIVEN_UP:
            self.finish(call, failure=storm(slot, self.board))
        else:
            slot.held = call
        return call

    def check(self, index: int, name: str) -> None:
        """Refuse a command that the slot can neither take nor hold; the caller has the lock.

        Raises:
            PoolUsageError: The slot executes another command, or is parked or closed.
        """
        slot = self.slots[index]
        if slot.status in (Status.IDLE, Status.GIVEN_UP):
            return
        may_hold = slot.status in (Status.STARTING, Status.DOWN) or (slot.call is not None and slot.call.abandoned)
        if slot.held is not None or not may_hold or name == "step":
            raise PoolUsageError(f"environment {index} cannot take {name!r} now: it is {slot.status.value}")

    def pump(self, timeout: float | None = None) -> None:
        """Wait up to ``timeout`` seconds (None: as long as it takes) for answers and take them in."""
        changes = self._changes
        events = self._answers.poll(timeout)
        with self.lock:
            if changes != self._changes:
                events = self._answers.poll(0)
            for descriptor, _ in events:
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif descriptor in self._listening:
                    self._receive(self._listening[descriptor])

    def fileno(self) -> int:
        """Return the descriptor that is readable while :meth:`pump` has something to do."""
        return self._answers.fileno()

    def wait_ready(self) -> None:
        """Wait until every worker has started.

        Raises:
            EnvStartError: One cannot be started; the message holds its own error.
        """
        while True:
            with self.lock:
                if self.start_error is not None:
                    raise EnvStartError(self.start_error)
                if all(slot.status not in (Status.DOWN, Status.STARTING) for slot in self.slots):
                    return
            self.pump()

    def park(self) -> None:
        """End all workers and wait until they are gone; calls must not be under way.

        Raises:
            PoolUsageError: A slot executes a command.
        """
        with self.lock:
            busy = [slot.index for slot in self.slots if slot.status is Status.BUSY]
            if busy:
                raise PoolUsageError(f"environments {busy} are busy; wait for their answers first")
            for slot in self.slots:
                before, slot.status = slot.status, Status.PARKED
                self._supervisor.dismiss(slot, orderly=before is Status.IDLE)
        while any(slot.worker is not None for slot in self.slots):
            self.pump()

    def recycle(self, slot: Slot) -> None:
        """Replace an idle worker in good order; the caller has the lock."""
        slot.status = Status.DOWN
        self._supervisor.release(slot)

    def unpark(self) -> None:
        """Have parked and given-up workers started, each with a fresh restart budget."""
        with self.lock:
            self.start_error = None
            for slot in self.slots:
                if slot.status in (Status.PARKED, Status.GIVEN_UP):
                    slot.status, slot.restart_at = Status.DOWN, 0.0
                    slot.budget.progress()
            self._supervisor.plan(0.0)

    def close(self) -> None:
        """End all workers: idle ones in good order, others at once. May be called again."""
        with self.lock:
            if all(slot.status is Status.CLOSED for slot in self.slots):
                return
            for slot in self.slots:
                before, slot.status = slot.status, Status.CLOSED
                self._supervisor.dismiss(slot, orderly=before is Status.IDLE)
        self._supervisor.close()
        for descriptor in (self._wake, self.board_fd, self.data_fd):
            os.close(descriptor)
        self._answers.close()

    # --- answers: the waiting thread, under the lock ------------------------------------------------------------

    def _send(self, slot: Slot, call: Call) -> None:
        worker = slot.worker
        assert worker is not None
        slot.status, slot.call = Status.BUSY, call
        slot.expect(monotonic(), call.seconds)
        if slot.deadline is not None and slot.deadline < self._supervisor.planned:
            self._supervisor.plan(slot.deadline)
        try:
            worker.channel.send(call.message)
        except OSError:  # it died between two calls, or reads nothing: the supervisor says which
            self.cut_off(slot)

    def _receive(self, slot: Slot) -> None:
        worker, call = slot.worker, slot.call
        assert worker is not None
        try:
            data = worker.channel.recv()
        except (EOFError, OSError):
            self.cut_off(slot)
            return
        if data == DONE:
            answer = None
        else:
            tag, answer = unpack(data)
            if tag == "raised":
                slot.raised = answer
                self.cut_off(slot)
                return
        slot.status = Status.IDLE
        slot.call = None
        slot.answered()
        if call is not None and slot.held is None:
            self.finish(call, answer)
        self._send_held(slot)  # it replaces an abandoned call, whose answer nobody wants

    # --- for the supervisor: its thread, under the lock ---------------------------------------------------------

    def listen(self, slot: Slot) -> None:
        """Take answers of a worker that has started, and send it what was held for it."""
        assert slot.worker is not None
        descriptor = slot.worker.channel.fileno()
        self._listening[descriptor] = slot
        self._answers.register(descriptor, select.EPOLLIN)
        slot.status = Status.IDLE
        slot.answered()
        self._send_held(slot)
        self.wake()

    def gone(self) -> None:
        """Note that a worker's descriptors are about to be closed."""
        self._changes += 1

    def wake(self) -> None:
        """Have the waiting thread look at its calls."""
        os.eventfd_write(self._wake, 1)

    def _send_held(self, slot: Slot) -> None:
        if slot.held is not None:
            held, slot.held = slot.held, None
            self._send(slot, held)

    def cut_off(self, slot: Slot) -> None:
        """Stop listening to a worker that is ending; it is killed if it does not end by itself at once."""
        worker = slot.worker
        assert worker is not None
        self.stop_listening(worker)
        slot.deadline = monotonic() + 1.0
        slot.cut_off = True
        self._supervisor.plan(slot.deadline)

    def stop_listening(self, worker: Worker) -> bool:
        """Take no more answers of a worker; return whether any were taken until now."""
        descriptor = worker.channel.fileno()
        listening = self._listening.pop(descriptor, None) is not None
        if listening:
            self._answers.unregister(descriptor)
        return listening

    def finish(self, call: Call, answer: object = None, failure: Failure | None = None) -> None:
        """Note how a call ended and tell whoever waits for it."""
        call.answer, call.failure, call.done = answer, failure, True
        self._on_finish(call)
        if call.callback is not None:
            call.callback(call)
