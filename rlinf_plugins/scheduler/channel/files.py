"""The broker's side of the data plane: stores what comes over the network, removes what nobody needs any more."""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rlinf_plugins.scheduler.channel import segments
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.model import Entry
from rlinf_plugins.scheduler.channel.payload import Packer, Relayed, Rows, Segment, Shelved, segment_of

_WORTH_KEEPING = 1 << 20
_KEPT = 16
_SPARE_BYTES = 512 << 20


class Files:
    """The segments of one channel.

    Args:
        directory: Where they are.
        config: Options of the channel.
    """

    def __init__(self, directory: str, config: ChannelConfig) -> None:
        self._directory = directory
        sync = config.journal is not None and config.journal.sync == "disk"
        self._packer = Packer(directory, f"relay-{os.getpid()}", config.inline_bytes, "segment", sync)
        self._rows_left: dict[str, int] = {}
        # A journal's files must be there after a crash exactly if their items are: none is used for another.
        self._spare_bytes = min(config.max_bytes // 4, _SPARE_BYTES) if config.journal is None else 0
        self._free = os.path.join(directory, segments.FREE)

    def adopt(self, payloads: Iterable[Any]) -> None:
        """Count the rows of each segment that a journal has brought back."""
        names = Counter(p.batch.name for p in payloads if isinstance(p, Rows) and isinstance(p.batch, Segment))
        self._rows_left.update(names)

    def land(self, entries: list[Entry]) -> list[Entry]:
        """Store what came over the network; rows of one batch share what is stored."""
        stored: dict[int, Any] = {}
        return [entry._replace(payload=self._store(entry.payload, stored)) for entry in entries]

    def release(self, payload: Any) -> None:
        """An item is gone: remove its segment, unless other rows live in it."""
        segment = segment_of(payload)
        if segment is None:
            return
        if isinstance(payload, Rows):
            left = self._rows_left.pop(segment.name, payload.total) - 1
            if left > 0:
                self._rows_left[segment.name] = left
                return
        path = os.path.join(self._directory, segment.name)
        with suppress(FileNotFoundError):  # a repeated release after a restart
            if not self._keep(path, segment):
                os.unlink(path)

    def _keep(self, path: str, segment: Segment) -> bool:
        """Keep a file for the next item, if it is worth it and few are kept."""
        size = segment.layout[-1][0] + segment.layout[-1][1]
        if not _WORTH_KEEPING <= size <= self._spare_bytes:
            return False
        os.makedirs(self._free, exist_ok=True)
        sizes = []
        for entry in os.scandir(self._free):
            with suppress(FileNotFoundError):  # a producer took it
                sizes.append(entry.stat().st_size)
        if len(sizes) >= _KEPT or sum(sizes) + size > self._spare_bytes:
            return False
        os.rename(path, os.path.join(self._free, segment.name))
        return True

    def _store(self, payload: Any, stored: dict[int, Any]) -> Any:
        if isinstance(payload, Rows):
            return payload._replace(batch=self._store(payload.batch, stored))
        if isinstance(payload, Shelved):
            return payload._replace(rest=self._store(payload.rest, stored))
        if not isinstance(payload, Relayed):
            return payload
        if id(payload) not in stored:
            stored[id(payload)] = self._packer.store(payload.head, payload.buffers)
        return stored[id(payload)]
