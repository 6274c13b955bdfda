"""Full enumeration: every phase sequence, pooling, stream count, granularity, residency and device count.

Shares only the cost of a given phase with the planner, none of its search: it is the judge of exactness on small cases.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, CostModel
from rlinf_plugins.scheduler.planning.evaluate import phase_cost, shape_of, sync_seconds
from rlinf_plugins.scheduler.planning.plan import PhasePlan, PoolPlan

Row = tuple[float, int, PhasePlan]


def enumerate_best(model: CostModel, constraints: Constraints | None = None) -> tuple[float, tuple[PhasePlan, ...]]:
    """Return the seconds and phases of the best plan; infinite seconds where none is feasible."""
    limits = constraints or Constraints()
    blocks = range(len(model.flow.blocks))
    cache: dict[tuple[frozenset[int], bool, bool], list[Row]] = {}

    def rows(members: frozenset[int], resident: bool, alone: bool) -> list[Row]:
        key = (members, resident, alone)
        if key not in cache:
            cache[key] = _undominated(_phases(model, members, resident, alone, limits))
        return cache[key]

    best: tuple[float, tuple[PhasePlan, ...]] = (math.inf, ())
    for sequence in _sequences(model, frozenset(blocks), frozenset()):
        alone = len(sequence) == 1
        for residency in itertools.product((False, True), repeat=len(sequence)):
            if alone and not residency[0]:
                continue
            choices = [rows(members, kept, alone) for members, kept in zip(sequence, residency, strict=True)]
            for combination in itertools.product(*choices):
                kept = sum(row[1] for row, stays in zip(combination, residency, strict=True) if stays)
                moving = max(
                    (row[1] for row, stays in zip(combination, residency, strict=True) if not stays), default=0
                )
                seconds = sum(row[0] for row in combination)
                phases = tuple(row[2] for row in combination)
                if kept + moving <= MEMORY_UNITS and seconds < best[0] and _mode(phases) in limits.modes:
                    best = (seconds, phases)
    return best[0] + sync_seconds(model), best[1]


def _sequences(model: CostModel, left: frozenset[int], done: frozenset[int]) -> Iterator[tuple[frozenset[int], ...]]:
    if not left:
        yield ()
        return
    for size in range(1, len(left) + 1):
        for members in itertools.combinations(sorted(left), size):
            chosen = frozenset(members)
            if all(s in done | chosen for s, t, _ in model.flow.block_edges if t in chosen):
                for rest in _sequences(model, left - chosen, done | chosen):
                    yield (chosen, *rest)


def _phases(
    model: CostModel, members: frozenset[int], resident: bool, alone: bool, limits: Constraints
) -> Iterator[Row]:
    flow = model.flow
    inside = [(s, t, kind) for s, t, kind in flow.block_edges if s in members and t in members]
    sizes = (flow.items,) if any(kind == "barrier" for _, _, kind in inside) else flow.batch_sizes
    units = [(index, name) for index in sorted(members) for name in flow.blocks[index].stages]
    overlaps = (False, True) if alone and limits.max_staleness else (False,)
    for items, labels, overlap in itertools.product(sizes, _labellings(len(units)), overlaps):
        pools = [
            [unit for unit, label in zip(units, labels, strict=True) if label == p] for p in range(max(labels) + 1)
        ]
        if not _allowed(model, pools, inside) or (overlap and len(pools) == 1):
            continue
        cycles = [index for index in sorted(members) if flow.blocks[index].loop]
        for streams in itertools.product(*[_streams(model, index, pools, items) for index in cycles]):
            names = {flow.blocks[index].name: count for index, count in zip(cycles, streams, strict=True)}
            yield from _with_counts(model, pools, items, names, resident, alone, overlap, limits)


def _labellings(count: int) -> Iterator[tuple[int, ...]]:
    """Yield labels per unit that name the pools in order of first use."""
    for labels in itertools.product(range(count), repeat=count):
        if all(label <= max(labels[:i], default=-1) + 1 for i, label in enumerate(labels)):
            yield labels


def _allowed(model: CostModel, pools: list[list[tuple[int, str]]], inside: Sequence[tuple[int, int, str]]) -> bool:
    owner: dict[int, int] = {}
    for number, pool in enumerate(pools):
        cyclic = {index for index, _ in pool if model.flow.blocks[index].loop}
        if cyclic and len({index for index, _ in pool}) > 1:
            return False  # a cycle's stages share pools among themselves only
        for index, _ in pool:
            owner[index] = -1 - index if cyclic else number
    reach = {(owner[s], owner[t]) for s, t, _ in inside if owner[s] != owner[t]}
    while True:  # transitive closure; a pool that reaches itself would wait for itself
        grown = reach | {(a, d) for a, b in reach for c, d in reach if b == c}
        if grown == reach:
            return not any(a == b for a, b in reach)
        reach = grown


def _streams(model: CostModel, index: int, pools: list[list[tuple[int, str]]], items: int) -> list[int]:
    loop = model.flow.blocks[index].loop
    spread = sum(any(block == index for block, _ in pool) for pool in pools)
    allowed = {1} | (set(loop.streams) if loop and spread > 1 else set())
    return sorted(count for count in allowed if items % count == 0)


def _with_counts(
    model: CostModel,
    pools: list[list[tuple[int, str]]],
    items: int,
    streams: dict[str, int],
    resident: bool,
    alone: bool,
    overlap: bool,
    limits: Constraints,
) -> Iterator[Row]:
    kinds = model.cluster.kinds
    per_pool = [
        [
            (kind, count, together)
            for kind in kinds
            if all(kind in model.kinds_of(name) for _, name in pool)
            for count in range(1, model.totals[kind] + 1)
            for together in ((True, False) if len(pool) > 1 else (True,))
        ]
        for pool in pools
    ]
    for picked in itertools.product(*per_pool):
        if any(sum(n for k, n, _ in picked if k == kind) > model.totals[kind] for kind in kinds):
            continue
        plan = PhasePlan(
            pools=tuple(
                PoolPlan(
                    stages=tuple(name for _, name in pool), kind=kind, devices=count, allotted={}, resident=together
                )
                for pool, (kind, count, together) in zip(pools, picked, strict=True)
            ),
            items=items,
            resident=resident or alone,
            overlap=overlap,
            streams=streams,
        )
        if limits.allows_shape(shape_of(model, plan)):
            cost = phase_cost(model, plan, alone=alone)
            if math.isfinite(cost.seconds):
                yield cost.seconds, cost.memory, plan


def _undominated(rows: Iterator[Row]) -> list[Row]:
    kept: list[Row] = []
    least = 2 * MEMORY_UNITS + 1
    for seconds, memory, plan in sorted(rows, key=lambda row: row[:2]):
        if memory < least:
            kept.append((seconds, memory, plan))
            least = memory
    return kept


def _mode(phases: tuple[PhasePlan, ...]) -> str:
    if all(len(phase.pools) == 1 for phase in phases):
        return "temporal"
    return "spatial" if len(phases) == 1 else "hybrid"
