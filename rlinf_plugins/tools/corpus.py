"""A corpus in Search-R1's layout, read in place: one JSON object per line, ``{"id": "0", "contents": ...}``."""

import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rlinf_plugins.core.errors import CorpusError, MissingAssetError
from rlinf_plugins.tools.results import Passage

_decoder = msgspec.json.Decoder()


class Corpus:
    """Random access to the passages of a jsonl file, which stays on disk (memory-mapped).

    Args:
        path: The file.
        offsets: Byte offset of each line, as :meth:`scan` returns; computed where absent.

    Raises:
        MissingAssetError: There is no such file.
        CorpusError: The file holds no passage.
    """

    def __init__(self, path: Path, offsets: npt.NDArray[np.int64] | None = None) -> None:
        if not path.is_file():
            raise MissingAssetError(f"no corpus at {path}: expected a jsonl file with 'id' and 'contents' per line")
        if path.stat().st_size == 0:
            raise CorpusError(f"{path} is empty")
        self.path = path
        self._file = path.open("rb")
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self.offsets = self.scan() if offsets is None else offsets
        if len(self.offsets) == 0:
            raise CorpusError(f"{path} holds no passage")

    def __len__(self) -> int:
        return len(self.offsets)

    def scan(self) -> npt.NDArray[np.int64]:
        """Return the offset of every line that is not blank."""
        offsets, position, end = [], 0, len(self._map)
        while position < end:
            stop = self._map.find(b"\n", position)
            stop = end if stop < 0 else stop
            if self._map[position:stop].strip():
                offsets.append(position)
            position = stop + 1
        return np.asarray(offsets, dtype=np.int64)

    def passage(self, row: int, score: float | None = None) -> Passage:
        """Return the passage in ``row`` (0-based).

        Raises:
            CorpusError: The line is not an object with text in 'contents'.
        """
        start = int(self.offsets[row])
        stop = self._map.find(b"\n", start)
        line = self._map[start : stop if stop >= 0 else len(self._map)]
        try:
            record: Any = _decoder.decode(line)
            contents, identity = record["contents"], record.get("id", row)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise CorpusError(
                f"{self.path}, passage {row} (byte {start}): expected {{'id', 'contents'}}, got {line[:80]!r}"
            ) from error
        if not isinstance(contents, str):
            raise CorpusError(f"{self.path}, passage {row}: 'contents' is {type(contents).__name__}, not text")
        return Passage(str(identity), contents, score)

    def contents(self) -> Iterator[str]:
        """Yield every passage's contents in order; every line is thereby checked."""
        for row in range(len(self)):
            yield self.passage(row).contents

    def fingerprint(self) -> str:
        """Return a digest of the file's bytes."""
        digest = hashlib.sha256()
        for start in range(0, len(self._map), 1 << 22):
            digest.update(self._map[start : start + (1 << 22)])
        return digest.hexdigest()[:16]

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
        self._file.close()
