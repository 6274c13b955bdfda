"""The tool pool and its retrievers: a library on its own, a Ray service, and a search server.

What is exported here imports neither Ray nor torch nor any index; those are modules of their own (``service``,
``server``, ``dense``, ``faiss_index``, ``tantivy_index``, ``qdrant``).
"""

from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.breaker import BreakerConfig
from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.hedge import HedgeConfig
from rlinf_plugins.tools.http import HttpAccessTool, HttpConfig, HttpSearchTool
from rlinf_plugins.tools.index import IndexConfig, build_index, open_index
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.queries import QueryConfig, QueryTool
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome, Passage, Passages, Query, Source, Success
from rlinf_plugins.tools.retriever import Retriever, SearchTool
from rlinf_plugins.tools.retry import RetryConfig
from rlinf_plugins.tools.tool import Tool

__all__ = [
    "BatchConfig",
    "BreakerConfig",
    "CacheConfig",
    "Failure",
    "FailureKind",
    "HedgeConfig",
    "HttpAccessTool",
    "HttpConfig",
    "HttpSearchTool",
    "IndexConfig",
    "Outcome",
    "Passage",
    "Passages",
    "PoolConfig",
    "Query",
    "QueryConfig",
    "QueryTool",
    "Retriever",
    "RetryConfig",
    "SearchTool",
    "Source",
    "Success",
    "Tool",
    "ToolPool",
    "build_index",
    "open_index",
]
