"""The pool as a Ray service: actors that hold the pools, and a client that sends many calls in one hop.

Calls are sharded by their key, so that joins and cache hits hold across all workers of a job. The client is a pool
itself, whose back-end is an actor: calls made while a hop is under way leave together with the next. With autoscaling
each client adds and drops shards by the waits that the actors report; an actor that nobody calls ends by itself.
"""

import asyncio
import itertools
import logging
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import msgspec

from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.core.extras import require
from rlinf_plugins.tools.autoscale import AutoscaleConfig, ShardScaler, jump_hash
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.breaker import BreakerConfig
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome
from rlinf_plugins.tools.retry import RetryConfig
from rlinf_plugins.tools.tool import Request, Tool, Value

_log = logging.getLogger(__name__)

Waits = tuple[int, float]
"""Calls that an actor has sent upstream so far, and the seconds they waited for it in all."""

ToolFactory = Callable[[], Tool[Request, Value] | Sequence[Tool[Request, Value]]]
"""Makes the tool, or its replicas, inside an actor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceConfig:
    """Where the service is and how it is reached.

    Attributes:
        name: The service; equal names within a job share one.
        shards: Actors; with autoscaling, the fewest.
        batch: How the client puts calls together for a hop.
        autoscale: When actors are added and given up.
    """

    name: str = "rlinf-tools"
    shards: int = 1
    batch: BatchConfig = BatchConfig(max_batch=256, max_inflight=8)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)

    def validate(self, where: str) -> None:
        """Reject a service without actors, or one that would start above its limit."""
        if self.shards < 1:
            raise ConfigError(f"{where}.shards must be at least 1, got {self.shards}")
        if 0 < self.autoscale.max_shards < self.shards:
            raise ConfigError(f"{where}.autoscale.max_shards={self.autoscale.max_shards} is below shards={self.shards}")


class PoolHost:
    """What runs in each actor."""

    def __init__(self, factory: ToolFactory[Any, Any], config: PoolConfig, name: str) -> None:
        self._pool: ToolPool[Any, Any] = ToolPool(factory(), config, name=name)
        self._users = 0
        self._used_at = monotonic()

    async def call_many(self, calls: list[tuple[str, Any]], timeout_s: float) -> tuple[list[Outcome[Any]], Waits]:
        """Run (tenant, request) calls; one outcome each, in order, and how long calls have waited here so far."""
        self._users += 1
        try:
            outcomes = await self._run(calls, timeout_s)
        finally:
            self._users -= 1
            self._used_at = monotonic()
        waits = self._pool.metrics.queue_wait
        return outcomes, (waits.count, waits.total)

    async def _run(self, calls: list[tuple[str, Any]], timeout_s: float) -> list[Outcome[Any]]:
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

    async def leave(self, idle_s: float) -> None:
        """End this actor once no client has called it for ``idle_s`` seconds; its name is then free again."""
        while self._users or (left := self._used_at + idle_s - monotonic()) > 0:
            await asyncio.sleep(idle_s if self._users else left)
        await self._pool.close()
        require("ray.actor", "search").exit_actor()


class _ActorTool(Tool[tuple[str, Request], Value], Generic[Request, Value]):
    """An actor as a back-end; a request carries its tenant along."""

    def __init__(
        self, name: str, connect: Callable[[], Any], tool: Tool[Request, Value], waited: Callable[[int, float], None]
    ) -> None:
        self.name = name
        self._connect = connect
        self._actor = connect()
        self._tool = tool
        self._waited = waited
        self._seen: Waits = (0, 0.0)

    async def ready(self) -> None:
        """Wait until the actor has opened its tool."""
        await self._actor.snapshot.remote()

    def leave(self, idle_s: float) -> None:
        """Let the actor end when nobody calls it any more."""
        self._actor.leave.remote(idle_s)

    def key(self, request: tuple[str, Request]) -> Hashable | None:
        return self._tool.key(request[1])

    def check(self, request: tuple[str, Request]) -> Failure | None:
        return self._tool.check(request[1])

    async def run(self, requests: Sequence[tuple[str, Request]], timeout_s: float) -> Sequence[Outcome[Value]]:
        errors = require("ray.exceptions", "search")
        try:
            outcomes, waits = await self._actor.call_many.remote(list(requests), timeout_s)
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
        self._report(waits)
        # The actor has retried and isolated already; its failures are final here.
        return [
            msgspec.structs.replace(outcome, retryable=False, whole_batch=False)
            if isinstance(outcome, Failure)
            else outcome
            for outcome in outcomes
        ]

    def _report(self, waits: Waits) -> None:
        if waits[0] >= self._seen[0]:  # else a new actor, or a reply that another overtook
            self._waited(waits[0] - self._seen[0], waits[1] - self._seen[1])
        self._seen = waits


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
        self._client = PoolConfig(
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
        self._make = _connector(factory, pool)
        self._scaler = ShardScaler(config.autoscale, config.shards)
        self._shards: list[tuple[_ActorTool[Request, Value], ToolPool[tuple[str, Request], Value]]] = []
        self._growing: asyncio.Task[None] | None = None
        for _ in range(config.shards):
            self._add()
        self.shards = config.shards

    async def call(
        self, request: Request, *, tenant: str = "default", timeout_s: float | None = None
    ) -> Outcome[Value]:
        """Run one call; see :meth:`ToolPool.call <rlinf_plugins.tools.pool.ToolPool.call>`."""
        return await self._shard(request).call((tenant, request), tenant=tenant, timeout_s=timeout_s)

    def snapshot(self) -> dict[str, Any]:
        """Return this client's metrics, per shard."""
        return {tool.name: pool.snapshot() for tool, pool in self._shards}

    async def close(self) -> None:
        """Close the client; the actors end with their job."""
        if self._growing is not None:
            self._growing.cancel()
        for _, pool in self._shards:
            await pool.close()

    def _shard(self, request: Request) -> ToolPool[tuple[str, Request], Value]:
        self._scale()
        key = self._tool.key(request)
        if key is None:
            return self._shards[next(self._turn) % self.shards][1]
        # Not hash(): it differs from process to process.
        return self._shards[jump_hash(zlib.crc32(repr(key).encode("utf-8", "surrogatepass")), self.shards)][1]

    def _scale(self) -> None:
        """Follow the scaler; a new shard gets calls once it is ready, one that is given up ends by itself."""
        wanted = self._scaler.shards
        if self._growing is not None or wanted == self.shards:
            return
        if wanted > self.shards:
            self._growing = asyncio.create_task(self._grow())
        else:
            self.shards -= 1
            self._shards[self.shards][0].leave(self.config.autoscale.quiet_s)

    async def _grow(self) -> None:
        try:
            if self.shards == len(self._shards):
                self._add()
            await self._shards[self.shards][0].ready()
            self.shards += 1
        except require("ray.exceptions", "search").RayError as error:
            _log.warning("%s: shard %d could not be added: %s", self.config.name, self.shards, error)
            self._scaler.settle(self.shards)
        finally:
            self._growing = None

    def _add(self) -> None:
        name = f"{self.config.name}-{len(self._shards)}"
        tool = _ActorTool(name, lambda: self._make(name), self._tool, self._scaler.observe)
        self._shards.append((tool, ToolPool(tool, self._client, name=name)))


def _connector(factory: ToolFactory[Any, Any], pool: PoolConfig) -> Callable[[str], Any]:
    def connect(name: str) -> Any:
        ray = require("ray", "search")
        # No CPU of its own: it waits for the network, or for the threads of an index.
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=10_000)(PoolHost)
        return actor.options(name=name, get_if_exists=True).remote(factory, pool, name)

    return connect
