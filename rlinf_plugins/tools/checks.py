"""Checks this part adds to ``rlinf-plugins doctor``."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator

from rlinf_plugins.core.doctor import CheckResult

_PACKAGES = (
    ("bm25s", "bm25s", "the default retriever"),
    ("Stemmer", "PyStemmer", "stemming for bm25"),
    ("numba", "numba", "fast scoring for bm25"),
    ("tantivy", "tantivy", "the retriever tantivy"),
    ("faiss", "faiss-cpu", "the retriever faiss"),
    ("qdrant_client", "qdrant-client", "the retriever qdrant"),
)
"""Module, distribution, what it is for."""


def checks() -> Iterator[CheckResult]:
    """Yield whether each retriever's package is there; a search server elsewhere needs none of them."""
    for module, distribution, purpose in _PACKAGES:
        if importlib.util.find_spec(module) is None:
            yield CheckResult(
                feature="search",
                name=purpose,
                status="absent",
                detail=f"{distribution} is not installed",
                fix="pip install 'rlinf-plugins[search]' (not needed where searches go to a server)",
            )
        else:
            version = importlib.metadata.version(distribution)
            yield CheckResult(feature="search", name=purpose, status="ok", detail=f"{distribution} {version}")
