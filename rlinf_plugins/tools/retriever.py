"""What a retriever is, and the tool that runs one in a thread of its own."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from rlinf_plugins.tools.queries import QueryConfig, QueryTool
from rlinf_plugins.tools.results import Outcome, Passage, Passages, Query, Success


class Retriever(Protocol):
    """An index that answers batches of queries; called from one thread at a time.

    ``rlinf_plugins.testing.retrievers.RetrieverConformance`` checks an implementation.
    """

    @property
    def name(self) -> str:
        """Label in metrics."""
        ...

    @property
    def version(self) -> str:
        """Identity of the indexed data; changes whenever results may."""
        ...

    def __len__(self) -> int:
        """Number of passages."""
        ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Passage]]:
        """Return up to ``topk`` passages per query, best first; its first ``k`` are the answer to ``topk=k``."""
        ...

    def close(self) -> None:
        """Release files and memory."""
        ...


class SearchTool(QueryTool):
    """Searches an in-process index without blocking the event loop.

    Args:
        retriever: The index; closed with the tool.
        queries: What counts as a query, and which queries are equal.
        threads: Batches searched at once; more than 1 only where the retriever is safe to share between threads.
    """

    def __init__(self, retriever: Retriever, queries: QueryConfig | None = None, threads: int = 1) -> None:
        self._retriever = retriever
        self.name = retriever.name
        self.version = retriever.version
        super().__init__(queries)
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=f"search-{retriever.name}")

    async def run(self, requests: Sequence[Query], timeout_s: float) -> Sequence[Outcome[Passages]]:
        """Search all queries at once, with the largest ``topk`` among them."""
        texts = [request.text for request in requests]
        topk = max(request.topk for request in requests)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._retriever.search, texts, topk)
        return [Success(tuple(passages[: request.topk])) for passages, request in zip(found, requests, strict=True)]

    async def close(self) -> None:
        """Wait for the search under way, then close the index."""
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self._retriever.close()
