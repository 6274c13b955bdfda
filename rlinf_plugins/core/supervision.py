"""Worker processes that end with their parent, leave their last words, and are restarted within limits.

A worker is a fresh interpreter, never a fork: threads, locks and graphics contexts of the parent do not leak into it.
It runs ``target(channel, **arguments)`` where ``target`` is named ``"module:function"``.
"""

import contextlib
import faulthandler
import fcntl
import importlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAST_WORDS = 4000
"""Characters of a dead worker's output that are kept."""
_HEADER = struct.Struct("=Q")
_SMALL = 4096
_PATIENCE_S = 5.0

_BOOT = (
    "import json, sys; boot = json.loads(sys.argv[1]); sys.path[:] = boot['path']; "
    "from rlinf_plugins.core.supervision import run_target; run_target(boot)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitCause:
    """How a process ended.

    Attributes:
        signal: Name of the signal that ended it, e.g. ``"SIGKILL"``; empty if it exited by itself.
        code: Exit status; -1 where a signal ended it.
        last_words: End of what it printed, tracebacks of fatal signals included.
    """

    signal: str
    code: int
    last_words: str

    def __str__(self) -> str:
        how = f"ended by {self.signal}" if self.signal else f"exited with status {self.code}"
        return f"{how}; last output: {self.last_words.strip()[-500:] or 'none'}"


class Channel:
    """Messages over a pair of pipes; a small message is one system call at each end.

    A side that waits on the descriptor must be sent one message at a time, as a caller is by a worker that answers:
    what was read ahead of a second one no longer shows there.

    Args:
        reader: Descriptor that is read from.
        writer: Descriptor that is written to.
        patience: Seconds the peer may stop in the middle of a message; None waits for ever.
    """

    def __init__(self, reader: int, writer: int, patience: float | None = None) -> None:
        self._reader, self._writer, self._patience = reader, writer, patience
        self._ahead = b""  # read beyond the end of a message
        os.set_blocking(reader, patience is None)
        os.set_blocking(writer, patience is None)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is a message, or the end."""
        return self._reader

    def send(self, message: bytes) -> None:
        """Send one message.

        Raises:
            BrokenPipeError: The peer has gone.
            TimeoutError: The peer does not read.
        """
        rest = memoryview(_HEADER.pack(len(message)) + message)
        while rest:
            try:
                rest = rest[os.write(self._writer, rest) :]
            except BlockingIOError:
                self._wait(self._writer, select.POLLOUT)

    def recv(self) -> bytes:
        """Return the next message; with patience, only call it when the descriptor is readable.

        Raises:
            EOFError: The peer has gone.
            TimeoutError: The peer stopped in the middle of the message.
        """
        data = self._ahead or self._read(_SMALL)
        while len(data) < _HEADER.size:
            data += self._read(_SMALL)
        size = _HEADER.unpack_from(data)[0] + _HEADER.size
        if len(data) < size:
            parts, have = [data], len(data)
            while have < size:
                parts.append(self._read(size - have))
                have += len(parts[-1])
            data = b"".join(parts)
        self._ahead = data[size:]
        return data[_HEADER.size : size]

    def has_message(self) -> bool:
        """Return whether there is something to read, without waiting."""
        return bool(select.select([self._reader], [], [], 0)[0])

    def close(self) -> None:
        """Close both descriptors."""
        os.close(self._reader)
        os.close(self._writer)

    def _read(self, size: int) -> bytes:
        while True:
            try:
                data = os.read(self._reader, size)
            except BlockingIOError:
                self._wait(self._reader, select.POLLIN)
                continue
            if not data:
                raise EOFError("the peer has closed its end")
            return data

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll((self._patience or 0) * 1000):
            raise TimeoutError(f"the peer stopped in the middle of a message for {self._patience} s")


class Worker:
    """A child process: its connection, its pulse and its end.

    The child gets SIGKILL from the kernel when this process ends in whatever way, even while it holds the interpreter
    lock. It runs in a process group of its own, so Ctrl-C in a terminal reaches only the parent.

    Args:
        target: ``"module:function"``; called in the child as ``function(channel, **arguments)``.
        arguments: JSON values.
        environment: Variables set in the child before its interpreter starts.
        pass_fds: Descriptors the child inherits under the same numbers.

    Attributes:
        pid: Process id.
        channel: Messages to and from the child; at its end when the child ended.
        sentinel: Descriptor that becomes readable when the process ended.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, object],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._output = os.memfd_create("worker-output", os.MFD_CLOEXEC)
        fcntl.fcntl(self._output, fcntl.F_SETFL, os.O_APPEND)  # so that the child may truncate it
        commands, our_writer = os.pipe()
        our_reader, answers = os.pipe()
        lifeline, self._lifeline = os.pipe()
        theirs = {"commands": commands, "answers": answers, "lifeline": lifeline}
        boot = {"path": sys.path, "target": target, "arguments": dict(arguments), **theirs}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **(environment or {})},
                pass_fds=(*theirs.values(), *pass_fds),
                process_group=0,
            )
        except BaseException:
            for descriptor in (our_writer, our_reader, self._lifeline, self._output):
                os.close(descriptor)
            raise
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)
        self.pid = self._process.pid
        self.channel = Channel(our_reader, our_writer, patience=_PATIENCE_S)
        self.sentinel = os.pidfd_open(self.pid)
        self._cause: ExitCause | None = None

    def kill(self) -> None:
        """End the process and everything it started, at once; does nothing if it already ended."""
        if self._cause is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def ask_stacks(self) -> None:
        """Ask a process that does not answer to print where it is; it cannot if it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal or a debugger."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as stat:
                return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
        except (FileNotFoundError, ProcessLookupError):
            return False

    def wait(self, timeout: float | None = None) -> ExitCause | None:
        """Wait for the end, release all resources and return the cause; None if it still runs after ``timeout``."""
        if self._cause is None:
            try:
                status = self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            by = signal.Signals(-status).name if status < 0 else ""
            self._cause = ExitCause(signal=by, code=max(status, -1), last_words=self._last_words())
            self.channel.close()
            for descriptor in (self.sentinel, self._lifeline, self._output):
                os.close(descriptor)
        return self._cause

    def _last_words(self) -> str:
        size = os.fstat(self._output).st_size
        return os.pread(self._output, LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How often and how fast a worker that keeps failing is started again.

    Attributes:
        max_failures: Failures in a row, without progress in between, after which it is given up.
        first_delay_s: Pause before the second restart in a row; the first is immediate.
        max_delay_s: The pause doubles up to this.
    """

    max_failures: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0


class RestartBudget:
    """Counts failures in a row under a policy; pure.

    Attributes:
        failures: Failures since the last progress.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self.failures = 0

    def progress(self) -> None:
        """Note that the worker has done useful work since it was started."""
        self.failures = 0

    def fail(self) -> float | None:
        """Note a failure and return the pause in seconds before the restart, or None to give up."""
        self.failures += 1
        if self.failures >= self._policy.max_failures:
            return None
        if self.failures == 1:
            return 0.0
        return float(min(self._policy.first_delay_s * 2 ** (self.failures - 2), self._policy.max_delay_s))


def run_target(boot: Mapping[str, object]) -> None:
    """Entry of the child process; called by the interpreter that :class:`Worker` starts."""
    _die_with_parent(int(str(boot["lifeline"])))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, function = str(boot["target"]).partition(":")
    arguments = boot["arguments"]
    assert isinstance(arguments, dict)
    channel = Channel(int(str(boot["commands"])), int(str(boot["answers"])))
    getattr(importlib.import_module(module), function)(channel, **arguments)


def trim_output(limit: int = 1 << 18) -> None:
    """Forget this worker's captured output beyond ``limit`` bytes; call it now and then in a long-lived worker."""
    if os.fstat(2).st_size > limit:
        os.ftruncate(2, 0)


def _die_with_parent(lifeline: int) -> None:
    """Let the kernel send SIGKILL to this process when the parent's end of the pipe closes; needs no thread."""
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it ended before the line was armed
        os.kill(os.getpid(), signal.SIGKILL)


def pack(message: object) -> bytes:
    """Return ``message`` as bytes for a worker's connection."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Return the message in ``data``; only ever from a process of our own."""
    return pickle.loads(data)  # the peer is our own child, over an unnamed socket
