"""The check a resource makes itself: a device's memory may be changed only under the newest token seen for it.

A lock alone cannot stop a holder that was suspended, lost its lease without noticing and then goes on. So whoever moves
bytes onto or off a device passes through the device's fence: it refuses a token older than the newest it has seen, and
a permit whose lease has run out. Every new holder shows its token to the fence before it touches the device, so that
from then on the earlier holder is refused, however late it comes.
"""

import contextlib
import errno
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import msgspec

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import NotFreedError, StaleTokenError

INF = float("inf")


class Permit(msgspec.Struct, frozen=True):
    """What a holder shows to a fence.

    Attributes:
        tokens: Fencing token of each device.
        holder: For messages.
        not_after: Monotonic time on ``host`` after which the lease may have been given to somebody else.
        host: Machine whose clock ``not_after`` refers to; other machines rely on the tokens alone.
    """

    tokens: dict[str, int]
    holder: str
    not_after: float = INF
    host: str = ""


class Fence(Protocol):
    """Guards the devices of one machine."""

    def admit(self, permit: Permit, devices: Iterable[str]) -> contextlib.AbstractContextManager[None]:
        """Enter with ``permit``; nobody else moves bytes on ``devices`` until the block ends.

        Raises:
            StaleTokenError: The permit has no token for a device, an old one, or has run out.
            NotFreedError: Another process is in the middle of a move and does not finish.
        """
        ...

    def seal(self, permit: Permit) -> None:
        """Show ``permit`` to all its devices, so that older ones are refused from now on; errors as in ``admit``."""
        ...


class MemoryFence:
    """A fence for devices that only this process uses.

    Args:
        clock: Source of monotonic time.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._lock = threading.RLock()

    @contextmanager
    def admit(self, permit: Permit, devices: Iterable[str]) -> Iterator[None]:
        """Enter with ``permit``; see :class:`Fence`."""
        with self._lock:
            names = sorted(devices)
            for name in names:
                check_permit(permit, name, self._seen.get(name, 0), self._clock())
            for name in names:
                self._seen[name] = permit.tokens[name]
            yield

    def seal(self, permit: Permit) -> None:
        """Show ``permit``; see :class:`Fence`."""
        with self.admit(permit, permit.tokens):
            pass


class FileFence:
    """A fence shared by all processes of a machine: one small file per device, locked while bytes move.

    The kernel drops the lock of a process that dies, so a killed holder never blocks a device. One that is suspended in
    the middle of a move does: its bytes are there, so the device is not free, and the error names the process.

    Args:
        folder: Where the files are, on a local file system (``/dev/shm/...``); the same for all processes.
        patience_s: How long to wait for another process to finish its move.
        clock: Source of monotonic time.
    """

    _FORMAT = struct.Struct("<qq")

    def __init__(self, folder: Path, *, patience_s: float = 60.0, clock: Clock = monotonic) -> None:
        self._folder = folder
        self._patience = patience_s
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def admit(self, permit: Permit, devices: Iterable[str]) -> Iterator[None]:
        """Enter with ``permit``; see :class:`Fence`."""
        with contextlib.ExitStack() as stack:
            # Always in the same order, so that two processes with overlapping sets cannot block each other.
            files = {name: stack.enter_context(self._locked(name)) for name in sorted(devices)}
            for name, file in files.items():
                check_permit(permit, name, self._read(file)[0], self._clock())
            for name, file in files.items():
                os.pwrite(file, self._FORMAT.pack(permit.tokens[name], os.getpid()), 0)
            yield

    def seal(self, permit: Permit) -> None:
        """Show ``permit``; see :class:`Fence`."""
        with self.admit(permit, permit.tokens):
            pass

    def _read(self, file: int) -> tuple[int, int]:
        data = os.pread(file, self._FORMAT.size, 0)
        token, pid = self._FORMAT.unpack(data) if len(data) == self._FORMAT.size else (0, 0)
        return token, pid

    @contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        file = os.open(self._folder / quote(name, safe=""), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(file, name)
            yield file
        finally:
            os.close(file)

    def _lock(self, file: int, name: str) -> None:
        give_up = self._clock() + self._patience
        pause = 0.001
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise
            if self._clock() >= give_up:
                raise NotFreedError(
                    f"process {self._read(file)[1]} has been moving bytes on {name} for over {self._patience:g} s; "
                    "it may be suspended: resume or kill it"
                )
            time.sleep(pause)  # the kernel offers no timed file lock
            pause = min(2 * pause, 0.1)


def check_permit(permit: Permit, device: str, seen: int, now: float) -> None:
    """Refuse a permit that is not the newest for ``device``.

    Raises:
        StaleTokenError: The permit has no token for the device, an old one, or has run out.
    """
    token = permit.tokens.get(device)
    if token is None:
        raise StaleTokenError(f"{permit.holder} holds no lease on {device}; its permit is for {_names(permit.tokens)}")
    if token < seen:
        raise StaleTokenError(f"{permit.holder} comes to {device} with token {token}, but {seen} was there already")
    if permit.host == socket.gethostname() and now >= permit.not_after:
        raise StaleTokenError(
            f"the lease of {permit.holder} on {device} (token {token}) ran out {now - permit.not_after:.3g} s ago"
        )


def _names(tokens: Mapping[str, int]) -> str:
    return ", ".join(sorted(tokens)) or "nothing"
