"""The predicted time and memory of a given plan, whoever made it."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, CostModel
from rlinf_plugins.scheduler.planning.phase import Phase
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan
from rlinf_plugins.scheduler.planning.shapes import PhaseShape, PoolShape


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """Predicted cost of one phase: seconds and the fullest device's memory in parts."""

    seconds: float
    memory: int


def phase_cost(model: CostModel, plan: PhasePlan, *, alone: bool) -> PhaseCost:
    """Return the cost of a phase; infinite seconds where a stage cannot run on its allotment.

    Args:
        model: Costs.
        plan: The phase.
        alone: It is the only phase, so that nothing is switched in or out.
    """
    shape = shape_of(model, plan)
    phase = Phase(model, shape)
    costs = [_pool_cost(model, plan, shape, index) for index in range(len(plan.pools))]
    if any(cost is None for cost in costs):
        return PhaseCost(math.inf, 2 * MEMORY_UNITS)
    known = [cost for cost in costs if cost is not None]
    switch = None if alone or plan.resident else [cost[2] for cost in known]
    seconds = float(phase.seconds([cost[0] for cost in known], [cost[1] for cost in known], switch))
    return PhaseCost(seconds, max(cost[3] for cost in known))


def predict(model: CostModel, plan: Plan) -> tuple[float, int]:
    """Return the seconds of a step under the plan, weight transfers included, and the peak memory in parts.

    Raises:
        PlanError: The plan misses a stage, runs one twice, breaks an edge or uses more devices than there are.
    """
    check_plan(model, plan)
    alone = len(plan.phases) == 1
    costs = [phase_cost(model, phase, alone=alone) for phase in plan.phases]
    late = sum(lateness(model, phase) for phase in plan.phases)
    return sum(cost.seconds for cost in costs) + late + sync_seconds(model), peak_memory(plan, costs)


def lateness(model: CostModel, plan: PhasePlan) -> float:
    """Return the seconds by which a pipelined phase exceeds its cost on average, because of its long tail.

    A phase costs the largest of its pools' expected times. Where the longest item of a step varies, now one pool is the
    last and now another, and the mean of the larger is more than the larger of the means. The search leaves this out.
    """
    shape = shape_of(model, plan)
    if len(plan.pools) == 1 or plan.items == model.flow.items:
        return 0.0
    costs = [_pool_cost(model, plan, shape, index) for index in range(len(plan.pools))]
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return 0.0
    phase = Phase(model, shape)
    first, busy = [cost[0] for cost in known], [cost[1] for cost in known]
    scattered: list[Any] = list(busy)
    for index, pool in enumerate(plan.pools):
        for name in pool.stages:
            spread = model.scatter(name, pool.kind, pool.allotted[name], model.flow.items)
            if spread is not None:
                factor = model.slowdown(name, shape.stages - frozenset(pool.stages))
                scattered[index] = np.maximum(scattered[index] + factor * spread, 0.0)
    return max(float(np.mean(phase.seconds(first, scattered, None))) - float(phase.seconds(first, busy, None)), 0.0)


def peak_memory(plan: Plan, costs: list[PhaseCost]) -> int:
    """Return the peak of any device in parts: what stays loaded adds up, what moves in comes on top of it."""
    kept = sum(cost.memory for phase, cost in zip(plan.phases, costs, strict=True) if phase.resident)
    moving = max((c.memory for phase, c in zip(plan.phases, costs, strict=True) if not phase.resident), default=0)
    return kept + moving


def sync_seconds(model: CostModel) -> float:
    """Return the seconds of all weight transfers in place; phases add the difference for transfers between pools."""
    return sum(model.sync_seconds(edge, shared=True) for edge in model.flow.edges if edge.kind == "weights")


def repredicted(model: CostModel, plan: Plan) -> Plan:
    """Return the plan with its times predicted anew, e.g. under another profile."""
    alone = len(plan.phases) == 1
    phases = tuple(
        replace(p, seconds=phase_cost(model, p, alone=alone).seconds + lateness(model, p)) for p in plan.phases
    )
    return replace(plan, phases=phases, seconds=predict(model, plan)[0])


def shape_of(model: CostModel, plan: PhasePlan) -> PhaseShape:
    """Return a phase's shape."""
    blocks = {name: index for index, block in enumerate(model.flow.blocks) if block.loop for name in block.stages}
    names = {block.name: index for index, block in enumerate(model.flow.blocks)}
    pools = tuple(PoolShape(blocks.get(pool.stages[0]), pool.stages, pool.kind) for pool in plan.pools)
    used = {pool.block for pool in pools if pool.block is not None}
    streams = {names[name]: count for name, count in plan.streams.items() if name in names}
    return PhaseShape(
        items=plan.items,
        pools=pools,
        streams=tuple((index, streams.get(index, 1)) for index in sorted(used)),
        overlap=plan.overlap,
    )


def check_plan(model: CostModel, plan: Plan) -> None:
    """Refuse a plan that does not run this flow on this cluster.

    Raises:
        PlanError: See :func:`predict`.
    """
    names = [stage.name for stage in model.flow.stages]
    if sorted(plan.stages()) != sorted(names):
        raise PlanError(f"the plan runs {', '.join(sorted(plan.stages()))}; the flow has {', '.join(sorted(names))}")
    order = {name: i for i, phase in enumerate(plan.phases) for pool in phase.pools for name in pool.stages}
    for edge in model.flow.edges:
        if edge.kind != "weights" and order[edge.source] > order[edge.target]:
            raise PlanError(f"the plan runs {edge.target!r} in an earlier phase than {edge.source!r}, which feeds it")
    for phase in plan.phases:
        if phase.items < 1 or model.flow.items % phase.items:
            raise PlanError(f"micro-batches of {phase.items} do not divide the step's {model.flow.items} items")
        for kind in {pool.kind for pool in phase.pools}:
            used = sum(pool.devices for pool in phase.pools if pool.kind == kind)
            if used > model.totals.get(kind, 0):
                raise PlanError(f"a phase uses {used} {kind} devices; the cluster has {model.totals.get(kind, 0)}")


def _pool_cost(
    model: CostModel, phase: PhasePlan, shape: PhaseShape, index: int
) -> tuple[float, float, float, int] | None:
    """Return first, busy, switch and memory of a pool; None where a stage does not fit."""
    pool: PoolPlan = phase.pools[index]
    items, total = shape.items, model.flow.items
    if shape.pools[index].block is not None:
        items = total = items // dict(shape.streams)[shape.pools[index].block or 0]
    beside = shape.stages - frozenset(pool.stages)
    first = busy = switch = 0.0
    memories = []
    for name in pool.stages:
        table = model.table(name, pool.kind, items, total)
        row = int(table.devices.searchsorted(pool.devices, side="right")) - 1
        if row < 0:
            return None
        factor = model.slowdown(name, beside)
        first += factor * float(table.first[row])
        busy += factor * float(table.busy[row])
        switch += float(table.switch[row])
        memories.append(int(table.memory[row]))
    if pool.resident:
        memory = sum(memories)
    else:
        memory = max(memories)
        first += switch
        busy += (total // items - 1) * switch
    return (first, busy, switch, memory) if memory <= MEMORY_UNITS else None
