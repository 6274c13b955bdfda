"""The replicas of one tool: least-loaded choice, circuit breakers, hedging, and one boundary for exceptions."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Generic

from rlinf_plugins.core.clock import Clock
from rlinf_plugins.tools.breaker import BreakerConfig, CircuitBreaker
from rlinf_plugins.tools.hedge import HedgeConfig, HedgePolicy
from rlinf_plugins.tools.metrics import PoolMetrics
from rlinf_plugins.tools.results import Failure, FailureKind, Outcome
from rlinf_plugins.tools.tool import Request, Tool, Value

_log = logging.getLogger(__name__)

_UPSTREAM_FAULTS = frozenset(
    {FailureKind.TIMEOUT, FailureKind.UNAVAILABLE, FailureKind.STATUS, FailureKind.BAD_REPLY, FailureKind.OVERLOADED}
)


class _Replica(Generic[Request, Value]):
    __slots__ = ("breaker", "inflight", "label", "tool")

    def __init__(self, tool: Tool[Request, Value], label: str, breaker: CircuitBreaker) -> None:
        self.tool = tool
        self.label = label
        self.breaker = breaker
        self.inflight = 0


class BackendGroup(Generic[Request, Value]):
    """Runs batches on the replicas of a tool.

    Args:
        tools: The replicas; all answer the same requests alike.
        breaker: Thresholds of each replica's circuit.
        hedge: When to ask a second replica.
        clock: Source of monotonic seconds.
        metrics: Where hedges, upstream times and breaker states are counted.
    """

    def __init__(
        self,
        tools: Sequence[Tool[Request, Value]],
        breaker: BreakerConfig,
        hedge: HedgeConfig,
        clock: Clock,
        metrics: PoolMetrics,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._hedge = HedgePolicy(hedge)
        labels = [f"{tool.name}/{index}" for index, tool in enumerate(tools)]
        self._replicas = [
            _Replica(tool, label, CircuitBreaker(breaker, clock)) for tool, label in zip(tools, labels, strict=True)
        ]

    async def run(self, requests: Sequence[Request], timeout_s: float) -> Sequence[Outcome[Value]]:
        """Answer a batch: one outcome per request, whatever happens."""
        replica = self._choose(())
        if replica is None:
            wait = min(r.breaker.retry_after_s for r in self._replicas)
            message = f"all {len(self._replicas)} replicas are failing; the next probe is in {wait:.1f} s"
            failure = Failure(
                kind=FailureKind.UNAVAILABLE, message=message, retryable=True, retry_after_s=wait, whole_batch=True
            )
            return [failure] * len(requests)
        slow_after = self._hedge.delay() if len(self._replicas) > 1 else None
        if slow_after is None or slow_after >= timeout_s:
            return await self._attempt(replica, requests, timeout_s)
        return await self._hedged(replica, requests, timeout_s, slow_after)

    async def close(self) -> None:
        """Close all replicas."""
        await asyncio.gather(*(replica.tool.close() for replica in self._replicas))

    def _choose(self, but: tuple[Any, ...]) -> _Replica[Request, Value] | None:
        ready = [r for r in self._replicas if r not in but and r.breaker.can_enter()]
        return min(ready, key=lambda r: r.inflight) if ready else None

    async def _hedged(
        self, first: _Replica[Request, Value], requests: Sequence[Request], timeout_s: float, slow_after: float
    ) -> Sequence[Outcome[Value]]:
        tasks = {asyncio.ensure_future(self._attempt(first, requests, timeout_s))}
        try:
            done, _ = await asyncio.wait(tasks, timeout=slow_after)
            second = None if done else self._choose((first,))
            if second is not None and self._hedge.spend():
                self._metrics.hedges += 1
                tasks.add(asyncio.ensure_future(self._attempt(second, requests, timeout_s - slow_after)))
            pending = set(tasks)
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                outcomes = done.pop().result()
                if not pending or not all(isinstance(outcome, Failure) for outcome in outcomes):
                    return outcomes
        finally:
            for task in tasks:
                task.cancel()

    async def _attempt(
        self, replica: _Replica[Request, Value], requests: Sequence[Request], timeout_s: float
    ) -> Sequence[Outcome[Value]]:
        replica.breaker.enter()
        replica.inflight += 1
        start = self._clock()
        verdict = False
        try:
            outcomes = await self._guarded(replica, requests, timeout_s)
            verdict = True
            if all(isinstance(o, Failure) and o.kind in _UPSTREAM_FAULTS for o in outcomes):
                replica.breaker.failure()
            else:
                replica.breaker.success()
            elapsed = self._clock() - start
            self._hedge.observe(elapsed)
            self._metrics.upstream.observe(elapsed)
            return outcomes
        finally:
            replica.inflight -= 1
            if not verdict:
                replica.breaker.abandon()
            self._metrics.breakers[replica.label] = replica.breaker.state.value

    async def _guarded(
        self, replica: _Replica[Request, Value], requests: Sequence[Request], timeout_s: float
    ) -> Sequence[Outcome[Value]]:
        """The boundary: whatever the tool raises or returns becomes one outcome per request."""
        try:
            async with asyncio.timeout(timeout_s):
                outcomes = await replica.tool.run(requests, timeout_s)
        except TimeoutError:
            failure = Failure(
                kind=FailureKind.TIMEOUT,
                message=f"{replica.label} gave no reply to {len(requests)} requests within {timeout_s:.2f} s",
                retryable=True,
                whole_batch=True,
            )
        except Exception as error:
            _log.exception("%s raised on a batch of %d", replica.label, len(requests))
            failure = Failure(kind=FailureKind.TOOL_ERROR, message=f"{type(error).__name__}: {error}", whole_batch=True)
        else:
            if len(outcomes) == len(requests):
                return outcomes
            failure = Failure(
                kind=FailureKind.BAD_REPLY,
                message=f"{replica.label} returned {len(outcomes)} outcomes for {len(requests)} requests",
                retryable=True,
                whole_batch=True,
            )
        return [failure] * len(requests)
