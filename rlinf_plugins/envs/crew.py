"""The workers behind a pool: started, watched and replaced by one supervisor thread; served by whoever waits.

The supervisor alone starts and ends processes. It sleeps until a process ends, a starting worker reports, a deadline
passes or a restart is due. Answers of running workers are read by the thread that waits for them
(:meth:`Crew.pump`), so that a step costs no hand-over between threads.
"""

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import cloudpickle  # type: ignore[import-untyped]

from rlinf_plugins.core.buffers import anonymous_file
from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import EnvContractError, EnvStartError, PoolUsageError
from rlinf_plugins.core.supervision import ExitCause, RestartBudget, Worker, pack, unpack
from rlinf_plugins.envs.board import Board, Data, Phase
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.failures import Failure, diagnose
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec
from rlinf_plugins.envs.slot import Call, Slot, Status
from rlinf_plugins.envs.worker import DONE, TARGET

_LOG = logging.getLogger(__name__)
_GO = pack(("go", None))
_LEAVE = pack(("close", None))
_REPEATABLE = ("reset", "load")
_SOCKET_TIMEOUT_S = 5
"""Longest time a worker may stop in the middle of a message."""
_LAST_WORDS_GRACE_S = 0.2
"""Time a hung worker has to print where it is."""


class Crew:
    """Worker processes of a pool.

    Args:
        factories: One per slot.
        config: Options of the pool.
        on_finish: Called under the lock with every finished call, before its callback.
        on_loss: Called under the lock with the failure of a worker that was lost, before its call is finished.

    Attributes:
        slots: State of each slot.
        board: What the workers are doing.
        data: Shared arrays; None until the first worker is ready.
        spec: What the environments take and give; None until the first worker is ready.
        lock: Guards all state.
    """

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        config: PoolConfig,
        on_finish: Callable[[Call], None],
        on_loss: Callable[[Failure], None],
    ) -> None:
        self._config = config
        self._on_finish, self._on_loss = on_finish, on_loss
        self._environments = [dict(getattr(factory, "environment", {})) for factory in factories]
        self._board_fd, self._data_fd = anonymous_file("rlinf-board"), anonymous_file("rlinf-data")
        self._payloads = _payloads(factories, config)
        self.board = Board(self._board_fd, len(factories))
        self.data: Data | None = None
        self.spec: EnvSpec | None = None
        self.lock = threading.RLock()
        self.slots = [Slot(index, RestartBudget(config.restart)) for index in range(len(factories))]
        self._start_error: str | None = None
        self._by_connection: dict[int, Slot] = {}
        self._changes = 0  # workers retired; tells that a polled descriptor may be another one by now
        self._closing = False
        self._answers, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch, self._nudge = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers.register(self._wake, select.EPOLLIN)
        self._watch.register(self._nudge, select.EPOLLIN)
        self._watched: dict[int, Slot] = {}
        self._planned = 0.0  # when the supervisor looks at the clock next
        self._next_heartbeat = monotonic() + config.deadlines.heartbeat
        self._thread = threading.Thread(target=self._supervise, name="env-supervisor", daemon=True)
        self._thread.start()

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
            self._finish(call, failure=self._storm(slot))
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
        if slot.held is not None or not may_hold:
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
                elif descriptor in self._by_connection:
                    self._receive(self._by_connection[descriptor])

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
                if self._start_error is not None:
                    raise EnvStartError(self._start_error)
                if all(slot.status not in (Status.DOWN, Status.STARTING) for slot in self.slots):
                    return
            self.pump()

    def release(self, slot: Slot) -> None:
        """Tell an idle worker to end; the caller has the lock and has set the status that follows."""
        assert slot.worker is not None
        self._stop_listening(slot.worker)
        slot.leaving = True
        slot.expect(monotonic(), self._config.deadlines.close)
        try:
            slot.worker.connection.send_bytes(_LEAVE)
        except OSError:  # it ended in this moment
            slot.worker.kill()
        self._plan(slot.deadline)

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
                self._dismiss(slot, orderly=before is Status.IDLE)
        while any(slot.worker is not None for slot in self.slots):
            self.pump()

    def unpark(self) -> None:
        """Have parked and given-up workers started, each with a fresh restart budget."""
        with self.lock:
            self._start_error = None
            for slot in self.slots:
                if slot.status in (Status.PARKED, Status.GIVEN_UP):
                    slot.status, slot.restart_at = Status.DOWN, 0.0
                    slot.budget.progress()
            self._plan(0.0)

    def close(self) -> None:
        """End all workers: idle ones in good order, others at once. May be called again."""
        with self.lock:
            if self._closing:
                return
            self._closing = True
            for slot in self.slots:
                before, slot.status = slot.status, Status.CLOSED
                self._dismiss(slot, orderly=before is Status.IDLE)
            self._plan(0.0)
        self._thread.join()
        for descriptor in (self._wake, self._nudge, self._board_fd, self._data_fd, *self._payloads):
            os.close(descriptor)
        self._answers.close()
        self._watch.close()

    def _dismiss(self, slot: Slot, orderly: bool) -> None:
        if slot.worker is None or slot.leaving:
            return
        if orderly:
            self.release(slot)
        else:
            slot.worker.kill()

    # --- answers: the waiting thread, under the lock ------------------------------------------------------------

    def _send(self, slot: Slot, call: Call) -> None:
        worker = slot.worker
        assert worker is not None
        slot.status, slot.call = Status.BUSY, call
        slot.expect(monotonic(), call.seconds)
        if slot.deadline is not None and slot.deadline < self._planned:
            self._plan(slot.deadline)
        try:
            worker.connection.send_bytes(call.message)
        except OSError:  # it died between two calls, or reads nothing: the supervisor says which
            self._cut_off(slot)

    def _receive(self, slot: Slot) -> None:
        worker, call = slot.worker, slot.call
        assert worker is not None
        try:
            data = worker.connection.recv_bytes()
        except (EOFError, OSError):
            self._cut_off(slot)
            return
        if data == DONE:
            answer = None
        else:
            tag, answer = unpack(data)
            if tag == "raised":
                slot.raised = answer
                self._cut_off(slot)
                return
        slot.status = Status.IDLE
        slot.call = None
        slot.answered()
        if slot.held is not None:
            held, slot.held = slot.held, None
            self._send(slot, held)
        if call is not None:
            self._finish(call, answer)

    def _cut_off(self, slot: Slot) -> None:
        """Stop listening to a worker that is ending; it is killed if it does not end by itself at once."""
        worker = slot.worker
        assert worker is not None
        self._stop_listening(worker)
        slot.deadline = monotonic() + 1.0
        slot.hang = slot.hang or ("crashed", "it closed its connection")
        self._plan(slot.deadline)

    def _stop_listening(self, worker: Worker) -> bool:
        descriptor = worker.connection.fileno()
        listening = self._by_connection.pop(descriptor, None) is not None
        if listening:
            self._answers.unregister(descriptor)
        return listening

    def _finish(self, call: Call, answer: object = None, failure: Failure | None = None) -> None:
        call.answer, call.failure, call.done = answer, failure, True
        self._on_finish(call)
        if call.callback is not None:
            call.callback(call)

    # --- supervision: the supervisor's thread -------------------------------------------------------------------

    def _supervise(self) -> None:
        while True:
            with self.lock:
                if self._closing and all(slot.worker is None for slot in self.slots):
                    return
                self._planned = self._next_timer()
                timeout = max(0.0, self._planned - monotonic())
            events = self._watch.poll(timeout)
            with self.lock:
                for descriptor, _ in events:
                    if descriptor == self._nudge:
                        os.eventfd_read(self._nudge)
                        continue
                    slot = self._watched.get(descriptor)
                    if slot is None or slot.worker is None:
                        continue
                    if descriptor == slot.worker.sentinel:
                        self._ended(slot)
                    else:
                        self._reported(slot)
                self._check_clock(monotonic())

    def _next_timer(self) -> float:
        times = [slot.deadline for slot in self.slots if slot.deadline is not None]
        if self._may_start():
            times += [slot.restart_at for slot in self.slots if slot.status is Status.DOWN and slot.worker is None]
        return min([*times, self._next_heartbeat])

    def _plan(self, at: float | None) -> None:
        """Have the supervisor look again at ``at`` at the latest."""
        if at is not None and at < self._planned:
            self._planned = at
            os.eventfd_write(self._nudge, 1)

    def _check_clock(self, now: float) -> None:
        for slot in self.slots:
            if slot.deadline is not None and slot.deadline <= now:
                self._overdue(slot, now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._config.deadlines.heartbeat
            for slot in self.slots:
                if slot.status is Status.IDLE and slot.worker is not None and slot.worker.is_stopped():
                    slot.hang = ("hung", "the idle process was stopped (SIGSTOP or a debugger)")
                    slot.worker.kill()
        for slot in self.slots:
            if slot.status is Status.DOWN and slot.worker is None and slot.restart_at <= now and self._may_start():
                self._launch(slot)

    def _may_start(self) -> bool:
        limit = self._config.parallel_starts
        return not limit or sum(slot.status is Status.STARTING for slot in self.slots) < limit

    def _launch(self, slot: Slot) -> None:
        index = slot.index
        self.board.phase[index] = Phase.BOOT
        files = {"payload": self._payloads[index], "board": self._board_fd, "data": self._data_fd}
        arguments = {"slot": index, "slots": len(self.slots), **files}
        worker = Worker(TARGET, arguments, self._environments[index], pass_fds=list(files.values()))
        _bound_blocking(worker.connection.fileno())
        slot.worker, slot.status, slot.leaving = worker, Status.STARTING, False
        slot.hang = slot.raised = None
        slot.starts += 1
        slot.expect(monotonic(), self._config.deadlines.start)
        for descriptor in (worker.sentinel, worker.connection.fileno()):
            self._watch.register(descriptor, select.EPOLLIN)
            self._watched[descriptor] = slot

    def _reported(self, slot: Slot) -> None:
        """Take in what a starting worker has to say: what it is, or why it cannot be."""
        worker = slot.worker
        assert worker is not None
        descriptor = worker.connection.fileno()
        self._watch.unregister(descriptor)
        del self._watched[descriptor]
        try:
            tag, answer = unpack(worker.connection.recv_bytes())
            if tag == "raised":
                slot.raised = answer
            else:
                self._agree(answer)
                worker.connection.send_bytes(_GO)
        except EnvContractError as error:
            slot.raised = (type(error).__name__, str(error), "")
            worker.kill()
        except (EOFError, OSError):
            self._cut_off(slot)
        if slot.raised is not None or slot.hang is not None:
            return  # its end follows
        slot.status = Status.IDLE
        slot.answered()
        self._by_connection[descriptor] = slot
        self._answers.register(descriptor, select.EPOLLIN)
        if slot.held is not None:
            held, slot.held = slot.held, None
            self._send(slot, held)
        os.eventfd_write(self._wake, 1)

    def _agree(self, spec: EnvSpec) -> None:
        if self.spec is None:
            self.data = Data(self._data_fd, spec, len(self.slots), self._config.max_chunk)
            self.spec = spec
        elif (spec.observation, spec.action_dim, spec.metrics) != (
            self.spec.observation,
            self.spec.action_dim,
            self.spec.metrics,
        ):
            raise EnvContractError(
                f"all environments of a pool must have the same arrays; {self.spec.name} has {self.spec.observation}, "
                f"{self.spec.action_dim} action components and metrics {self.spec.metrics}; {spec.name} has "
                f"{spec.observation}, {spec.action_dim} and {spec.metrics}"
            )

    def _overdue(self, slot: Slot, now: float) -> None:
        worker = slot.worker
        assert worker is not None
        if slot.hang is not None or slot.leaving:
            slot.deadline = None
            worker.kill()
            return
        phases = [Phase(phase) for phase in self.board.phase]
        waiting = [other.index for other in self.slots if other.waits_long(now)]
        slot.hang = diagnose(slot.index, now - slot.since, phases, waiting)
        worker.ask_stacks()
        slot.deadline = now + _LAST_WORDS_GRACE_S

    def _ended(self, slot: Slot) -> None:
        worker = slot.worker
        assert worker is not None
        worker.kill()  # whatever it had started
        for descriptor in (worker.sentinel, worker.connection.fileno()):
            if self._watched.pop(descriptor, None) is not None:
                self._watch.unregister(descriptor)
        if self._stop_listening(worker):
            self._read_last_answer(slot)
        self._changes += 1
        cause = worker.wait()
        assert cause is not None
        slot.worker = None
        slot.deadline = None
        if slot.status in (Status.CLOSED, Status.PARKED) or (slot.leaving and slot.call is None):
            if slot.status is Status.DOWN:  # it was replaced in good order
                slot.restart_at = 0.0
            os.eventfd_write(self._wake, 1)
            return
        self._lose(slot, self._explain(slot, cause))
        os.eventfd_write(self._wake, 1)

    def _read_last_answer(self, slot: Slot) -> None:
        """A worker that raised has said why before it ended; the end may be seen first."""
        worker = slot.worker
        assert worker is not None
        try:
            while slot.raised is None and worker.connection.poll(0):
                tag, answer = unpack(worker.connection.recv_bytes())
                if tag == "raised":
                    slot.raised = answer
        except (EOFError, OSError):
            return

    def _explain(self, slot: Slot, cause: ExitCause) -> Failure:
        action: tuple[tuple[float, ...], ...] = ()
        if slot.call is not None and slot.call.name == "step" and self.data is not None:
            chunk = self.data.actions[slot.index, : slot.call.count]
            action = tuple(tuple(float(value) for value in step) for step in chunk)
        kind, reason, words, signal = "crashed", f"the process {cause}", cause.last_words, cause.signal
        if slot.raised is not None:
            kind, reason, words, signal = "raised", slot.raised[1], slot.raised[2], ""
        elif slot.hang is not None and slot.hang[0] != "crashed":
            kind, reason = slot.hang
        return Failure(
            kind=kind,  # type: ignore[arg-type]
            slot=slot.index,
            phase=Phase(self.board.phase[slot.index]).words,
            step=int(self.board.steps[slot.index]),
            reason=reason,
            signal=signal,
            last_words=words,
            action=action,
        )

    def _lose(self, slot: Slot, failure: Failure) -> None:
        starting = slot.status is Status.STARTING
        call, slot.call = slot.call, None
        _LOG.warning("%s", failure)
        if call is not None and call.name in _REPEATABLE and self.board.phase[slot.index] in (Phase.IDLE, Phase.BOOT):
            call, slot.held = None, call  # the worker was lost before it began: the next one does it
        if slot.held is None:
            self._on_loss(failure)
        pause = slot.budget.fail()
        if starting and failure.kind == "raised" and slot.starts == 1:
            pause = None  # it cannot be made at all: a restart would say the same
        if pause is None:
            slot.status = Status.GIVEN_UP
            if starting and self._start_error is None:
                self._start_error = f"{failure}\n{failure.last_words}"
            if slot.held is not None:
                held, slot.held = slot.held, None
                self._finish(held, failure=self._storm(slot))
        else:
            slot.status = Status.DOWN
            slot.restart_at = monotonic() + pause
        if call is not None:
            self._finish(call, failure=failure)

    def _storm(self, slot: Slot) -> Failure:
        return Failure(
            kind="storm",
            slot=slot.index,
            phase=Phase(self.board.phase[slot.index]).words,
            step=0,
            reason=f"it failed {slot.budget.failures} times without finishing an episode and is not restarted any more",
        )


def _payloads(factories: Sequence[EnvFactory], config: PoolConfig) -> list[int]:
    descriptors = []
    for factory in factories:
        descriptor = anonymous_file("rlinf-factory")
        with open(descriptor, "wb", closefd=False) as file:
            cloudpickle.dump((factory, config), file)
        descriptors.append(descriptor)
    return descriptors


def _bound_blocking(descriptor: int) -> None:
    """Let reads and writes of a worker's socket give up when it stops in the middle of a message."""
    duplicate = socket.socket(fileno=os.dup(descriptor))
    limit = struct.pack("ll", _SOCKET_TIMEOUT_S, 0)
    duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    duplicate.close()
