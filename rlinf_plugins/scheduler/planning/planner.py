"""The planner: profile in, plan out, with alternatives, reasons, bands and robustness."""

import time
from dataclasses import dataclass, replace

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import InfeasiblePlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.conflicts import smallest_conflict
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, CostModel
from rlinf_plugins.scheduler.planning.evaluate import lateness, sync_seconds
from rlinf_plugins.scheduler.planning.plan import Alternative, Plan, laid_out
from rlinf_plugins.scheduler.planning.profile import MAX_AGE_DAYS, Profile
from rlinf_plugins.scheduler.planning.search import Found, Search, Sequence
from rlinf_plugins.scheduler.planning.uncertainty import prediction_band


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What to plan.

    Attributes:
        flow: The macro flow.
        cluster: The machines.
        profile: Measurements of every stage.
        constraints: What is fixed.
        alternatives: How many further plans to report.
        limit_s: Seconds after which the best plan so far is returned with its proven gap.
        max_age_days: Age at which a profile is refused.
    """

    flow: Flow
    cluster: Cluster
    profile: Profile
    constraints: Constraints = Constraints()
    alternatives: int = 5
    limit_s: float | None = None
    max_age_days: float = MAX_AGE_DAYS


def plan(request: PlanRequest, *, now: float | None = None, clock: Clock = monotonic) -> Plan:
    """Return the plan with the shortest expected step.

    Args:
        request: What to plan.
        now: Seconds since the epoch, for the profile's age; None: the machine's time.
        clock: Source of time for ``limit_s``.

    Raises:
        ProfileError: The profile is empty, stale, foreign or lacks a component.
        PlanError: A pin is wrong.
        InfeasiblePlanError: Nothing satisfies the constraints; the smallest conflicting set is in the message.
    """
    request.profile.check_usable(
        request.flow, request.cluster, now=time.time() if now is None else now, max_age_days=request.max_age_days
    )
    model, search = prepared(request, clock=clock)
    found = search.run()
    if found is None:
        conflict = smallest_conflict(request)
        listed = "; ".join(conflict)
        raise InfeasiblePlanError(f"no placement of {request.flow.name!r} is possible; together: {listed}", conflict)
    others = _alternatives(search, found, request.alternatives)
    # The search ranks by the larger of the pools' means; among its best the mean of the larger decides.
    best, *rest = sorted((finished(model, one) for one in (found, *others)), key=lambda one: one.seconds)
    return replace(
        best,
        band=prediction_band(request, best),
        reasons=_reasons(model, best, search),
        warnings=_warnings(model, best),
        alternatives=tuple(_alternative(best, other) for other in rest),
    )


def prepared(
    request: PlanRequest, totals: dict[str, int] | None = None, *, clock: Clock = monotonic
) -> tuple[CostModel, Search]:
    """Return the cost model with the pins built in, and a search over it."""
    flow = request.constraints.applied(request.flow, request.cluster)
    model = CostModel(flow, request.cluster, request.profile)
    return model, Search(model, request.constraints, totals, clock=clock, limit_s=request.limit_s)


def finished(model: CostModel, found: Found) -> Plan:
    """Return a found sequence as a plan with device numbers."""
    cluster = model.cluster
    late = [lateness(model, phase) for phase in found.phases]
    phases = tuple(replace(p, seconds=p.seconds + extra) for p, extra in zip(found.phases, late, strict=True))
    seconds = found.seconds + sum(late) + sync_seconds(model)
    bare = Plan(
        flow=model.flow.name,
        items=model.flow.items,
        devices={kind: cluster.count(kind) for kind in cluster.kinds},
        phases=phases,
        seconds=seconds,
        memory={"peak": found.memory / MEMORY_UNITS},
        gap=max(found.seconds / found.bound - 1.0, 0.0) if found.bound > 0 else 0.0,
    )
    replicas = {stage.name: stage.replica for stage in model.flow.stages}
    return laid_out(bare, {kind: cluster.numbers(kind) for kind in cluster.kinds}, replicas)


def candidates(request: PlanRequest, count: int) -> list[Plan]:
    """Return the best plans of distinct phase sequences, fastest first."""
    model, search = prepared(request)
    found = search.run()
    if found is None:
        return []
    return [finished(model, entry) for entry in [found, *_alternatives(search, found, count - 1)]]


def _alternatives(search: Search, best: Found, count: int) -> list[Found]:
    banned: set[Sequence] = {search.sequence_of(best)}
    found = []
    for _ in range(count):
        other = search.run(banned=frozenset(banned))
        if other is None:
            break
        found.append(other)
        banned.add(search.sequence_of(other))
    return found


def _alternative(best: Plan, plan_: Plan) -> Alternative:
    slower = plan_.seconds - best.seconds
    switched = [phase for phase in plan_.phases if not phase.resident and len(plan_.phases) > 1]
    kept = [phase for phase in best.phases if not phase.resident and len(best.phases) > 1]
    parts = [f"+{slower:.3g} s ({slower / best.seconds:.1%})"]
    if len(plan_.phases) > len(best.phases):
        parts.append(f"{len(plan_.phases) - len(best.phases)} more barriers, so the long tail is not hidden")
    if len(switched) > len(kept):
        parts.append("more switching in and out")
    parts.append(_bottleneck(plan_))
    return Alternative(summary=plan_.summary(), seconds=plan_.seconds, reason="; ".join(parts))


def _bottleneck(plan_: Plan) -> str:
    longest = max(plan_.phases, key=lambda phase: phase.seconds)
    names = ", ".join(name for pool in longest.pools for name in pool.stages)
    return f"its longest phase is {names} with {longest.seconds:.3g} s"


def _reasons(model: CostModel, best: Plan, search: Search) -> tuple[str, ...]:
    reasons = [f"{best.mode}: shortest of all placements, {search.table.solved_problems} splits solved exactly"]
    for kind, total in best.devices.items():
        used = max(sum(p.devices for p in phase.pools if p.kind == kind) for phase in best.phases)
        if used < total:
            reasons.append(f"{total - used} of {total} {kind} devices stay idle: no stage gets faster with them")
    reasons.append(_bottleneck(best))
    return tuple(reasons)


def _warnings(model: CostModel, best: Plan) -> tuple[str, ...]:
    warnings = []
    for phase in best.phases:
        for pool in phase.pools:
            for name in pool.stages:
                items = model.flow.items if model.flow.stage(name).streaming else phase.items
                if model.is_extrapolated(name, pool.kind, pool.allotted[name], items):
                    warnings.append(f"{name} was not measured near {pool.allotted[name]} devices, {items} items")
    for name, counts in model.violations().items():
        at = ", ".join(str(n) for n in counts)
        warnings.append(f"{name} was measured slower on {at} devices than on fewer; pooled by the fit")
    return tuple(warnings)
