"""faiss: Search-R1's published indexes as they are, or flat and HNSW ones of our own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlinf_plugins.core.errors import IndexVersionError, MissingAssetError
from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.encoder import Encoder, EncoderConfig, encode_corpus
from rlinf_plugins.tools.results import Passage


@dataclass(frozen=True, kw_only=True, slots=True)
class FaissConfig:
    """Which index, and who encodes.

    Attributes:
        encoder: The model; for a published index the one it was made with.
        file: An existing index, e.g. Search-R1's ``e5_Flat.index``; its rows must be the corpus' lines. Absent, an
            index of ``kind`` is built.
        kind: ``flat`` (exact) or ``hnsw``.
        ef_search: HNSW's breadth of search.
        nprobe: Cells visited in an IVF index.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    file: str | None = None
    kind: Literal["flat", "hnsw"] = "flat"
    ef_search: int = 64
    nprobe: int = 16


class FaissRetriever:
    """Searches a faiss index.

    Args:
        folder: Where :meth:`build` wrote an index of our own.
        corpus: The passages, in the order of the index' rows.
        version: Identity of both.
        config: The settings.

    Raises:
        MissingAssetError: ``file`` does not exist.
        IndexVersionError: The index and the corpus differ in length, or index and encoder in width.
    """

    name = "faiss"

    def __init__(self, folder: Path, corpus: Corpus, version: str, config: FaissConfig) -> None:
        faiss = require("faiss", "search")
        path = Path(config.file) if config.file else folder / "index.faiss"
        if not path.is_file():
            raise MissingAssetError(f"no faiss index at {path}")
        self.version = version
        self._corpus = corpus
        self._index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        if self._index.ntotal != len(corpus):
            raise IndexVersionError(
                f"{path} has {self._index.ntotal} rows and {corpus.path} {len(corpus)} passages: not made for another"
            )
        self._encoder = Encoder(config.encoder)
        if self._index.d != self._encoder.width:
            raise IndexVersionError(
                f"{path} holds vectors of {self._index.d} components, {config.encoder.model} makes "
                f"{self._encoder.width}: not the model the index was made with"
            )
        if hasattr(self._index, "hnsw"):
            self._index.hnsw.efSearch = config.ef_search
        if hasattr(self._index, "nprobe"):
            self._index.nprobe = config.nprobe

    @staticmethod
    def build(corpus: Corpus, folder: Path, config: FaissConfig) -> None:
        """Build an index of our own; nothing where one exists as a file."""
        if config.file:
            return
        faiss = require("faiss", "search")
        encoder = Encoder(config.encoder)
        if config.kind == "hnsw":
            index = faiss.IndexHNSWFlat(encoder.width, 32, faiss.METRIC_INNER_PRODUCT)
        else:
            index = faiss.IndexFlatIP(encoder.width)
        index.add(encode_corpus(encoder, list(corpus.contents())))
        faiss.write_index(index, str(folder / "index.faiss"))

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the nearest passages, best first; fewer where the index finds fewer (it then answers -1)."""
        scores, rows = self._index.search(self._encoder.queries(queries), min(topk, len(self._corpus)))
        return [
            [
                self._corpus.passage(row, score)
                for row, score in zip(row_list, score_list, strict=True)
                if row >= 0  # -1 is "nothing found", not the last passage
            ]
            for row_list, score_list in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Close the corpus; the index is unmapped when it is collected."""
        self._corpus.close()
