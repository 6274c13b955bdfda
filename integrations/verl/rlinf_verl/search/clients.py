"""The pool of a process: made once per configuration and event loop, shared by all its trajectories."""

import asyncio
import zlib
from typing import Protocol
from weakref import WeakKeyDictionary

from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.index import open_index
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.queries import QueryTool
from rlinf_plugins.tools.results import Outcome, Passages, Query
from rlinf_plugins.tools.retriever import SearchTool
from rlinf_plugins.tools.service import ServiceConfig, ToolService
from rlinf_plugins.tools.tool import Tool
from rlinf_verl.search.config import SearchR1Config


class SearchPool(Protocol):
    """A pool in this process, or the client of one in Ray actors."""

    async def call(
        self, request: Query, *, tenant: str = "default", timeout_s: float | None = None
    ) -> Outcome[Passages]:
        """Search once."""
        ...


_pools: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SearchPool]]" = WeakKeyDictionary()


def search_pool(config: SearchR1Config) -> SearchPool:
    """Return the running event loop's pool for ``config``; veRL makes a new agent loop for every trajectory."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = repr(config)
    if key not in pools:
        pools[key] = _make(config, key)
    return pools[key]


def search_tools(config: SearchR1Config) -> list[Tool[Query, Passages]]:
    """Return the replicas that ``config`` names."""
    if config.index is not None:
        return [SearchTool(open_index(config.index), config.queries)]
    return [HttpSearchTool(HttpConfig(url=url), config.queries) for url in config.urls]


def _make(config: SearchR1Config, key: str) -> SearchPool:
    if not config.shards:
        return ToolPool(search_tools(config), config.pool, name="search")
    # Agent-loop workers of one job that are configured alike share one service.
    name = f"rlinf-search-{zlib.crc32(key.encode()):08x}"
    service = ServiceConfig(name=name, shards=config.shards, autoscale=config.autoscale)
    return ToolService(QueryTool(config.queries), lambda: search_tools(config), service, config.pool)
