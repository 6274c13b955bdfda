"""The supervisor of a pool's workers: one thread that starts, watches and replaces them.

It sleeps until a process ends, a starting worker reports, a deadline passes or a restart is due. It alone starts
processes and closes what belongs to them.
"""

import logging
import os
import select
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import cloudpickle  # type: ignore[import-untyped]

from rlinf_plugins.core.buffers import anonymous_file
from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import EnvContractError
from rlinf_plugins.core.supervision import Worker, pack, unpack
from rlinf_plugins.envs.board import Data, Phase
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.failures import Failure, diagnose
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec
from rlinf_plugins.envs.slot import Slot, Status
from rlinf_plugins.envs.verdicts import explain, storm
from rlinf_plugins.envs.worker import TARGET

if TYPE_CHECKING:
    from rlinf_plugins.envs.crew import Crew

_LOG = logging.getLogger(__name__)
_GO = pack(("go", None))
_LEAVE = pack(("close", None))
_REPEATABLE = ("reset", "load")
_LAST_WORDS_GRACE_S = 0.2
"""Time a hung worker has to print where it is."""


class Supervisor:
    """Starts, watches and replaces the workers of a crew.

    Args:
        crew: Whose workers; its lock guards everything here.
        factories: One per slot.

    Attributes:
        planned: When the thread looks at the clock next.
    """

    def __init__(self, crew: "Crew", factories: Sequence[EnvFactory]) -> None:
        self._crew = crew
        self._config = crew.config
        self._environments = [dict(getattr(factory, "environment", {})) for factory in factories]
        self._payloads = _payloads(factories, crew.config)
        self._watch, self._nudge = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch.register(self._nudge, select.EPOLLIN)
        self._watched: dict[int, Slot] = {}
        self._closing = False
        self.planned = 0.0
        self._next_heartbeat = monotonic() + crew.config.deadlines.heartbeat
        self._thread = threading.Thread(target=self._supervise, name="env-supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread, which starts the workers."""
        self._thread.start()

    def plan(self, at: float | None) -> None:
        """Have the supervisor look again at ``at`` at the latest."""
        if at is not None and at < self.planned:
            self.planned = at
            os.eventfd_write(self._nudge, 1)

    def release(self, slot: Slot) -> None:
        """Tell an idle worker to end; the caller has the lock and has set the status that follows."""
        assert slot.worker is not None
        self._crew.stop_listening(slot.worker)
        slot.leaving = True
        slot.expect(monotonic(), self._config.deadlines.close)
        try:
            slot.worker.channel.send(_LEAVE)
        except OSError:  # it ended in this moment
            slot.worker.kill()
        self.plan(slot.deadline)

    def dismiss(self, slot: Slot, orderly: bool) -> None:
        """End a worker, if there is one: by telling it, or at once; the caller has the lock."""
        if slot.worker is None or slot.leaving:
            return
        if orderly:
            self.release(slot)
        else:
            slot.worker.kill()

    def close(self) -> None:
        """End the thread once all workers are gone; the caller has dismissed them and does not hold the lock."""
        with self._crew.lock:
            self._closing = True
            self.plan(0.0)
        self._thread.join()
        for descriptor in (self._nudge, *self._payloads):
            os.close(descriptor)
        self._watch.close()

    def _supervise(self) -> None:
        while True:
            with self._crew.lock:
                if self._closing and all(slot.worker is None for slot in self._crew.slots):
                    return
                self.planned = self._next_timer()
                timeout = max(0.0, self.planned - monotonic())
            events = self._watch.poll(timeout)
            with self._crew.lock:
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
        times = [slot.deadline for slot in self._crew.slots if slot.deadline is not None]
        if self._may_start():
            times += [
                slot.restart_at for slot in self._crew.slots if slot.status is Status.DOWN and slot.worker is None
            ]
        return min([*times, self._next_heartbeat])

    def _check_clock(self, now: float) -> None:
        for slot in self._crew.slots:
            if slot.deadline is not None and slot.deadline <= now:
                self._overdue(slot, now)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._config.deadlines.heartbeat
            for slot in self._crew.slots:
                if slot.status is Status.IDLE and slot.worker is not None and slot.worker.is_stopped():
                    slot.hang = ("hung", "the idle process was stopped (SIGSTOP or a debugger)")
                    slot.worker.kill()
        for slot in self._crew.slots:
            if slot.status is Status.DOWN and slot.worker is None and slot.restart_at <= now and self._may_start():
                self._launch(slot)

    def _may_start(self) -> bool:
        limit = self._config.parallel_starts or max(2, len(os.sched_getaffinity(0)))
        return sum(slot.status is Status.STARTING for slot in self._crew.slots) < limit

    def _launch(self, slot: Slot) -> None:
        index = slot.index
        self._crew.board.phase[index] = Phase.BOOT
        files = {"payload": self._payloads[index], "board": self._crew.board_fd, "data": self._crew.data_fd}
        arguments = {"slot": index, "slots": len(self._crew.slots), **files}
        worker = Worker(TARGET, arguments, self._environments[index], pass_fds=list(files.values()))
        slot.worker, slot.status, slot.leaving = worker, Status.STARTING, False
        slot.hang = slot.raised = None
        slot.cut_off = False
        slot.starts += 1
        slot.expect(monotonic(), self._config.deadlines.start)
        for descriptor in (worker.sentinel, worker.channel.fileno()):
            self._watch.register(descriptor, select.EPOLLIN)
            self._watched[descriptor] = slot

    def _reported(self, slot: Slot) -> None:
        """Take in what a starting worker has to say: what it is, or why it cannot be."""
        worker = slot.worker
        assert worker is not None
        descriptor = worker.channel.fileno()
        self._watch.unregister(descriptor)
        del self._watched[descriptor]
        try:
            tag, answer = unpack(worker.channel.recv())
            if tag == "raised":
                slot.raised = answer
            else:
                self._agree(answer)
                worker.channel.send(_GO)
        except EnvContractError as error:
            slot.raised = (type(error).__name__, str(error), "")
            worker.kill()
        except (EOFError, OSError):
            self._crew.cut_off(slot)
        if slot.raised is not None or slot.cut_off:
            return  # its end follows
        self._crew.listen(slot)

    def _agree(self, spec: EnvSpec) -> None:
        if self._crew.spec is None:
            self._crew.data = Data(self._crew.data_fd, spec, len(self._crew.slots), self._config.max_chunk)
            self._crew.spec = spec
        elif _arrays(spec) != _arrays(self._crew.spec):
            raise EnvContractError(
                "all environments of a pool must have the same arrays: "
                f"{self._crew.spec.name} has {_arrays(self._crew.spec)}; {spec.name} has {_arrays(spec)}"
            )

    def _overdue(self, slot: Slot, now: float) -> None:
        worker = slot.worker
        assert worker is not None
        if slot.hang is not None or slot.cut_off or slot.leaving:
            slot.deadline = None
            worker.kill()
            return
        phases = [Phase(phase) for phase in self._crew.board.phase]
        waiting = [other.index for other in self._crew.slots if other.waits_long(now)]
        slot.hang = diagnose(slot.index, now - slot.since, phases, waiting)
        worker.ask_stacks()
        slot.deadline = now + _LAST_WORDS_GRACE_S

    def _ended(self, slot: Slot) -> None:
        worker = slot.worker
        assert worker is not None
        worker.kill()  # whatever it had started
        for descriptor in (worker.sentinel, worker.channel.fileno()):
            if self._watched.pop(descriptor, None) is not None:
                self._watch.unregister(descriptor)
        if self._crew.stop_listening(worker):
            self._read_last_answer(slot)
        self._crew.gone()
        cause = worker.wait()
        assert cause is not None
        slot.worker = None
        slot.deadline = None
        if slot.status in (Status.CLOSED, Status.PARKED) or (slot.leaving and slot.call is None):
            if slot.status is Status.DOWN:  # it was replaced in good order
                slot.restart_at = 0.0
            self._crew.wake()
            return
        self._lose(slot, explain(slot, cause, self._crew.board, self._crew.data))
        self._crew.wake()

    def _read_last_answer(self, slot: Slot) -> None:
        """A worker that raised has said why before it ended; the end may be seen first."""
        worker = slot.worker
        assert worker is not None
        try:
            while slot.raised is None and worker.channel.has_message():
                tag, answer = unpack(worker.channel.recv())
                if tag == "raised":
                    slot.raised = answer
        except (EOFError, OSError):
            return

    def _lose(self, slot: Slot, failure: Failure) -> None:
        starting = slot.status is Status.STARTING
        call, slot.call = slot.call, None
        _LOG.warning("%s", failure)
        if (
            call is not None
            and call.name in _REPEATABLE
            and self._crew.board.phase[slot.index] in (Phase.IDLE, Phase.BOOT)
        ):
            call, slot.held = None, call  # the worker was lost before it began: the next one does it
        if slot.held is None:
            self._crew.on_loss(failure)
        pause = slot.budget.fail()
        if starting and failure.kind == "raised" and slot.starts == 1:
            pause = None  # it cannot be made at all: a restart would say the same
        if pause is None:
            slot.status = Status.GIVEN_UP
            if starting and self._crew.start_error is None:
                self._crew.start_error = f"{failure}\n{failure.last_words}"
            if slot.held is not None:
                held, slot.held = slot.held, None
                self._crew.finish(held, failure=storm(slot, self._crew.board))
        else:
            slot.status = Status.DOWN
            slot.restart_at = monotonic() + pause
        if call is not None:
            self._crew.finish(call, failure=failure)


def _payloads(factories: Sequence[EnvFactory], config: PoolConfig) -> list[int]:
    descriptors = []
    for factory in factories:
        descriptor = anonymous_file("rlinf-factory")
        with open(descriptor, "wb", closefd=False) as file:
            cloudpickle.dump((factory, config), file)
        descriptors.append(descriptor)
    return descriptors


def _arrays(spec: EnvSpec) -> dict[str, object]:
    return {"observation": spec.observation, "action_dim": spec.action_dim, "metrics": spec.metrics}
