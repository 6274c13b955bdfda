"""What each component costs on each allotment: tables over device counts, built from a profile.

Every stage at granularity ``m`` of ``M`` items (``K = M / m`` micro-batches) is described by two numbers: ``first``,
the seconds until its first micro-batch is out, and ``busy``, the seconds it needs beyond that for the rest. A stage fed
in micro-batches has ``first = t(n, m)`` and ``busy = (K - 1) t(n, m)``; a serving stage, which admits everything at
once, has ``first + busy = t(n, M)`` with ``first`` from the order statistics of its lengths.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlinf_plugins.core.errors import ProfileError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Edge, Flow, Stage
from rlinf_plugins.scheduler.planning.fit import Surface
from rlinf_plugins.scheduler.planning.pools import PoolDraft
from rlinf_plugins.scheduler.planning.profile import Profile, StageProfile
from rlinf_plugins.scheduler.planning.tail import Tail

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEMORY_UNITS = 32
"""Memory is counted in this many parts of a device, rounded up, so that sums stay on the safe side."""

TAIL_POINTS = 12
"""Replica counts at which a tail's shape is computed; between them it is interpolated."""


@dataclass(frozen=True, slots=True)
class Table:
    """Costs of one stage over its allowed device counts, ascending; all columns are non-increasing.

    Attributes:
        devices: Allowed device counts.
        first: Seconds until the first micro-batch is out.
        busy: Seconds for the remaining micro-batches.
        switch: Seconds to onload and offload.
        memory: Peak of one device in parts of :data:`MEMORY_UNITS`; above that it does not fit.
    """

    devices: Ints
    first: Floats
    busy: Floats
    switch: Floats
    memory: Ints

    def rows(self, counts: Ints) -> Ints:
        """Return the row of the largest allowed count within each of ``counts``; -1 where none fits."""
        return np.asarray(np.searchsorted(self.devices, counts, side="right") - 1)


class CostModel:
    """Tables of every stage of a flow on a cluster, computed once each.

    Args:
        flow: The flow.
        cluster: The devices.
        profile: Samples of every stage.
    """

    def __init__(self, flow: Flow, cluster: Cluster, profile: Profile) -> None:
        self.flow = flow
        self.cluster = cluster
        self.profile = profile
        self.extrapolated: set[str] = set()
        self.pool_drafts: dict[tuple[object, ...], PoolDraft] = {}
        self._one_node = len(cluster.machines()) == 1
        self._tables: dict[tuple[str, str, int, int], Table] = {}
        self._times: dict[tuple[str, str], Surface] = {}
        self._tails: dict[tuple[str, str], Tail | None] = {}

    @cached_property
    def totals(self) -> dict[str, int]:
        """Devices of each kind."""
        return {kind: self.cluster.count(kind) for kind in self.cluster.kinds}

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Device kinds a stage may run on: profiled there and allowed by the flow."""
        stage = self.flow.stage(name)
        profiled = {sample.device_kind for sample in self._measured(name).samples}
        return tuple(k for k in self.cluster.kinds if k in profiled and (not stage.kinds or k in stage.kinds))

    def table(self, name: str, kind: str, items: int, total: int) -> Table:
        """Return the costs of ``name`` on ``kind`` for micro-batches of ``items`` out of ``total``."""
        key = (name, kind, items, total)
        if key not in self._tables:
            self._tables[key] = self._build(*key)
        return self._tables[key]

    def slowdown(self, name: str, beside: frozenset[str]) -> float:
        """Return the factor on a stage's time while the stages ``beside`` run on other devices."""
        factors = self._measured(name).slowdown
        return math.prod(factors[other] for other in sorted(beside) if other in factors)

    def transfer_seconds(self, edge: Edge, items: int) -> float:
        """Return the seconds to move one micro-batch over an edge between two pools."""
        sent = self._measured(edge.source).bytes_per_item * items / 2**30
        return sent / (self.cluster.intra_gib_s if self._one_node else self.cluster.inter_gib_s)

    def scatter(self, name: str, kind: str, devices: int, items: int) -> Floats | None:
        """Return how far a serving stage's seconds lie from their mean, at evenly spaced quantiles; None: unknown."""
        stage, tail = self.flow.stage(name), self._tail(name, kind)
        if tail is None or not stage.streaming:
            return None
        replicas = devices // stage.replica
        modelled = tail.seconds(replicas, items, items)
        measured = float(self._seconds(stage, kind, np.array([devices]), items)[0])
        return np.asarray(tail.scatter(replicas, items) * (measured / modelled))

    def sync_seconds(self, edge: Edge, *, shared: bool) -> float:
        """Return the seconds of a weight transfer; a missing layout takes what was measured for the other."""
        found = [s for s in self.profile.syncs if (s.source, s.target) == (edge.source, edge.target)]
        matching = [s.seconds for s in found if s.shared == shared] or [s.seconds for s in found]
        return float(np.mean(matching)) if matching else 0.0

    def violations(self) -> dict[str, tuple[int, ...]]:
        """Device counts at which a stage was measured slower than on fewer devices (kept, pooled, reported)."""
        found = {}
        for stage in self.flow.stages:
            for kind in self.kinds_of(stage.name):
                counts = sorted({n for c in self._surface(stage.name, kind).curves for n in c.violations})
                if counts:
                    found[stage.name] = tuple(counts)
        return found

    def is_extrapolated(self, name: str, kind: str, devices: int, items: int) -> bool:
        """Say whether a stage's time at this point lies outside what was measured."""
        return self._surface(name, kind).extrapolates(devices, items)

    def _measured(self, name: str) -> StageProfile:
        try:
            return self.profile.stages[name]
        except KeyError as error:
            raise ProfileError(f"no samples of {name}; the profile has {', '.join(self.profile.stages)}") from error

    def _surface(self, name: str, kind: str) -> Surface:
        if (name, kind) not in self._times:
            samples = [s for s in self._measured(name).samples if s.device_kind == kind]
            self._times[name, kind] = Surface.fit(
                [s.devices for s in samples], [s.items for s in samples], [s.seconds for s in samples], "time"
            )
        return self._times[name, kind]

    def _tail(self, name: str, kind: str) -> Tail | None:
        measured = self._measured(name)
        if (name, kind) not in self._tails:
            samples = [s for s in measured.samples if s.device_kind == kind]
            replica = self.flow.stage(name).replica
            self._tails[name, kind] = (
                Tail.fit(
                    _thinned(measured.lengths).tolist(),
                    measured.slots,
                    [max(s.devices // replica, 1) for s in samples],
                    [s.items for s in samples],
                    [s.seconds for s in samples],
                )
                if measured.lengths
                else None
            )
        return self._tails[name, kind]

    def _build(self, name: str, kind: str, items: int, total: int) -> Table:
        stage = self.flow.stage(name)
        counts = allowed_counts(stage, self.totals[kind], self.cluster.node_of(kind).devices)
        count = total // items
        if stage.streaming and count > 1:
            # Each part is raised to its envelope, not lowered: together they never fall short of the whole.
            whole = self._seconds(stage, kind, counts, total)
            first = whole * self._first_share(stage, kind, counts, items, total)
            first, busy = _falling(first), _falling(whole - first)
        else:
            first = self._seconds(stage, kind, counts, items)
            busy = (count - 1) * first
        return Table(
            devices=counts,
            first=first,
            busy=busy,
            switch=self._switch(name, kind, counts),
            memory=self._memory(name, kind, counts, items if not stage.streaming else total),
        )

    def _seconds(self, stage: Stage, kind: str, counts: Ints, items: int) -> Floats:
        surface, tail = self._surface(stage.name, kind), self._tail(stage.name, kind)
        known = int(np.clip(items, surface.items[0], surface.items[-1]))
        if tail is None or known == items:
            return surface.at(counts, items)
        values = surface.at(counts, known)
        ratio = _over_replicas(
            counts // stage.replica, lambda r: tail.seconds(r, items, items) / tail.seconds(r, known, known)
        )
        return np.minimum.accumulate(values * ratio)

    def _first_share(self, stage: Stage, kind: str, counts: Ints, items: int, total: int) -> Floats:
        tail = self._tail(stage.name, kind)
        if tail is None:
            return np.full(len(counts), items / total)
        return _over_replicas(
            counts // stage.replica, lambda r: tail.seconds(r, total, items) / tail.seconds(r, total, total)
        )

    def _switch(self, name: str, kind: str, counts: Ints) -> Floats:
        samples = [s for s in self._measured(name).switches if s.device_kind == kind]
        if not samples:
            return np.zeros(len(counts))
        seconds = [s.onload_seconds + s.offload_seconds for s in samples]
        return Surface.fit([s.devices for s in samples], [1] * len(samples), seconds, "memory").at(counts, 1)

    def _memory(self, name: str, kind: str, counts: Ints, items: int) -> Ints:
        samples = [s for s in self._measured(name).samples if s.device_kind == kind]
        capacity = self.cluster.node_of(kind).memory_gib
        peak = Surface.fit(
            [s.devices for s in samples], [s.items for s in samples], [s.memory_gib for s in samples], "memory"
        ).at(counts, items)
        share = peak / capacity if math.isfinite(capacity) else np.zeros(len(counts))
        units = np.ceil(share * MEMORY_UNITS - 1e-9)
        return np.minimum(units, 2 * MEMORY_UNITS).astype(np.int64)


def allowed_counts(stage: Stage, total: int, per_node: int) -> Ints:
    """Return the device counts a stage may get, ascending; possibly none."""
    counts = np.arange(stage.replica, total + 1, stage.replica, dtype=np.int64)
    if stage.sizes:
        counts = np.intersect1d(counts, np.asarray(stage.sizes, dtype=np.int64))
    if stage.divides is not None:
        counts = counts[stage.divides % (counts // stage.replica) == 0]
    if total <= per_node:
        return counts
    # On several nodes a replica must fill a node evenly, or nodes evenly, or some replica would straddle two.
    straddles = per_node % stage.replica if stage.replica <= per_node else stage.replica % per_node
    return counts if straddles == 0 else counts[:0]


def _falling(values: Floats) -> Floats:
    """Return the least non-increasing function above ``values``."""
    return np.asarray(np.maximum.accumulate(values[::-1])[::-1])


def _over_replicas(replicas: Ints, value: Callable[[int], float]) -> Floats:
    if not len(replicas):
        return np.zeros(0)
    grid = np.unique(np.geomspace(replicas[0], replicas[-1], TAIL_POINTS).round().astype(np.int64))
    return np.asarray(np.interp(replicas, grid, [value(int(r)) for r in grid]))


def _thinned(lengths: tuple[float, ...], limit: int = 512) -> Floats:
    ordered = np.sort(np.asarray(lengths, dtype=float))
    if len(ordered) <= limit:
        return ordered
    return np.asarray(np.quantile(ordered, (np.arange(limit) + 0.5) / limit))
