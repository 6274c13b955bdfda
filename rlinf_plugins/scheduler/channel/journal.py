"""A journal on disk: what was admitted and not committed survives the broker's death.

One file of records, each with its length and checksum; a torn tail is cut off. Segments lie beside it. When most of the
file is obsolete it is rewritten from the live state and replaced in one step.
"""

import fcntl
import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_plugins.core.errors import JournalError
from rlinf_plugins.scheduler.channel.config import JournalConfig
from rlinf_plugins.scheduler.channel.model import Item
from rlinf_plugins.scheduler.channel.payload import segment_of
from rlinf_plugins.scheduler.channel.recovery import held_items, replay, snapshot

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.core import ChannelCore

_MAGIC = b"rlinf-channel-journal 1\n"
_HEAD = struct.Struct("<II")


class Journal:
    """Appends records and recovers a channel from them.

    Args:
        config: Where and how.

    Raises:
        JournalError: The folder cannot be written, is in use, or holds something else.
    """

    def __init__(self, config: JournalConfig) -> None:
        self._config = config
        folder = Path(config.directory)
        self.segments = str(folder / "segments")
        self._path = folder / "journal"
        try:
            os.makedirs(self.segments, exist_ok=True)
            self._file = open(self._path, "ab")  # noqa: SIM115 (kept open for the journal's life)
            self._lock()
            self.incarnation = self._next_incarnation(folder / "incarnation")
            self._records = list(self._read())
            self._size = self._file.seek(0, os.SEEK_END)
        except OSError as error:
            raise JournalError(f"journal in {config.directory!r}: {error}") from error
        self._buffer = bytearray()
        if self._size == 0:
            self._buffer += _MAGIC

    def append(self, record: tuple[Any, ...]) -> None:
        """Take one record; it is durable after the next :meth:`commit`."""
        body = pickle.dumps(record, protocol=5)
        self._buffer += _HEAD.pack(len(body), zlib.crc32(body))
        self._buffer += body

    def commit(self, core: "ChannelCore") -> None:
        """Write what was appended; rewrite the file if most of it is obsolete.

        Raises:
            JournalError: The disk is full or broken; nothing that is not durable has been promised.
        """
        if not self._buffer:
            return
        try:
            self._file.write(self._buffer)
            self._file.flush()
            if self._config.sync == "disk":
                os.fsync(self._file.fileno())
        except OSError as error:
            raise JournalError(f"journal {self._path}: {error}") from error
        self._size += len(self._buffer)
        self._buffer.clear()
        if self._size > self._config.compact_bytes and self._size > 2 * self._live_bytes(core):
            self._rewrite(core)

    def recover(self, core: "ChannelCore") -> None:
        """Bring a fresh channel to the recorded state and remove segments nobody needs."""
        replay(self._records, core)
        self._records = []
        segments = (segment_of(item.payload) for item in held_items(core))
        held = {segment.name for segment in segments if segment is not None}
        for name in os.listdir(self.segments):
            if name not in held:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.segments, name))

    def close(self) -> None:
        """Close the file; it can be recovered from."""
        self._file.close()

    def _rewrite(self, core: "ChannelCore") -> None:
        fresh = self._path.with_suffix(".new")
        self._buffer += _MAGIC
        for record in snapshot(core):
            self.append(record)
        with open(fresh, "wb") as file:
            file.write(self._buffer)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
        self._file.close()
        self._file = open(self._path, "ab")  # noqa: SIM115 (kept open for the journal's life)
        self._lock()
        self._size = len(self._buffer)
        self._buffer.clear()

    def _live_bytes(self, core: "ChannelCore") -> int:
        return sum(_weight(item) for item in held_items(core))

    def _read(self) -> Iterator[tuple[Any, ...]]:
        data = self._path.read_bytes()
        if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
            raise JournalError(f"{self._path} is not a channel's journal; choose another folder")
        at = good = min(len(_MAGIC), len(data))
        while at + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) < length or zlib.crc32(body) != checksum:
                break
            yield pickle.loads(body)
            at = good = at + _HEAD.size + length
        if good < len(data) or len(data) < len(_MAGIC):
            os.truncate(self._path, good if good >= len(_MAGIC) else 0)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(f"journal {self._path} is in use by another broker") from error

    def _next_incarnation(self, path: Path) -> int:
        number = int(path.read_text()) + 1 if path.exists() else 0
        fresh = path.with_suffix(".new")
        fresh.write_text(str(number))
        os.replace(fresh, path)
        return number


def _weight(item: Item) -> int:
    return 256 + (item.nbytes if segment_of(item.payload) is None else 0)
