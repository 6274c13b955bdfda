"""tantivy: BM25 with a small memory footprint and incremental updates; slower than bm25s."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.results import Passage

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TantivyConfig:
    """How text is indexed.

    Attributes:
        tokenizer: ``en_stem`` stems English; ``default`` indexes words as they are.
        heap_mb: Memory of the writer while building, in MiB.
    """

    tokenizer: str = "en_stem"
    heap_mb: int = 128


class TantivyRetriever:
    """Searches an index that :meth:`build` wrote.

    Args:
        folder: The index.
        corpus: The passages it was built from.
        version: Identity of both.
        config: The settings it was built with.
    """

    name = "tantivy"

    def __init__(self, folder: Path, corpus: Corpus, version: str, config: TantivyConfig) -> None:
        tantivy = require("tantivy", "search")
        self.version = version
        self._corpus = corpus
        self._index = tantivy.Index.open(str(folder / "tantivy"))
        self._searcher = self._index.searcher()

    @staticmethod
    def build(corpus: Corpus, folder: Path, config: TantivyConfig) -> None:
        """Index ``corpus`` into ``folder``."""
        tantivy = require("tantivy", "search")
        schema = tantivy.SchemaBuilder()
        schema.add_text_field("contents", stored=False, tokenizer_name=config.tokenizer)
        schema.add_unsigned_field("row", stored=True)
        target = folder / "tantivy"
        target.mkdir()
        index = tantivy.Index(schema.build(), path=str(target))
        writer = index.writer(heap_size=config.heap_mb << 20, num_threads=1)
        for row, contents in enumerate(corpus.contents()):
            writer.add_document(tantivy.Document(contents=contents, row=row))
        writer.commit()
        writer.wait_merging_threads()

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the passages that share a term with the query, best first."""
        return [self._one(query, topk) for query in queries]

    def close(self) -> None:
        """Close the corpus."""
        self._corpus.close()

    def _one(self, query: str, topk: int) -> list[Passage]:
        # Words only, in lower case: the query language's operators (AND, quotes, colons) mean nothing here.
        words = " ".join(_WORD.findall(query.lower()))
        if not words:
            return []
        hits = self._searcher.search(self._index.parse_query(words, ["contents"]), limit=topk).hits
        return [self._corpus.passage(self._searcher.doc(address)["row"][0], score) for score, address in hits]
