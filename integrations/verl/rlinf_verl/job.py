"""Run veRL's own command as a child, follow its metrics, and leave nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

_MARK = "RLINF_JOB"
"""Environment variable that every process of a job inherits."""

_GRACE_S = 30.0
"""Seconds veRL and Ray get to end by themselves before they are killed."""


class TrainingJob:
    """``python -m verl.trainer.main_ppo`` with its output in a file and its metrics as an iterator.

    Leaving the ``with`` block, by an exception or Ctrl-C too, ends the job and every process it started.

    Args:
        overrides: Hydra overrides.
        folder: Working directory of the job.
        log: File for everything the job prints.
        metrics: File for veRL's ``file`` logger, one JSON object a step.
    """

    def __init__(self, overrides: Sequence[str], *, folder: Path, log: Path, metrics: Path) -> None:
        self.command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *overrides]
        self._folder = folder
        self._log = log
        self._metrics = metrics
        self._process: subprocess.Popen[str] | None = None
        self._pump: threading.Thread | None = None
        self._announced = threading.Event()
        self._mark = uuid.uuid4().hex
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        self._metrics.unlink(missing_ok=True)
        environment = {
            **os.environ,
            _MARK: self._mark,
            "VERL_FILE_LOGGER_PATH": str(self._metrics.resolve()),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "HYDRA_FULL_ERROR": "1",
        }
        # A session of its own: Ctrl-C reaches us alone and we end the job in order.
        self._process = subprocess.Popen(
            self.command,
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._copy_output, name="job-output", daemon=True)
        self._pump.start()
        threading.Thread(target=self._announce_exit, name="job-exit", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each training step as it is logged, until the job ends."""
        position = 0
        while True:
            ended = self._ended()
            for entry in self._read_metrics(position):
                position += 1
                yield entry
            if ended:
                return
            self._announced.wait()
            self._announced.clear()

    def memory_bytes(self) -> int:
        """Return the memory the job's processes use now, shared pages counted once (PSS), in bytes."""
        total = 0
        for process in _marked(self._mark):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_full_info().pss
        return total

    def last_lines(self, count: int = 30) -> str:
        """Return the end of what the job printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-count:])

    def _copy_output(self) -> None:
        """Copy the job's output to the log; whatever it prints may mean that metrics were written."""
        process = self._running()
        with self._log.open("w") as log:
            for line in process.stdout or ():
                log.write(line)
                log.flush()
                self._announced.set()

    def _announce_exit(self) -> None:
        """A job's children may keep its output open after it died, so its end is watched apart from its output."""
        self._running().wait()
        self._announced.set()

    def _ended(self) -> bool:
        self.returncode = self._running().poll()
        return self.returncode is not None

    def _read_metrics(self, position: int) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_text().splitlines(keepends=True)[position:]
        return [json.loads(line)["data"] for line in lines if line.endswith("\n")]

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the job was not started; use it in a with block")
        return self._process

    def _end(self) -> None:
        process = self._running()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        # Ray's processes outlive a driver that died, and are no longer its children then: the mark finds them.
        _, alive = psutil.wait_procs(_marked(self._mark), timeout=5.0)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=5.0)
        self.returncode = process.wait()
        if self._pump is not None:
            self._pump.join(timeout=5.0)


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes that inherited ``mark`` through their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark:
                found.append(process)
    return found
