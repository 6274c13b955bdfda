"""Qdrant: dense search for corpora beyond one machine's memory; without a server address it runs in this process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.corpus import Corpus
from rlinf_plugins.tools.encoder import Encoder, EncoderConfig
from rlinf_plugins.tools.results import Passage

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class QdrantConfig:
    """Where the vectors are and who makes them.

    Attributes:
        encoder: The model.
        url: A Qdrant server, e.g. ``"http://127.0.0.1:6333"``; None keeps the vectors in the index folder.
        collection: Name of the collection on a server; holds the points of one corpus.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    url: str | None = None
    collection: str = "passages"


class QdrantRetriever:
    """Searches a Qdrant collection.

    Args:
        folder: Holds the vectors where there is no server. Only one process may open it at a time.
        corpus: The passages; point ``n`` is line ``n``.
        version: Identity of both.
        config: The settings.
    """

    name = "qdrant"

    def __init__(self, folder: Path, corpus: Corpus, version: str, config: QdrantConfig) -> None:
        self.version = version
        self._corpus = corpus
        self._collection = config.collection
        self._client = _client(folder, config)
        self._encoder = Encoder(config.encoder)

    @staticmethod
    def build(corpus: Corpus, folder: Path, config: QdrantConfig) -> None:
        """Encode ``corpus`` into the collection, which is made anew."""
        models = require("qdrant_client.models", "search")
        client, encoder = _client(folder, config), Encoder(config.encoder)
        try:
            if client.collection_exists(config.collection):
                client.delete_collection(config.collection)
            vectors = models.VectorParams(size=encoder.width, distance=models.Distance.DOT)
            client.create_collection(config.collection, vectors_config=vectors)
            for start in range(0, len(corpus), _CHUNK):
                rows = list(range(start, min(start + _CHUNK, len(corpus))))
                encoded = encoder.passages([corpus.passage(row).contents for row in rows])
                points = models.Batch(ids=rows, vectors=encoded.tolist())
                client.upsert(config.collection, points=points, wait=True)
        finally:
            client.close()

    def __len__(self) -> int:
        return len(self._corpus)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return the nearest passages, best first; all queries travel in one request."""
        models = require("qdrant_client.models", "search")
        vectors = self._encoder.queries(queries).tolist()
        requests = [models.QueryRequest(query=vector, limit=topk) for vector in vectors]
        replies = self._client.query_batch_points(self._collection, requests=requests)
        return [[self._corpus.passage(int(point.id), point.score) for point in reply.points] for reply in replies]

    def close(self) -> None:
        """Close the client and the corpus."""
        self._client.close()
        self._corpus.close()


def _client(folder: Path, config: QdrantConfig) -> Any:
    qdrant = require("qdrant_client", "search")
    if config.url:
        return qdrant.QdrantClient(url=config.url)
    return qdrant.QdrantClient(path=str(folder / "qdrant"))
