"""Items too large for a message: one file in shared memory each, written once, mapped by whoever reads it.

Files are written rather than mapped and filled, because a full file system then raises an error where a mapping would
kill the process, and because the kernel need not clear the pages first. Readers map copy-on-write: they may change what
they got without others seeing it. A file that was removed stays readable to those who have mapped it.

New pages cost more than the copy into them, so files that are no longer needed are kept in ``free/`` for the next item.
A file is written again only when nobody has it mapped: readers hold a shared lock on it for as long as they do, which
the kernel drops when they die.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlinf_plugins.core.errors import ChannelError
from rlinf_plugins.scheduler.channel.codec import Buffer

ALIGN = 64
FREE = "free"
"""Folder, inside a channel's, of files to be written again."""

_PREFIX = "rlinf-channel"
_OWNER = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-")

Layout = tuple[tuple[int, int], ...]
"""Offset and length in bytes of each buffer of a segment."""


def make_directory(name: str) -> str:
    """Create the folder of a channel hosted by this process; folders of processes that died are removed.

    Args:
        name: Name of the channel.

    Returns:
        Its path, in shared memory where the system has it.
    """
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))
    sweep(base)
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64]
    path = base / f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{safe}-{os.urandom(3).hex()}"
    path.mkdir(mode=0o700)
    return str(path)


def sweep(base: Path) -> list[str]:
    """Remove folders left by brokers that died; return their names."""
    gone = []
    for path in base.glob(f"{_PREFIX}-*"):
        owner = _OWNER.match(path.name)
        if owner is not None and _started(int(owner[1])) != owner[2] and path.stat().st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path.name)
    return gone


def write(path: str, buffers: Sequence[Buffer], sync: bool = False) -> Layout:
    """Write ``buffers`` to a file, each at a multiple of 64 bytes; a free file of the folder is used again.

    Args:
        path: File to create.
        buffers: Contiguous buffers.
        sync: Wait until it is on disk.

    Raises:
        ChannelError: There is no space left; the message says how much was wanted and is free.
    """
    layout, parts, offset = [], [], 0
    for buffer in buffers:
        size = memoryview(buffer).nbytes
        layout.append((offset, size))
        parts.append(memoryview(buffer).cast("B") if size else memoryview(b""))
        padding = -size % ALIGN
        if padding:
            parts.append(memoryview(bytes(padding)))
        offset += size + padding
    file = _reuse(path, offset)
    if file is None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write_all(file, parts)
        if sync:
            os.fsync(file)
    except OSError as error:
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        if _discard_free(os.path.dirname(path)):
            return write(path, buffers, sync)
        free = shutil.disk_usage(os.path.dirname(path)).free
        raise ChannelError(
            f"no space for an item of {offset} bytes, {free} bytes are free in {os.path.dirname(path)}: lower "
            "max_bytes or give the container more shared memory (docker: --shm-size)"
        ) from error
    finally:
        os.close(file)  # and its lock, if it was used before
    return tuple(layout)


def read(path: str, layout: Layout) -> list[Buffer]:
    """Map a file and return its buffers, writable and private to this process, without copying.

    Raises:
        FileNotFoundError: The item was committed meanwhile.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        _hold(file, path)
        size = os.fstat(file).st_size
        # The mapping keeps a duplicate of the descriptor, and so the lock, until it goes.
        whole: Buffer = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY)) if size else b""
    finally:
        os.close(file)
    return [memoryview(whole)[offset : offset + length] for offset, length in layout]


def _hold(file: int, path: str) -> None:
    """Keep ``file`` from being written again while its descriptor, or a duplicate, is open."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        same = os.stat(path).st_ino == os.fstat(file).st_ino
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:  # between opening and locking it was freed, and perhaps written again
        raise FileNotFoundError(errno.ENOENT, "the item was committed meanwhile", path)


def _reuse(path: str, size: int) -> int | None:
    """Take a free file of at least half and at most twice ``size``; its descriptor, locked, under the name ``path``."""
    folder = os.path.join(os.path.dirname(path), FREE)
    try:
        found = list(os.scandir(folder))
    except FileNotFoundError:
        return None
    for entry in found:
        with contextlib.suppress(FileNotFoundError):  # another producer took it
            if not size <= 2 * entry.stat().st_size <= 4 * size:
                continue
            file = os.open(entry.path, os.O_WRONLY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(entry.path, path)
                os.ftruncate(file, size)
            except (BlockingIOError, FileNotFoundError):
                os.close(file)
                continue
            return file
    return None


def _discard_free(directory: str) -> bool:
    """Remove the free files of a channel's folder; tell whether there were any."""
    gone = list(Path(directory, FREE).glob("*"))
    for path in gone:
        path.unlink(missing_ok=True)
    return bool(gone)


def _write_all(file: int, parts: list[memoryview]) -> None:
    limit = os.sysconf("SC_IOV_MAX")
    while parts:
        written = os.writev(file, parts[:limit])
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if parts and written:
            parts[0] = parts[0][written:]


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if there is none. Tells a reused pid apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
