"""The time of one phase as a function of its pools' device counts, for scalars and arrays alike.

With ``first`` and ``busy`` of the nodes of the phase's pipeline,

    T = switch + longest path of first + max busy,

which for equal micro-batches is the makespan of a tandem line: warm-up plus ``K - 1`` times the slowest stage. A cycle
of pools with times ``t_i`` per turn and sub-batch, ``p`` interleaved streams and ``turns`` turns takes

    turns * max(sum t_i, p * max t_i) + min((p - 1) * max t_i, sum t_i - max t_i)

per micro-batch: either a stream's own round or the busiest pool limits a turn, and the last stream trails.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, CostModel, Floats
from rlinf_plugins.scheduler.planning.pools import PoolDraft, PoolTable
from rlinf_plugins.scheduler.planning.shapes import PhaseShape, PoolShape


@dataclass(frozen=True, slots=True)
class _Node:
    pools: tuple[int, ...]
    turns: int
    streams: int
    before: tuple[tuple[int, float], ...]


class Phase:
    """A phase shape with everything that does not depend on device counts worked out.

    Args:
        model: Costs.
        shape: Pools, granularity and streams.
    """

    def __init__(self, model: CostModel, shape: PhaseShape) -> None:
        self.model = model
        self.shape = shape
        self.micro_batches = model.flow.items // shape.items
        self.kinds = [pool.kind for pool in shape.pools]
        self._nodes, moves = self._build_nodes()
        rounds = self.micro_batches if shape.overlap else self.micro_batches - 1
        self._transfer_floor = rounds * max(moves, default=0.0)
        self.sync = self._sync_difference()

    def tables(self, limit: int = MEMORY_UNITS) -> list[PoolTable]:
        """Return the pools' tables under a memory limit in parts of a device; a table may be empty."""
        return [draft.table(limit) for draft in self._drafts]

    def seconds(self, first: list[Any], busy: list[Any], switch: list[Any] | None) -> Any:
        """Return the phase's seconds; entries per pool broadcast against each other.

        Args:
            first: Per pool, see :class:`PoolTable`.
            busy: Per pool.
            switch: Per pool; None where the phase's stages stay resident.
        """
        reached: list[Any] = []
        slowest: Any = self._transfer_floor
        for node in self._nodes:
            own, rest = self._node_seconds(node, first, busy)
            if self.shape.overlap:
                slowest = np.maximum(slowest, own + rest)
                continue
            start: Any = 0.0
            for other, move in node.before:
                start = np.maximum(start, reached[other] + move)
            reached.append(start + own)
            slowest = np.maximum(slowest, rest)
        total = slowest + self.sync
        if reached:
            longest = reached[0]
            for value in reached[1:]:
                longest = np.maximum(longest, value)
            total = total + longest
        if switch is not None:
            entering = switch[0]
            for value in switch[1:]:
                entering = np.maximum(entering, value)
            total = total + entering
        return total

    def active(self, first: list[float], busy: list[float], switch: list[float] | None) -> tuple[Floats, float]:
        """Return a linear function of the pools' costs that nowhere exceeds the phase's time: its active pieces here.

        Returns:
            Coefficients of shape (3, pools) for ``first``, ``busy`` and ``switch``, and the constant.
        """
        count = len(first)
        coefficients = np.zeros((3, count))
        constant = self.sync
        reached: list[tuple[float, Floats, float]] = []
        slowest, slowest_part = self._transfer_floor, np.zeros((3, count))
        slowest_constant = self._transfer_floor
        for node in self._nodes:
            own_part, rest_part = self._node_pieces(node, first)
            own, rest = (float(np.dot(part[0], first) + np.dot(part[1], busy)) for part in (own_part, rest_part))
            if self.shape.overlap:
                own, own_part, rest, rest_part = 0.0, 0 * own_part, own + rest, own_part + rest_part
            if rest > slowest:
                slowest, slowest_part, slowest_constant = rest, rest_part, 0.0
            start, path, moved = max(
                ((reached[o][0] + move, reached[o][1], reached[o][2] + move) for o, move in node.before),
                key=lambda entry: entry[0],
                default=(0.0, np.zeros((3, count)), 0.0),
            )
            reached.append((start + own, path + own_part, moved))
        if not self.shape.overlap:
            _, path, moved = max(reached, key=lambda entry: entry[0])
            coefficients += path
            constant += moved
        coefficients += slowest_part
        constant += slowest_constant
        if switch is not None:
            coefficients[2, int(np.argmax(switch))] += 1.0
        return coefficients, constant

    def _node_pieces(self, node: _Node, first: list[float]) -> tuple[Floats, Floats]:
        own, rest = np.zeros((3, len(first))), np.zeros((3, len(first)))
        if not node.turns:
            own[0, node.pools[0]] = 1.0
            rest[1, node.pools[0]] = 1.0
            return own, rest
        values = [first[pool] for pool in node.pools]
        if sum(values) >= node.streams * max(values):
            own[0, list(node.pools)] = node.turns
        else:
            own[0, node.pools[int(np.argmax(values))]] = node.turns * node.streams
        return own, (self.micro_batches - 1) * own

    def _node_seconds(self, node: _Node, first: list[Any], busy: list[Any]) -> tuple[Any, Any]:
        if not node.turns:
            return first[node.pools[0]], busy[node.pools[0]]
        round_trip, slowest = first[node.pools[0]], first[node.pools[0]]
        for pool in node.pools[1:]:
            round_trip = round_trip + first[pool]
            slowest = np.maximum(slowest, first[pool])
        own = node.turns * np.maximum(round_trip, node.streams * slowest)
        if node.streams > 1:
            own = own + np.minimum((node.streams - 1) * slowest, round_trip - slowest)
        return own, (self.micro_batches - 1) * own

    def _build_nodes(self) -> tuple[list[_Node], list[float]]:
        flow, shape = self.model.flow, self.shape
        groups: list[tuple[int, ...]] = []
        seen: dict[int, int] = {}
        for index, pool in enumerate(shape.pools):
            if pool.block is None:
                groups.append((index,))
            elif pool.block in seen:
                groups[seen[pool.block]] += (index,)
            else:
                seen[pool.block] = len(groups)
                groups.append((index,))
        owner = {name: g for g, group in enumerate(groups) for i in group for name in shape.pools[i].stages}
        moves: dict[tuple[int, int], float] = {}
        for edge in flow.edges:
            ends = (owner.get(edge.source), owner.get(edge.target))
            if edge.kind != "weights" and None not in ends and ends[0] != ends[1]:
                pair = (int(ends[0] or 0), int(ends[1] or 0))
                moves[pair] = moves.get(pair, 0.0) + self.model.transfer_seconds(edge, shape.items)
        order = _topological(len(groups), list(moves))
        position = {group: place for place, group in enumerate(order)}
        streams = dict(shape.streams)
        nodes = []
        for group in order:
            block = shape.pools[groups[group][0]].block
            loop = None if block is None else flow.blocks[block].loop
            before = tuple((position[s], seconds) for (s, t), seconds in sorted(moves.items()) if t == group)
            nodes.append(
                _Node(
                    groups[group], loop.turns if loop else 0, streams.get(block, 1) if block is not None else 1, before
                )
            )
        return nodes, list(moves.values())

    def _sync_difference(self) -> float:
        """Seconds by which weight transfers inside the phase, between pools, differ from transfers in place."""
        owner = {name: index for index, pool in enumerate(self.shape.pools) for name in pool.stages}
        total = 0.0
        for edge in self.model.flow.edges:
            ends = (owner.get(edge.source), owner.get(edge.target))
            if edge.kind == "weights" and None not in ends and ends[0] != ends[1]:
                total += self.model.sync_seconds(edge, shared=False) - self.model.sync_seconds(edge, shared=True)
        return total

    @cached_property
    def _drafts(self) -> list[PoolDraft]:
        return [self._draft_of(pool) for pool in self.shape.pools]

    def _draft_of(self, pool: PoolShape) -> PoolDraft:
        items, total = self.shape.items, self.model.flow.items
        if pool.block is not None:
            items = total = items // dict(self.shape.streams)[pool.block]
        beside = self.shape.stages - frozenset(pool.stages)
        factors = tuple(self.model.slowdown(name, beside) for name in pool.stages)
        key = (pool.stages, pool.kind, items, total, factors)
        if key not in self.model.pool_drafts:
            self.model.pool_drafts[key] = _draft(self.model, *key)
        return self.model.pool_drafts[key]


def _draft(
    model: CostModel, names: tuple[str, ...], kind: str, items: int, total: int, factors: tuple[float, ...]
) -> PoolDraft:
    tables = [model.table(name, kind, items, total) for name in names]
    counts = tables[0].devices
    for table in tables[1:]:
        if not np.array_equal(counts, table.devices):
            counts = np.union1d(counts, table.devices)
    rows = [table.rows(counts) for table in tables]
    usable = np.min(rows, axis=0) >= 0
    counts, rows = counts[usable], [row[usable] for row in rows]
    memories = np.stack([t.memory[r] for t, r in zip(tables, rows, strict=True)])
    return PoolDraft(
        devices=counts,
        first=np.add.reduce([f * t.first[r] for f, t, r in zip(factors, tables, rows, strict=True)]),
        busy=np.add.reduce([f * t.busy[r] for f, t, r in zip(factors, tables, rows, strict=True)]),
        switch=np.add.reduce([t.switch[r] for t, r in zip(tables, rows, strict=True)]),
        together=memories.sum(axis=0),
        apart=memories.max(axis=0),
        swaps=total // items,
    )


def _topological(count: int, edges: list[tuple[int, int]]) -> list[int]:
    order: list[int] = []
    left = list(range(count))
    while left:
        node = next(n for n in left if not any(t == n and s in left for s, t in edges))
        order.append(node)
        left.remove(node)
    return order
