"""The default retriever: BM25 by bm25s, memory-mapped, scored by numba where it is installed."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.results import Passage

_COMPILE_FROM = 5000
"""Passages from which numba pays: compiling takes seconds, numpy needs 0.4 ms a query at three times that size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bm25Config:
    """How text is indexed and scored.

    Attributes:
        k1: Saturation of term frequency.
        b: Strength of length normalisation.
        language: Snowball stemmer and stop words; None indexes words as they are (other scripts).
    """

    k1: float = 0.9
    b: float = 0.4
    language: Literal["english"] | None = "english"

    def validate(self, where: str) -> None:
        """Reject values outside their range."""
        if self.k1 < 0 or not 0 <= self.b <= 1:
            raise ConfigError(f"{where} needs k1 >= 0 and 0 <= b <= 1, got {self}")


class Bm25Retriever:
    """Searches an index that :meth:`build` wrote.

    Args:
        folder: The index.
        corpus: The passages it was built from.
        version: Identity of both.
        config: The settings it was built with.
    """

    name = "bm25s"

    def __init__(self, folder: Path, corpus: Corpus, version: str, config: Bm25Config | None = None) -> None:
        bm25s = require("bm25s", "search")
        self.version = version
        self._corpus = corpus
        self._index: Any = bm25s.BM25.load(str(folder), mmap=True, load_corpus=False, show_progress=False)
        self._tokenizer = _tokenizer(config or Bm25Config())
        self._tokenizer.load_vocab(str(folder))
        compiled = len(corpus) >= _COMPILE_FROM and importlib.util.find_spec("numba") is not None
        self._index.backend = "numba" if compiled else "numpy"
        if compiled:
            self.search(["warm up"], 1)  # compiles now, for some seconds, rather than in somebody's first query

    @staticmethod
    def build(corpus: Corpus, folder: Path, config: Bm25Config) -> None:
        """Index ``corpus`` into ``folder``."""
        bm25s = require("bm25s", "search")
        tokenizer = _tokenizer(config)
        tokens = tokenizer.tokenize(list(corpus.contents()), return_as="tuple", show_progress=False)
        index = bm25s.BM25(k1=config.k1, b=config.b)
        index.index(tokens, show_progress=False)
        index.save(str(folder), corpus=None, show_progress=False)
        tokenizer.save_vocab(str(folder))

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the passages that share a term with the query, best first."""
        tokens = self._tokenizer.tokenize(
            list(queries), return_as="ids", update_vocab=False, show_progress=False, allow_empty=True
        )
        rows, scores = self._index.retrieve(
            tokens, k=min(topk, len(self._corpus)), show_progress=False, backend_selection="auto"
        )
        return [
            [
                self._corpus.passage(row, score)
                for row, score in zip(row_list, score_list, strict=True)
                if score > 0.0  # bm25s fills up with arbitrary passages that share no term
            ]
            for row_list, score_list in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Close the corpus; the index is unmapped when it is collected."""
        self._corpus.close()


def _tokenizer(config: Bm25Config) -> Any:
    tokenization = require("bm25s.tokenization", "search")
    stemmer = require("Stemmer", "search").Stemmer(config.language) if config.language else None
    return tokenization.Tokenizer(
        stopwords="en" if config.language else [], stemmer=stemmer, splitter=r"(?u)\b\w+\b", lower=True
    )
