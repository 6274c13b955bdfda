"""The pool as a Ray service: actors that hold the pools, and a client that sends many calls in one hop.

Calls are sharded by their key, so that joins and cache hits hold across all workers of a job. The client is a pool
itself, whose back-end is an actor: calls made while a hop is under way leave together with the next.
"""

import asyncio
import itertools
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import msgspec

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.breaker import BreakerConfig
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome
from rlinf_plugins.tools.retry import RetryConfig
from rlinf_plugins.tools.tool import Request, Tool, Value

ToolFactory = Callable[[], Tool[Request, Value] | Sequence[Tool[Request, Value]]]
"""Makes the tool, or its replicas, inside an actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Where the service is and how it is reached.

    Attributes:
        name: The service; equal names within a job share one.
        shards: Actors.
        batch: How the client puts calls together for a hop.
    """

    name: str = "rlinf-tools"
    shards: int = 1
    batch: BatchConfig = BatchConfig(max_batch=256, max_inflight=8)

    def validate(self, where: str) -> None:
        """Reject a service without actors."""
        if self.shards < 1:
            raise ConfigError(f"{where}.shards must be at least 1, got {self.shards}")


class PoolHost:
    """What runs in each actor."""

    def __init__(self, factory: ToolFactory[Any, Any], config: PoolConfig, name: str) -> None:
        self._pool: ToolPool[Any, Any] = ToolPool(factory(), config, name=name)

    async def call_many(self, calls: list[tuple[str, Any]], timeout_s: float) -> list[Outcome[Any]]:
        """Run (tenant, request) calls; one outcome each, in order."""
        tenants = {tenant for tenant, _ in calls}
        if len(tenants) == 1:
            return await self._pool.call_many([r for _, r in calls], tenant=tenants.pop(), timeout_s=timeout_s)
        outcomes: dict[int, Outcome[Any]] = {}
        lanes = [[i for i, (tenant, _) in enumerate(calls) if tenant == name] for name in sorted(tenants)]
        jobs = [
            self._pool.call_many([calls[i][1] for i in lane], tenant=calls[lane[0]][0], timeout_s=timeout_s)
            for lane in lanes
        ]
        for lane, results in zip(lanes, await asyncio.gather(*jobs), strict=True):
            outcomes.update(zip(lane, results, strict=True))
        return [outcomes[i] for i in range(len(calls))]

    async def snapshot(self) -> dict[str, Any]:
        """Return the pool's metrics."""
        return self._pool.snapshot()

    async def close(self) -> None:
        """Close the pool and its tool."""
        await self._pool.close()


class _ActorTool(Tool[tuple[str, Request], Value], Generic[Request, Value]):
    """An actor as a back-end; a request carries its tenant along."""

    def __init__(self, name: str, connect: Callable[[], Any], tool: Tool[Request, Value]) -> None:
        self.name = name
        self._connect = connect
        self._actor = connect()
        self._tool = tool

    def key(self, request: tuple[str, Request]) -> Hashable | None:
        return self._tool.key(request[1])

    def check(self, request: tuple[str, Request]) -> Failure | None:
        return self._tool.check(request[1])

    async def run(self, requests: Sequence[tuple[str, Request]], timeout_s: float) -> Sequence[Outcome[Value]]:
        errors = require("ray.exceptions", "search")
        try:
            outcomes = await self._actor.call_many.remote(list(requests), timeout_s)
        except errors.RayActorError as error:  # the actor is restarted by Ray, or made anew by the next connect
            self._actor = self._connect()
            cause = (str(error).strip() or type(error).__name__).splitlines()[-1]
            failure = Failure(
                kind=FailureKind.UNAVAILABLE,
                message=f"{self.name} died: {cause}",
                retryable=True,
                whole_batch=True,
            )
            return [failure] * len(requests)
        # The actor has retried and isolated already; its failures are final here.
        return [
            msgspec.structs.replace(outcome, retryable=False, whole_batch=False)
            if isinstance(outcome, Failure)
            else outcome
            for outcome in outcomes
        ]


class ToolService(Generic[Request, Value]):
    """The client: as :class:`~rlinf_plugins.tools.pool.ToolPool`, but the work is done in shared actors.

    Args:
        tool: Gives keys and checks; is never run here.
        factory: Makes the tool inside an actor; pickled.
        config: Name and size of the service.
        pool: Settings of the actors' pools.
    """

    def __init__(
        self,
        tool: Tool[Request, Value],
        factory: ToolFactory[Request, Value],
        config: ServiceConfig | None = None,
        pool: PoolConfig | None = None,
    ) -> None:
        self.config = config = config or ServiceConfig()
        pool = pool or PoolConfig()
        self._tool = tool
        self._turn = itertools.count()
        # One more attempt covers an actor that died; everything else was retried where it happened.
        client = PoolConfig(
            timeout_s=pool.timeout_s,
            attempt_timeout_s=pool.timeout_s + 1.0,
            queue=pool.queue,
            single_flight=pool.single_flight,
            weights=pool.weights,
            batch=config.batch,
            cache=pool.cache,  # a group's trajectories share a worker: most repeats need no hop at all
            retry=RetryConfig(retries=2, base_s=0.2, cap_s=2.0),
            breaker=BreakerConfig(failures=0),
        )
        self._shards = []
        for index in range(config.shards):
            name = f"{config.name}-{index}"
            actor_tool = _ActorTool(name, _connector(name, factory, pool), tool)
            self._shards.append(ToolPool(actor_tool, client, name=name))

    async def call(
        self, request: Request, *, tenant: str = "default", timeout_s: float | None = None
    ) -> Outcome[Value]:
        """Run one call; see :meth:`ToolPool.call <rlinf_plugins.tools.pool.ToolPool.call>`."""
        return await self._shard(request).call((tenant, request), tenant=tenant, timeout_s=timeout_s)

    def snapshot(self) -> dict[str, Any]:
        """Return this client's metrics, per shard."""
        return {shard.metrics.pool: shard.snapshot() for shard in self._shards}

    async def close(self) -> None:
        """Close the client; the actors end with their job."""
        for shard in self._shards:
            await shard.close()

    def _shard(self, request: Request) -> ToolPool[tuple[str, Request], Value]:
        key = self._tool.key(request)
        # Not hash(): it differs from process to process.
        number = next(self._turn) if key is None else zlib.crc32(repr(key).encode("utf-8", "surrogatepass"))
        return self._shards[number % len(self._shards)]


def _connector(name: str, factory: ToolFactory[Any, Any], pool: PoolConfig) -> Callable[[], Any]:
    def connect() -> Any:
        ray = require("ray", "search")
        # No CPU of its own: it waits for the network, or for the threads of an index.
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=10_000)(PoolHost)
        return actor.options(name=name, get_if_exists=True).remote(factory, pool, name)

    return connect
