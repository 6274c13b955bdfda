"""Worker processes that end with their parent, leave their last words, and are restarted within limits.

A worker is a fresh interpreter, never a fork: threads, locks and graphics contexts of the parent do not leak into it.
It runs ``target(connection, **arguments)`` where ``target`` is named ``"module:function"``.
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
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

LAST_WORDS = 4000
"""Characters of a dead worker's output that are kept."""

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


class Worker:
    """A child process: its connection, its pulse and its end.

    The child gets SIGKILL from the kernel when this process ends in whatever way, even while it holds the interpreter
    lock. It runs in a process group of its own, so Ctrl-C in a terminal reaches only the parent.

    Args:
        target: ``"module:function"``; called in the child as ``function(connection, **arguments)``.
        arguments: JSON values.
        environment: Variables set in the child before its interpreter starts.
        pass_fds: Descriptors the child inherits under the same numbers.

    Attributes:
        pid: Process id.
        connection: Duplex connection to the child; end of file when it ended.
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
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        ends = {"connection": theirs.fileno(), "lifeline": lifeline}
        boot = {"path": sys.path, "target": target, "arguments": dict(arguments), **ends}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(boot)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **(environment or {})},
                pass_fds=(theirs.fileno(), lifeline, *pass_fds),
                process_group=0,
            )
        except BaseException:
            ours.close()
            os.close(self._lifeline)
            os.close(self._output)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.pid = self._process.pid
        self.connection = Connection(ours.detach())
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
            self.connection.close()
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
    getattr(importlib.import_module(module), function)(Connection(int(str(boot["connection"]))), **arguments)


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
