"""The pool: many concurrent calls become few batches, each call ends by its deadline, equal calls share one answer."""

import asyncio
import random
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Generic

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import ConfigError, PoolClosedError
from rlinf_plugins.tools.backends import BackendGroup
from rlinf_plugins.tools.batching import BatchPolicy
from rlinf_plugins.tools.cache import ResultCache
from rlinf_plugins.tools.fair_queue import FairQueue
from rlinf_plugins.tools.metrics import PoolMetrics
from rlinf_plugins.tools.pool_config import PoolConfig
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome, Source, Success
from rlinf_plugins.tools.retry import retry_delay
from rlinf_plugins.tools.tool import Request, Tool, Value


class _Flight(Generic[Request, Value]):
    """One execution and everybody who waits for it."""

    __slots__ = ("attempts", "deadline", "enqueued", "key", "live", "request", "waiters")

    def __init__(self, request: Request, key: Hashable | None, now: float) -> None:
        self.request = request
        self.key = key
        self.enqueued = now
        self.deadline = now
        self.attempts = 0
        self.waiters: list[asyncio.Future[Outcome[Value]]] = []
        self.live = 0


class ToolPool(Generic[Request, Value]):
    """Runs a tool's calls. All methods belong to one event loop.

    Args:
        tool: The tool, or its replicas.
        config: Settings.
        name: Label in metrics.
        clock: Source of monotonic seconds for queueing, cache, breakers and metrics.
        rng: Source of retry jitter.
    """

    def __init__(
        self,
        tool: Tool[Request, Value] | Sequence[Tool[Request, Value]],
        config: PoolConfig | None = None,
        *,
        name: str | None = None,
        clock: Clock = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.config = config = config or PoolConfig()
        tools = [tool] if isinstance(tool, Tool) else list(tool)
        if not tools:
            raise ConfigError("a pool needs at least one replica of its tool")
        self._tool = tools[0]
        self.metrics = PoolMetrics(name or self._tool.name)
        self._clock = clock
        self._rng = rng or random.Random()
        self._backends = BackendGroup(tools, config.breaker, config.hedge, clock, self.metrics)
        self._cache = ResultCache(config.cache, clock)
        self._policy = BatchPolicy(config.batch)
        self._queue: FairQueue[_Flight[Request, Value]] = FairQueue(config.queue, config.weights)
        self._isolated: deque[list[_Flight[Request, Value]]] = deque()
        self._flights: dict[Hashable, _Flight[Request, Value]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._held: set[_Flight[Request, Value]] = set()
        self._inflight = 0
        self._pump_scheduled = False
        self._linger: asyncio.TimerHandle | None = None
        self._oldest = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def call(
        self, request: Request, *, tenant: str = "default", timeout_s: float | None = None
    ) -> Outcome[Value]:
        """Run one call.

        Args:
            request: What the tool takes.
            tenant: Whose share of the queue it uses, e.g. ``"train"`` or ``"val"``.
            timeout_s: Seconds until the call ends with a ``deadline`` failure at the latest.

        Returns:
            The value, or a typed failure; never raises for what the tool or its upstream does.

        Raises:
            PoolClosedError: The pool is closed, or belongs to another event loop.
        """
        start = self._clock()
        outcome = self._immediate(request)
        if outcome is None:
            outcome = await self._wait(request, tenant, start, timeout_s or self.config.timeout_s)
        self.metrics.latency.observe(self._clock() - start)
        self.metrics.count(outcome.source.value if isinstance(outcome, Success) else outcome.kind.value)
        return outcome

    async def call_many(
        self, requests: Sequence[Request], *, tenant: str = "default", timeout_s: float | None = None
    ) -> list[Outcome[Value]]:
        """Run several calls at once; one outcome per request, in order."""
        if len(requests) == 1:
            return [await self.call(requests[0], tenant=tenant, timeout_s=timeout_s)]
        calls = (self.call(request, tenant=tenant, timeout_s=timeout_s) for request in requests)
        return list(await asyncio.gather(*calls))

    def snapshot(self) -> dict[str, Any]:
        """Return the pool's metrics as plain numbers."""
        return self.metrics.snapshot()

    async def close(self) -> None:
        """Fail what waits, cancel what runs and close the tool. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for timer in (*self._timers, *([self._linger] if self._linger else [])):
            timer.cancel()
        failure = Failure(kind=FailureKind.CLOSED, message="the pool was closed")
        waiting = self._queue.drain() + [flight for group in self._isolated for flight in group] + list(self._held)
        for flight in waiting:
            self._finish(flight, failure)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backends.close()

    def _immediate(self, request: Request) -> Outcome[Value] | None:
        """Return the outcome where it is known without waiting."""
        loop = asyncio.get_running_loop()
        if self._closed or self._loop not in (None, loop):
            raise PoolClosedError(
                f"pool {self.metrics.pool!r} " + ("is closed" if self._closed else "belongs to another event loop")
            )
        self._loop = loop
        failure = self._tool.check(request)
        if failure is not None:
            return failure
        key = self._tool.key(request)
        value = None if key is None else self._cache.get(self._tool.version, key)
        return None if value is None else Success(value, Source.CACHED)

    async def _wait(self, request: Request, tenant: str, now: float, timeout_s: float) -> Outcome[Value]:
        key = self._tool.key(request)
        flight = self._flights.get(key) if key is not None else None
        joined = flight is not None
        if flight is None:
            flight = _Flight(request, key, now)
            refused = self._enqueue(flight, tenant, now)
            if refused is not None:
                return refused
        flight.deadline = max(flight.deadline, now + timeout_s)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome[Value]] = loop.create_future()
        flight.waiters.append(future)
        flight.live += 1
        timer = loop.call_later(timeout_s, _expire, future, timeout_s)
        try:
            outcome = await future
        finally:
            flight.live -= 1
            timer.cancel()
        if joined and isinstance(outcome, Success):
            return Success(outcome.value, Source.JOINED)
        return outcome

    def _enqueue(self, flight: _Flight[Request, Value], tenant: str, now: float) -> Failure | None:
        if not self._queue:
            self._oldest = now
        admitted, displaced = self._queue.push(tenant, flight)
        if displaced is not None:
            self._finish(displaced, self._overloaded(tenant))
        if not admitted:
            return self._overloaded(tenant)
        if flight.key is not None and self.config.single_flight:
            self._flights[flight.key] = flight
        self._kick()
        return None

    def _overloaded(self, tenant: str) -> Failure:
        message = f"{len(self._queue)} calls wait and tenant {tenant!r} has its share; raise 'queue' or add replicas"
        return Failure(kind=FailureKind.OVERLOADED, message=message, retryable=True)

    def _kick(self) -> None:
        # One pump per turn of the loop, so that calls made in the same turn leave together.
        if not self._pump_scheduled and not self._closed:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        while not self._closed:
            if self._isolated and self._inflight < self.config.batch.max_inflight:
                self._start(self._isolated.popleft())
                continue
            count, ask_again = self._policy.due(len(self._queue), self._inflight, self._clock() - self._oldest)
            if count == 0:
                if ask_again is not None:
                    self._linger = asyncio.get_running_loop().call_later(ask_again, self._kick)
                break
            self._start(self._queue.pop(count, self._is_wanted))
            self._oldest = self._clock()
        self.metrics.queued = len(self._queue)
        self.metrics.inflight = self._inflight

    def _start(self, flights: list[_Flight[Request, Value]]) -> None:
        if not flights:
            return
        self._inflight += 1
        task = asyncio.get_running_loop().create_task(self._serve(flights))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, flights: list[_Flight[Request, Value]]) -> None:
        start = self._clock()
        metrics = self.metrics
        metrics.batches += 1
        metrics.upstream_items += len(flights)
        metrics.batch_size.observe(len(flights))
        for flight in flights:
            flight.attempts += 1
            if flight.attempts == 1:
                metrics.queue_wait.observe(start - flight.enqueued)
        self._held.update(flights)
        timeout_s = min(self.config.attempt_timeout_s, max(f.deadline for f in flights) - start)
        version = self._tool.version
        try:
            outcomes = await self._backends.run([f.request for f in flights], max(timeout_s, 1e-3))
        finally:
            self._inflight -= 1
            self._kick()
        self._held.difference_update(flights)
        self._policy.observe(len(flights), self._clock() - start)
        self._settle(flights, outcomes, version)

    def _settle(self, flights: list[_Flight[Request, Value]], outcomes: Sequence[Outcome[Value]], version: str) -> None:
        again: list[_Flight[Request, Value]] = []
        soonest = 0.0
        for flight, outcome in zip(flights, outcomes, strict=True):
            if isinstance(outcome, Success):
                if flight.key is not None:
                    self._cache.put(version, flight.key, outcome.value)
                self._finish(flight, outcome)
                continue
            delay = self._retry_after(flight, outcome, len(flights))
            if delay is None:
                self._finish(flight, outcome)
            else:
                again.append(flight)
                soonest = max(soonest, delay)
        if again:
            self._later(again, soonest, split=len(flights) > 1)

    def _retry_after(self, flight: _Flight[Request, Value], failure: Failure, size: int) -> float | None:
        left = flight.deadline - self._clock()
        if failure.whole_batch and size > 1 and failure.kind in _SUSPECT and left > 0 and flight.live:
            flight.attempts -= 1  # what failed may be a neighbour: halving the batch is not yet a retry of this call
            return 0.0
        return retry_delay(self.config.retry, failure, flight.attempts, left, self._rng.random())

    def _later(self, flights: list[_Flight[Request, Value]], delay: float, *, split: bool) -> None:
        groups = [flights]
        if split and len(flights) > 1:
            self.metrics.splits += 1
            half = len(flights) // 2
            groups = [flights[:half], flights[half:]]
        self.metrics.retries += len(flights)
        self._held.update(flights)

        def release() -> None:
            self._timers.discard(timer)
            self._held.difference_update(flights)
            self._isolated.extend([f for f in group if self._is_wanted(f)] for group in groups)
            self._kick()

        timer = asyncio.get_running_loop().call_later(delay, release)
        self._timers.add(timer)

    def _finish(self, flight: _Flight[Request, Value], outcome: Outcome[Value]) -> None:
        self._forget(flight)
        for future in flight.waiters:
            if not future.done():
                future.set_result(outcome)

    def _is_wanted(self, flight: _Flight[Request, Value]) -> bool:
        """Say whether anybody still waits; a flight that nobody wants is forgotten."""
        if flight.live:
            return True
        self._forget(flight)
        return False

    def _forget(self, flight: _Flight[Request, Value]) -> None:
        if flight.key is not None and self._flights.get(flight.key) is flight:
            del self._flights[flight.key]


_SUSPECT = frozenset({FailureKind.STATUS, FailureKind.BAD_REPLY, FailureKind.TOOL_ERROR})
"""Kinds of whole-batch failures that a single bad call can cause."""


def _expire(future: asyncio.Future[Any], timeout_s: float) -> None:
    if not future.done():
        message = f"no reply within the call's {timeout_s:.2f} s"
        future.set_result(Failure(kind=FailureKind.DEADLINE, message=message, retryable=True))
