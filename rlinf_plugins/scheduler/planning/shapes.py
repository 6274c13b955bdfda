"""The family of placements: which blocks run in one phase, which share a pool, at what granularity.

A plan is a sequence of *phases*; a later phase starts when the earlier one is over (temporal mode). Inside a phase,
*pools* of devices are disjoint and micro-batches stream from pool to pool (pipelined mode); the stages of one pool take
turns on each micro-batch. A cycle is one node of the pipeline: its stages share one pool or alternate between several,
with one or more interleaved streams. Nesting these gives every hybrid.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf_plugins.scheduler.flow import Block, Flow
from rlinf_plugins.scheduler.planning.cost import CostModel


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Stages that take turns on the same devices.

    Attributes:
        block: Index of the cycle they belong to; None for stages outside cycles.
        stages: Names, in topological order.
        kind: Kind of the devices.
    """

    block: int | None
    stages: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class PhaseShape:
    """A phase without its device counts.

    Attributes:
        items: Micro-batch size in items.
        pools: Its pools.
        streams: Interleaved streams of each cycle in the phase, as (block index, streams).
        overlap: Steps overlap (the consumer works on the previous step's items), at a staleness of one step.
    """

    items: int
    pools: tuple[PoolShape, ...]
    streams: tuple[tuple[int, int], ...] = ()
    overlap: bool = False

    @property
    def stages(self) -> frozenset[str]:
        """Names of every stage of the phase."""
        return frozenset(name for pool in self.pools for name in pool.stages)


def partitions(members: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every partition of ``members`` into non-empty groups, in a fixed order, coarsest first."""
    found: list[tuple[tuple[int, ...], ...]] = []

    def extend(rest: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> None:
        if not rest:
            found.append(groups)
            return
        for index in range(len(groups)):
            extend(rest[1:], (*groups[:index], (*groups[index], rest[0]), *groups[index + 1 :]))
        extend(rest[1:], (*groups, (rest[0],)))

    extend(members, ())
    yield from sorted(found, key=lambda groups: (len(groups), groups))


def phase_shapes(model: CostModel, mask: int, *, overlap: bool = False) -> Iterator[PhaseShape]:
    """Yield every shape of a phase that runs the blocks of ``mask``: pools, device kinds, streams, granularities."""
    flow = model.flow
    members = tuple(index for index in range(len(flow.blocks)) if mask >> index & 1)
    inside = [(s, t, kind) for s, t, kind in flow.block_edges if mask >> s & 1 and mask >> t & 1]
    barrier = any(kind == "barrier" for _, _, kind in inside)
    sizes = (flow.items,) if barrier else tuple(reversed(flow.batch_sizes))
    plain = tuple(index for index in members if flow.blocks[index].loop is None)
    cycles = tuple(index for index in members if flow.blocks[index].loop is not None)
    for groups in partitions(plain):
        if not _acyclic(groups + tuple((index,) for index in cycles), inside):
            continue
        plain_choices = [_plain_pools(model, flow, group) for group in groups]
        for size in sizes:
            cycle_choices = [list(_cycle_pools(model, index, flow.blocks[index], size)) for index in cycles]
            for picked in itertools.product(*plain_choices):
                for loops in itertools.product(*cycle_choices):
                    pools = picked + tuple(pool for loop, _ in loops for pool in loop)
                    streams = tuple((index, count) for index, (_, count) in zip(cycles, loops, strict=True))
                    if not (overlap and len(pools) == 1):
                        yield PhaseShape(items=size, pools=pools, streams=streams, overlap=overlap)


def _plain_pools(model: CostModel, flow: Flow, group: tuple[int, ...]) -> list[PoolShape]:
    names = tuple(flow.blocks[index].stages[0] for index in group)
    return [PoolShape(None, names, kind) for kind in _common_kinds(model, names)]


def _cycle_pools(model: CostModel, index: int, block: Block, size: int) -> Iterator[tuple[tuple[PoolShape, ...], int]]:
    assert block.loop is not None  # noqa: S101 - only called for cycles
    for groups in partitions(tuple(range(len(block.stages)))):
        names = [tuple(block.stages[position] for position in group) for group in groups]
        for kinds in itertools.product(*[_common_kinds(model, group) for group in names]):
            for count in sorted(set(block.loop.streams) | {1}) if len(groups) > 1 else (1,):
                if count in (*block.loop.streams, 1) and size % count == 0:
                    yield tuple(PoolShape(index, g, k) for g, k in zip(names, kinds, strict=True)), count


def _common_kinds(model: CostModel, names: tuple[str, ...]) -> list[str]:
    return [kind for kind in model.cluster.kinds if all(kind in model.kinds_of(name) for name in names)]


def _acyclic(groups: tuple[tuple[int, ...], ...], edges: Sequence[tuple[int, int, str]]) -> bool:
    owner = {index: position for position, group in enumerate(groups) for index in group}
    after = {(owner[s], owner[t]) for s, t, _ in edges if owner[s] != owner[t]}
    left = set(range(len(groups)))
    while left:
        free = {node for node in left if not any(t == node and s in left for s, t in after)}
        if not free:
            return False
        left -= free
    return True
