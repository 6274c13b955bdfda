"""Items too large for a message: one file in shared memory each, written once, mapped by whoever reads it.

Files are written rather than mapped and filled, because a full file system then raises an error where a mapping would
kill the process, and because the kernel need not clear the pages first. Readers map copy-on-write: they may change what
they got without others seeing it. A file that was removed stays readable to those who have mapped it.
"""

import errno
import mmap
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from rlinf_plugins.core.errors import ChannelError
from rlinf_plugins.scheduler.channel.codec import Buffer

ALIGN = 64
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
    """Write ``buffers`` to a new file, each at a multiple of 64 bytes.

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
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _write_all(file, parts)
        if sync:
            os.fsync(file)
    except OSError as error:
        os.unlink(path)
        if error.errno != errno.ENOSPC:
            raise
        free = shutil.disk_usage(os.path.dirname(path)).free
        raise ChannelError(
            f"no space for an item of {offset} bytes, {free} bytes are free in {os.path.dirname(path)}: lower "
            "max_bytes or give the container more shared memory (docker: --shm-size)"
        ) from error
    finally:
        os.close(file)
    return tuple(layout)


def read(path: str, layout: Layout) -> list[Buffer]:
    """Map a file and return its buffers, writable and private to this process, without copying.

    Raises:
        FileNotFoundError: The item was committed meanwhile.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        whole: Buffer = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY)) if size else b""
    finally:
        os.close(file)
    return [memoryview(whole)[offset : offset + length] for offset, length in layout]


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
