"""The pool of a process: made once per configuration and event loop, shared by all its trajectories."""

import asyncio
from weakref import WeakKeyDictionary

from rlinf_plugins.tools.http import HttpConfig, HttpSearchTool
from rlinf_plugins.tools.index import open_index
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.results import Outcome, Passages, Query
from rlinf_plugins.tools.retriever import SearchTool
from rlinf_plugins.tools.tool import Tool
from rlinf_verl.search.config import SearchR1Config

SearchPool = ToolPool[Query, Passages]

_pools: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, SearchPool]]" = WeakKeyDictionary()


def search_pool(config: SearchR1Config) -> SearchPool:
    """Return the running event loop's pool for ``config``; veRL makes a new agent loop for every trajectory."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    key = repr(config)
    if key not in pools:
        pools[key] = ToolPool(search_tools(config), config.pool, name="search")
    return pools[key]


def search_tools(config: SearchR1Config) -> list[Tool[Query, Passages]]:
    """Return the replicas that ``config`` names."""
    if config.index is not None:
        return [SearchTool(open_index(config.index), config.queries)]
    return [HttpSearchTool(HttpConfig(url=url), config.queries) for url in config.urls]


async def search(pool: SearchPool, query: Query, config: SearchR1Config, tenant: str) -> Outcome[Passages]:
    """Search once, within the configured deadline."""
    return await pool.call(query, tenant=tenant, timeout_s=config.timeout_s)
