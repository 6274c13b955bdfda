"""What a pool measures about itself: plain counters and log-bucket histograms, cheap enough for every call."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = tuple(1e-4 * 2 ** (step / 2) for step in range(40))
"""Upper bounds from 0.1 ms to about 75 s, a factor of sqrt(2) apart: a quantile is off by at most 20 %."""
_SIZES = tuple(float(2**step) for step in range(11))


class Histogram:
    """Counts of values by bucket, with their sum.

    Args:
        bounds: Ascending upper bounds; larger values fall into one last bucket.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Record ``value``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Number of values recorded."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """Return the upper bound of the bucket that holds the ``q`` quantile; 0 where nothing was recorded."""
        rank, seen = q * self.count, 0
        for bound, count in zip((*self.bounds, self.bounds[-1] * 2), self.counts, strict=True):
            seen += count
            if count and seen >= rank:
                return bound
        return 0.0


class PoolMetrics(Collector):
    """One pool's counters; also a Prometheus collector.

    Args:
        pool: Label of the pool.
    """

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.outcomes: dict[str, int] = {}
        self.batches = 0
        self.upstream_items = 0
        self.retries = 0
        self.splits = 0
        self.hedges = 0
        self.latency = Histogram()
        self.queue_wait = Histogram()
        self.upstream = Histogram()
        self.batch_size = Histogram(_SIZES)
        self.queued = 0
        self.inflight = 0
        self.breakers: dict[str, str] = {}

    def count(self, outcome: str) -> None:
        """Count a finished call by its source (fetched, joined, cached) or its failure's kind."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Return the figures as plain numbers, for logs and for a trainer's metrics."""
        calls = sum(self.outcomes.values())
        return {
            "calls": calls,
            "outcomes": dict(self.outcomes),
            "hit_ratio": self.outcomes.get("cached", 0) / calls if calls else 0.0,
            "join_ratio": self.outcomes.get("joined", 0) / calls if calls else 0.0,
            "batches": self.batches,
            "batch_size_mean": self.batch_size.total / self.batches if self.batches else 0.0,
            "retries": self.retries,
            "splits": self.splits,
            "hedges": self.hedges,
            "latency_p50_s": self.latency.quantile(0.5),
            "latency_p99_s": self.latency.quantile(0.99),
            "queue_wait_p50_s": self.queue_wait.quantile(0.5),
            "queue_wait_p99_s": self.queue_wait.quantile(0.99),
            "upstream_p50_s": self.upstream.quantile(0.5),
            "upstream_p99_s": self.upstream.quantile(0.99),
            "queued": self.queued,
            "inflight": self.inflight,
            "breakers": dict(self.breakers),
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics in Prometheus' data model."""
        calls = CounterMetricFamily("rlinf_tool_calls", "Finished calls.", labels=["pool", "outcome"])
        for outcome, count in self.outcomes.items():
            calls.add_metric([self.pool, outcome], count)
        yield calls
        for name, value, text in (
            ("batches", self.batches, "Batches sent upstream."),
            ("upstream_items", self.upstream_items, "Calls sent upstream."),
            ("retries", self.retries, "Calls sent again after a failure."),
            ("splits", self.splits, "Failed batches cut in halves to isolate a bad call."),
            ("hedges", self.hedges, "Batches also sent to a second replica."),
        ):
            counter = CounterMetricFamily(f"rlinf_tool_{name}", text, labels=["pool"])
            counter.add_metric([self.pool], value)
            yield counter
        for name, value, text in (
            ("queued", self.queued, "Calls that wait for a slot."),
            ("inflight", self.inflight, "Batches under way."),
        ):
            gauge = GaugeMetricFamily(f"rlinf_tool_{name}", text, labels=["pool"])
            gauge.add_metric([self.pool], value)
            yield gauge
        breakers = GaugeMetricFamily("rlinf_tool_breaker_open", "1 where not closed.", labels=["pool", "backend"])
        for backend, state in self.breakers.items():
            breakers.add_metric([self.pool, backend], float(state != "closed"))
        yield breakers
        for name, histogram, text in (
            ("latency_seconds", self.latency, "From call to outcome."),
            ("queue_wait_seconds", self.queue_wait, "From call to the start of its batch."),
            ("upstream_seconds", self.upstream, "One batch upstream."),
            ("batch_size", self.batch_size, "Calls in a batch."),
        ):
            yield self._family(name, histogram, text)

    def _family(self, name: str, histogram: Histogram, text: str) -> HistogramMetricFamily:
        buckets, seen = [], 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family = HistogramMetricFamily(f"rlinf_tool_{name}", text, labels=["pool"])
        family.add_metric([self.pool], buckets, histogram.total)
        return family
