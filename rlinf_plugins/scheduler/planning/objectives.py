"""Other objectives than the expected step: the best plans re-scored, the Pareto front, its knee."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.planner import candidates, finished, prepared
from rlinf_plugins.scheduler.planning.simulator import mean_and_tail, simulate, simulate_many

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.planning.planner import PlanRequest

Objective = Literal["time", "p99", "cvar", "gpu-hours", "energy", "memory", "staleness"]

OBJECTIVES: tuple[Objective, ...] = ("time", "p99", "cvar", "gpu-hours", "energy", "memory", "staleness")


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A plan under every objective; smaller is better.

    Attributes:
        plan: The plan.
        time: Expected seconds of a step.
        p99: 99 % quantile of simulated steps in seconds.
        cvar: Mean of the worst 1 % of simulated steps in seconds.
        gpu_hours: Device-hours of a step, idle devices of the plan's pools included.
        energy: Watt-hours of a step; None without a watt table.
        memory: Peak share of a device's memory.
        staleness: Steps that training data may lag behind.
    """

    plan: Plan
    time: float
    p99: float
    cvar: float
    gpu_hours: float
    energy: float | None
    memory: float
    staleness: int

    def value(self, objective: Objective) -> float:
        """Return the score under one objective.

        Raises:
            PlanError: Energy without a watt table.
        """
        value = {"gpu-hours": self.gpu_hours}.get(objective, getattr(self, objective.replace("-", "_")))
        if value is None:
            raise PlanError("energy needs the watts of every node in the cluster file")
        return float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The best of the scored plans under an objective.

    Attributes:
        best: The chosen plan's scores.
        scores: All scored plans.
        front: Indices of the Pareto front over time and the objective, by time.
        knee: Index of the front's knee.
        gap: What a plan outside the scored ones could at most be better by, relative; None where no bound is known.
    """

    best: Score
    scores: tuple[Score, ...]
    front: tuple[int, ...]
    knee: int
    gap: float | None


def choose(request: "PlanRequest", objective: Objective, *, count: int = 8, repeats: int = 64, seed: int = 0) -> Choice:
    """Score the best ``count`` plans (and the best on fewer devices) and choose by an objective.

    Raises:
        PlanError: No plan is feasible, or energy without a watt table.
    """
    plans = _pool(request, count)
    if not plans:
        raise PlanError(f"no plan of {request.flow.name!r} is feasible; `plan` names the conflict")
    scores = tuple(score(request, plan, repeats=repeats, seed=seed) for plan in plans)
    values = [entry.value(objective) for entry in scores]
    front = pareto([(entry.time, value) for entry, value in zip(scores, values, strict=True)])
    best = min(range(len(scores)), key=lambda i: (values[i], scores[i].time, i))
    return Choice(
        best=scores[best],
        scores=scores,
        front=front,
        knee=front[knee([(scores[i].time, values[i]) for i in front])],
        gap=_gap(objective, scores, values[best]),
    )


def score(request: "PlanRequest", plan: Plan, *, repeats: int = 64, seed: int = 0) -> Score:
    """Return a plan's scores; P99 and CVaR from ``repeats`` simulated steps."""
    seconds = simulate_many(request.flow, request.cluster, request.profile, plan, seed=seed, repeats=repeats)
    _, p99, cvar = mean_and_tail(seconds)
    return Score(
        plan=plan,
        time=plan.seconds,
        p99=p99,
        cvar=cvar,
        gpu_hours=plan.device_seconds / 3600,
        energy=_energy(request, plan),
        memory=max(plan.memory.values(), default=0.0),
        staleness=plan.staleness,
    )


def pareto(points: list[tuple[float, float]]) -> tuple[int, ...]:
    """Return the indices of the points that no other point beats in both coordinates, by the first."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return tuple(front)


def knee(front: list[tuple[float, float]]) -> int:
    """Return the index of the point farthest from the line through the front's ends (Branke et al. 2004)."""
    points = np.array(front, dtype=float)
    if len(points) < 3:
        return 0
    span = np.ptp(points, axis=0)
    scaled = (points - points.min(axis=0)) / np.where(span > 0, span, 1.0)
    return int(np.argmax(1.0 - scaled.sum(axis=1)))


def _pool(request: "PlanRequest", count: int) -> list[Plan]:
    plans = {plan.signature: plan for plan in candidates(request, count)}
    totals = {kind: request.cluster.count(kind) for kind in request.cluster.kinds}
    for _ in range(6):
        totals = {kind: max(total // 2, 1) for kind, total in totals.items()}
        model, search = prepared(request, totals)
        found = search.run()
        if found is None:
            break
        plan = finished(model, found)
        plans.setdefault(plan.signature, plan)
    if request.constraints.max_staleness == 0:
        return sorted(plans.values(), key=lambda plan: plan.seconds)
    on_policy = replace(request, constraints=replace(request.constraints, max_staleness=0))
    for plan in candidates(on_policy, 2):
        plans.setdefault(plan.signature, plan)
    return sorted(plans.values(), key=lambda plan: plan.seconds)


def _gap(objective: Objective, scores: tuple[Score, ...], chosen: float) -> float | None:
    """A plan that was not scored is no faster than the fastest: that bounds some objectives."""
    fastest = min(entry.time for entry in scores)
    if objective == "time":
        return 0.0
    if objective in ("p99", "cvar"):
        return max(chosen / fastest - 1.0, 0.0)
    return None


def _energy(request: "PlanRequest", plan: Plan) -> float | None:
    """Watt-hours of a simulated step: busy devices at full power, the other devices of the cluster idle."""
    cluster: Cluster = request.cluster
    if any(node.watts is None for node in cluster.nodes if node.devices):
        return None
    run = simulate(request.flow, cluster, request.profile, plan, np.random.default_rng(0), noise=False)
    joules = sum(
        run.seconds * node.idle_watts * node.devices * node.count for node in cluster.nodes if node.watts is not None
    )
    kinds = {name: pool.kind for phase in plan.phases for pool in phase.pools for name in pool.stages}
    counts = {name: pool.allotted[name] for phase in plan.phases for pool in phase.pools for name in pool.stages}
    for span in run.spans:
        node = cluster.node_of(kinds[span.name])
        joules += span.seconds * counts[span.name] * ((node.watts or 0.0) - node.idle_watts)
    return joules / 3600
