"""Options of a search: every way to run one set of blocks as a phase, bounded cheaply and solved exactly on demand."""

import math
from dataclasses import dataclass

from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, CostModel
from rlinf_plugins.scheduler.planning.phase import Phase
from rlinf_plugins.scheduler.planning.plan import PhasePlan, PoolPlan
from rlinf_plugins.scheduler.planning.pricing import TINY
from rlinf_plugins.scheduler.planning.shapes import PhaseShape, phase_shapes
from rlinf_plugins.scheduler.planning.split import Split, SplitProblem


@dataclass(frozen=True, slots=True, order=True)
class Option:
    """A set of blocks as one phase.

    Attributes:
        mask: The blocks.
        several: Whether it has several pools (a pipeline) or one.
        resident: Whether its stages stay loaded outside the phase.
        overlap: Whether steps overlap.
    """

    mask: int
    several: bool
    resident: bool
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Solved:
    """The best phase of an option.

    Attributes:
        seconds: Its duration.
        memory: Peak of a device in parts.
        shape: Its shape.
        counts: Devices of each pool.
        resident: Per pool, whether its stages stay loaded together.
    """

    seconds: float
    memory: int
    shape: PhaseShape
    counts: tuple[int, ...]
    resident: tuple[bool, ...]


class OptionTable:
    """Bounds and exact solutions of options, computed once.

    Args:
        model: Costs.
        constraints: What the user fixed.
        totals: Devices of each kind to share out.
    """

    def __init__(self, model: CostModel, constraints: Constraints, totals: dict[str, int]) -> None:
        self.model = model
        self.totals = totals
        self.solved_problems = 0
        self._constraints = constraints
        self._problems: dict[tuple[Option, int], list[tuple[float, int, SplitProblem]]] = {}
        self._posed: dict[tuple[int, ...], tuple[float, SplitProblem]] = {}
        self._exact: dict[tuple[Option, int], Solved] = {}
        self._refuted: dict[tuple[Option, int], float] = {}
        self._phases: dict[tuple[int, bool], list[Phase]] = {}

    def bound(self, option: Option, limit: int = MEMORY_UNITS) -> float:
        """Return seconds the option cannot beat; infinite where it is infeasible."""
        known = self._exact.get((option, limit))
        if known is not None:
            return known.seconds
        problems = self._bounded(option, limit)
        return max(problems[0][0] if problems else math.inf, self._refuted.get((option, limit), 0.0))

    def solve(self, option: Option, upper: float, limit: int = MEMORY_UNITS) -> Solved | None:
        """Return the option's best phase if it takes less than ``upper`` seconds."""
        key = (option, limit)
        if key not in self._exact:
            if self._refuted.get(key, 0.0) >= upper:
                return None
            best: Solved | None = None
            for bound, _, problem in self._bounded(option, limit):
                reach = upper if best is None else best.seconds
                if bound >= reach * (1 - TINY):
                    break
                self.solved_problems += 1
                split = problem.solve(reach)
                if split is not None:
                    best = _solved(problem, split)
            if best is None:
                self._refuted[key] = upper
                return None
            self._exact[key] = best
        found = self._exact[key]
        return found if found.seconds < upper else None

    def phase_plan(self, option: Option, solved: Solved, *, alone: bool) -> PhasePlan:
        """Return the readable form of a solved option."""
        flow = self.model.flow
        pools = []
        for pool, count, resident in zip(solved.shape.pools, solved.counts, solved.resident, strict=True):
            pools.append(
                PoolPlan(
                    stages=pool.stages,
                    kind=pool.kind,
                    devices=count,
                    allotted={name: allotment(self.model, name, pool.kind, count) for name in pool.stages},
                    resident=resident,
                )
            )
        return PhasePlan(
            pools=tuple(pools),
            items=solved.shape.items,
            resident=option.resident or alone,
            overlap=option.overlap,
            streams={flow.blocks[index].name: count for index, count in solved.shape.streams},
            seconds=solved.seconds,
        )

    def _bounded(self, option: Option, limit: int) -> list[tuple[float, int, SplitProblem]]:
        key = (option, limit)
        if key not in self._problems:
            found = []
            for number, phase in enumerate(self._shapes(option.mask, option.overlap)):
                if (len(phase.shape.pools) > 1) != option.several:
                    continue
                bound, problem = self._problem(phase, limit, not option.resident)
                if math.isfinite(bound):
                    found.append((bound, number, problem))
            self._problems[key] = sorted(found, key=lambda entry: entry[:2])
        return self._problems[key]

    def _problem(self, phase: Phase, limit: int, switch: bool) -> tuple[float, SplitProblem]:
        """The problem of a phase, with its bound; limits that allow the same share one."""
        tables = phase.tables(limit)
        key = (id(phase), switch, *map(id, tables))
        if key not in self._posed:
            problem = SplitProblem(phase, self.totals, switch=switch, tables=tables)
            self._posed[key] = problem.lower_bound(), problem
        return self._posed[key]

    def _shapes(self, mask: int, overlap: bool) -> list[Phase]:
        if (mask, overlap) not in self._phases:
            self._phases[mask, overlap] = [
                Phase(self.model, shape)
                for shape in phase_shapes(self.model, mask, overlap=overlap)
                if self._constraints.allows_shape(shape)
            ]
        return self._phases[mask, overlap]


def allotment(model: CostModel, name: str, kind: str, count: int) -> int:
    """Return the devices a stage uses of a pool of ``count``: its largest allowed number within."""
    devices = model.table(name, kind, model.flow.items, model.flow.items).devices
    return int(devices[devices <= count][-1])


def _solved(problem: SplitProblem, split: Split) -> Solved:
    return Solved(
        seconds=split.seconds,
        memory=problem.memory(split),
        shape=problem.phase.shape,
        counts=problem.counts(split),
        resident=tuple(bool(t.resident[row]) for t, row in zip(problem.tables, split.rows, strict=True)),
    )
