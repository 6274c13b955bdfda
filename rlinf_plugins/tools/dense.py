"""Exact dense search: one matrix product for a whole batch, the best candidates scored again in fp32.

Vectors are kept in bf16. A processor that cannot multiply them turns them into fp32 some thousand rows at a time, once
for the whole batch. On a CPU a batch of 128 costs about as much as a few single queries, because the product is bound
by reading the matrix; that is why the pool's coalescing pays most here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_plugins.core.cpu import has_bf16
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.encoder import Encoder, EncoderConfig, encode_corpus
from rlinf_plugins.tools.results import Passage


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseConfig:
    """How vectors are made and searched.

    Attributes:
        encoder: The model.
        rows: Passages scored per product; bounds the memory of a batch's scores, and of the fp32 copies.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    rows: int = 1 << 12

    def validate(self, where: str) -> None:
        """Reject a product without rows."""
        if self.rows < 1:
            raise ConfigError(f"{where}.rows must be at least 1, got {self.rows}")


class DenseRetriever:
    """Searches vectors that :meth:`build` wrote; the file is memory-mapped.

    Args:
        folder: The index.
        corpus: The passages it was built from.
        version: Identity of both.
        config: The settings it was built with.
    """

    name = "dense"

    def __init__(self, folder: Path, corpus: Corpus, version: str, config: DenseConfig) -> None:
        torch = require("torch", "search")
        self.version = version
        self._torch = torch
        self._corpus = corpus
        self._rows = config.rows
        self._encoder = Encoder(config.encoder)
        # numpy knows no bfloat16: the file holds its bits. Mapped copy-on-write, since torch wants writable memory.
        bits = np.load(folder / "vectors.npy", mmap_mode="c")
        self._vectors: Any = torch.from_numpy(bits).view(torch.bfloat16)

    @staticmethod
    def build(corpus: Corpus, folder: Path, config: DenseConfig) -> None:
        """Encode ``corpus`` into ``folder``."""
        torch = require("torch", "search")
        vectors = torch.from_numpy(encode_corpus(Encoder(config.encoder), list(corpus.contents())))
        np.save(folder / "vectors.npy", vectors.to(torch.bfloat16).view(torch.int16).numpy())

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the passages with the largest inner product, best first."""
        torch = self._torch
        wanted = min(topk, len(self._corpus))
        # bf16 scores are coarse: enough candidates are kept that the true best are among them.
        candidates = min(max(4 * wanted, 64), len(self._corpus))
        with torch.inference_mode():
            vectors = torch.from_numpy(self._encoder.queries(queries))
            # One query is bound by reading the vectors, which are half the size in bf16.
            kind = torch.bfloat16 if has_bf16() or len(queries) == 1 else torch.float32
            narrow = vectors.to(kind)
            best: Any = None
            rows: Any = None
            for start in range(0, len(self._vectors), self._rows):
                scores = narrow @ self._vectors[start : start + self._rows].to(kind).T
                part = scores.topk(min(candidates, scores.shape[1]), dim=1)
                values, index = part.values, part.indices + start
                if best is not None:
                    values, index = torch.cat([best, values], dim=1), torch.cat([rows, index], dim=1)
                    kept = values.topk(min(candidates, values.shape[1]), dim=1)
                    values, index = kept.values, index.gather(1, kept.indices)
                best, rows = values, index
            exact = torch.einsum("qcd,qd->qc", self._vectors[rows].float(), vectors)
            final = exact.topk(wanted, dim=1)
            chosen = rows.gather(1, final.indices)
        return [
            [self._corpus.passage(row, score) for row, score in zip(row_list, score_list, strict=True)]
            for row_list, score_list in zip(chosen.tolist(), final.values.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Close the corpus; the vectors are unmapped when they are collected."""
        self._corpus.close()
