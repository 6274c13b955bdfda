"""The exact search: the cheapest sequence of phases over the lattice of order ideals.

A plan is a path from the empty ideal to the whole flow; an edge runs the blocks of a difference of ideals as a phase.
Edges carry lower bounds until a path that needs them is the shortest; only then they are solved exactly. The path that
is shortest with all edges exact is the optimum.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, CostModel
from rlinf_plugins.scheduler.planning.options import Option, OptionTable, Solved
from rlinf_plugins.scheduler.planning.plan import Mode, PhasePlan
from rlinf_plugins.scheduler.planning.pricing import TINY

Sequence = tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """A sequence of phases.

    Attributes:
        seconds: Its step time, weight transfers excluded.
        phases: The phases.
        memory: Peak of a device in parts.
        bound: Seconds no plan of the search beats.
    """

    seconds: float
    phases: tuple[PhasePlan, ...]
    memory: int
    bound: float


class Search:
    """Finds the best plan of a cost model under constraints.

    Args:
        model: Costs; its flow has the pins built in.
        constraints: Limits.
        totals: Devices of each kind to share out; None: the whole cluster.
        clock: Source of time for ``limit_s``.
        limit_s: Seconds after which the best plan so far is returned with its gap; None: until proven.
    """

    def __init__(
        self,
        model: CostModel,
        constraints: Constraints,
        totals: dict[str, int] | None = None,
        *,
        clock: Clock = monotonic,
        limit_s: float | None = None,
    ) -> None:
        self.table = OptionTable(model, constraints, totals or model.totals)
        self._constraints = constraints
        self._full = (1 << len(model.flow.blocks)) - 1
        self._clock = clock
        self._deadline = math.inf if limit_s is None else clock() + limit_s
        self._ideals = list(model.flow.ideals())
        self._switches = any(model.profile.stages[stage.name].switches for stage in model.flow.stages)

    def run(self, upper: float = math.inf, banned: frozenset[Sequence] = frozenset()) -> Found | None:
        """Return the best plan below ``upper`` seconds, leaving out the sequences in ``banned``."""
        best: tuple[float, Sequence, tuple[Solved, ...]] | None = None
        reach = upper
        for bound, sequence in self._sequences():
            if bound >= reach * (1 - TINY):
                return self._found(best, reach)
            if self._clock() > self._deadline and best is not None:
                return self._found(best, bound)
            if sequence in banned:
                continue
            solved = self._solve(sequence, reach)
            if solved is not None:
                reach = sum(part.seconds for part in solved)
                best = (reach, sequence, solved)
        return self._found(best, reach)

    def sequence_of(self, found: Found) -> Sequence:
        """Return the options of a found plan, to ban them in the next run."""
        flow = self.table.model.flow
        owner = {name: index for index, block in enumerate(flow.blocks) for name in block.stages}
        sequence = []
        for phase in found.phases:
            mask = 0
            for pool in phase.pools:
                for name in pool.stages:
                    mask |= 1 << owner[name]
            sequence.append(Option(mask, len(phase.pools) > 1, phase.resident, phase.overlap))
        return tuple(sequence)

    def _found(self, best: tuple[float, Sequence, tuple[Solved, ...]] | None, bound: float) -> Found | None:
        if best is None:
            return None
        seconds, sequence, solved = best
        alone = len(sequence) == 1
        phases = tuple(self.table.phase_plan(o, s, alone=alone) for o, s in zip(sequence, solved, strict=True))
        kept = sum(s.memory for o, s in zip(sequence, solved, strict=True) if o.resident)
        moving = max((s.memory for o, s in zip(sequence, solved, strict=True) if not o.resident), default=0)
        return Found(seconds=seconds, phases=phases, memory=kept + moving, bound=min(bound, seconds))

    def _sequences(self) -> Iterator[tuple[float, Sequence]]:
        """Yield sequences by ascending lower bound (A* over the ideals with exact remaining bounds)."""
        edges = self._edges()
        rest = {self._full: 0.0}
        for ideal in reversed(self._ideals[:-1]):
            rest[ideal] = min((bound + rest[end] for bound, _, end in edges[ideal]), default=math.inf)
        ticket = itertools.count()
        single = [(self.table.bound(option), (option,)) for option in self._single_options()]
        heap: list[tuple[float, int, int, float, int, Sequence]] = [
            (_rounded(bound), 1, next(ticket), bound, self._full, sequence)
            for bound, sequence in single
            if math.isfinite(bound)
        ]
        if math.isfinite(rest[0]):
            heap.append((_rounded(rest[0]), 1, next(ticket), 0.0, 0, ()))
        heapq.heapify(heap)
        while heap:
            total, _, _, spent, ideal, sequence = heapq.heappop(heap)
            if ideal == self._full:
                if self._mode(sequence) in self._constraints.modes:
                    yield total, sequence
                continue
            for bound, option, end in edges[ideal]:
                reached = spent + bound
                if math.isfinite(reached + rest[end]):
                    key = (_rounded(reached + rest[end]), len(sequence) + 1, next(ticket))
                    heapq.heappush(heap, (*key, reached, end, (*sequence, option)))

    def _edges(self) -> dict[int, list[tuple[float, Option, int]]]:
        edges: dict[int, list[tuple[float, Option, int]]] = {ideal: [] for ideal in self._ideals}
        for start, end in itertools.product(self._ideals, self._ideals):
            if start == end or start & end != start or (start == 0 and end == self._full):
                continue
            for several in (False, True):
                for resident in (False, True) if self._switches else (False,):
                    option = Option(end & ~start, several, resident)
                    bound = self.table.bound(option)
                    if math.isfinite(bound):
                        edges[start].append((bound, option, end))
        return edges

    def _single_options(self) -> list[Option]:
        options = [Option(self._full, False, True), Option(self._full, True, True)]
        if self._constraints.max_staleness:
            options.append(Option(self._full, True, True, True))
        return options

    def _mode(self, sequence: Sequence) -> Mode:
        if not any(option.several for option in sequence):
            return "temporal"
        return "spatial" if len(sequence) == 1 else "hybrid"

    def _solve(self, sequence: Sequence, upper: float) -> tuple[Solved, ...] | None:
        kept = [i for i, option in enumerate(sequence) if option.resident]
        if len(sequence) == 1 or not kept:
            return self._solve_parts(sequence, [MEMORY_UNITS] * len(sequence), upper)
        return self._solve_coupled(sequence, kept, upper)

    def _solve_parts(self, sequence: Sequence, limits: list[int], upper: float) -> tuple[Solved, ...] | None:
        """Solve every phase under its memory limit; None as soon as the sum cannot be below ``upper``."""
        bounds = [self.table.bound(option, limit) for option, limit in zip(sequence, limits, strict=True)]
        parts: list[Solved] = []
        for index, (option, limit) in enumerate(zip(sequence, limits, strict=True)):
            room = upper - sum(part.seconds for part in parts) - sum(bounds[index + 1 :])
            solved = self.table.solve(option, room, limit) if bounds[index] < room else None
            if solved is None:
                return None
            parts.append(solved)
        return tuple(parts)

    def _solve_coupled(self, sequence: Sequence, kept: list[int], upper: float) -> tuple[Solved, ...] | None:
        """Solve a sequence in which some phases stay loaded: their memory adds up, and to that of each other phase.

        The kept phases' limits are walked down their Pareto fronts of time and memory, so every split is considered.
        """
        best: tuple[Solved, ...] | None = None

        def walk(position: int, limits: list[int], left: int) -> None:
            nonlocal best, upper
            if position == len(kept):
                moving = [left if i not in kept else limits[i] for i in range(len(sequence))]
                if left < 0 or (left == 0 and len(kept) < len(sequence) and self._uses_memory()):
                    return
                solved = self._solve_parts(sequence, moving, upper)
                if solved is not None:
                    best, upper = solved, sum(part.seconds for part in solved)
                return
            index = kept[position]
            limit = left
            while limit >= 0:
                others = sum(self.table.bound(option) for i, option in enumerate(sequence) if i != index)
                solved_one = self.table.solve(sequence[index], upper - others, limit)
                if solved_one is None:
                    return
                limits[index] = solved_one.memory
                walk(position + 1, limits, left - solved_one.memory)
                limit = solved_one.memory - 1

        walk(0, [MEMORY_UNITS] * len(sequence), MEMORY_UNITS)
        return best

    def _uses_memory(self) -> bool:
        return any(s.memory_gib for p in self.table.model.profile.stages.values() for s in p.samples)


def _rounded(bound: float) -> float:
    """Round, so that among equal plans the one with fewer phases comes first whatever the order of summation."""
    return float(f"{bound:.10g}")
