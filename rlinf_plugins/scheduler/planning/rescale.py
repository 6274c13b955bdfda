"""A plan on a cluster of another size: pools grow or shrink in proportion, to sizes their stages can use."""

from dataclasses import replace

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.cost import CostModel, allowed_counts
from rlinf_plugins.scheduler.planning.evaluate import repredicted
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan, laid_out
from rlinf_plugins.scheduler.planning.profile import Profile


def rescaled(plan: Plan, flow: Flow, cluster: Cluster, profile: Profile) -> Plan:
    """Return the plan with its pools in proportion to a cluster's devices, laid out and predicted anew.

    Raises:
        PlanError: A stage cannot use what its share of the cluster comes to, or its device kind is absent.
    """
    model = CostModel(flow, cluster, profile)
    totals = {kind: cluster.count(kind) for kind in cluster.kinds}
    phases = tuple(_phase(phase, plan, flow, cluster, totals) for phase in plan.phases)
    bare = replace(plan, phases=phases, devices=totals, band=None, alternatives=(), reasons=())
    replicas = {stage.name: stage.replica for stage in flow.stages}
    placed = laid_out(bare, {kind: cluster.numbers(kind) for kind in cluster.kinds}, replicas)
    return repredicted(model, placed)


def _phase(phase: PhasePlan, plan: Plan, flow: Flow, cluster: Cluster, totals: dict[str, int]) -> PhasePlan:
    pools = []
    for pool in phase.pools:
        if pool.kind not in totals:
            raise PlanError(f"the plan needs {pool.kind!r} devices; the cluster has {', '.join(totals)}")
        share = pool.devices * totals[pool.kind] // plan.devices[pool.kind]
        allotted = {name: _fitting(name, share, flow, cluster, pool) for name in pool.stages}
        pools.append(replace(pool, devices=max(share, max(allotted.values())), allotted=allotted, numbers=()))
    for kind, total in totals.items():
        used = sum(pool.devices for pool in pools if pool.kind == kind)
        if used > total:
            raise PlanError(f"scaled to {total} {kind} devices the plan would need {used}; plan anew for this cluster")
    return replace(phase, pools=tuple(pools))


def _fitting(name: str, share: int, flow: Flow, cluster: Cluster, pool: PoolPlan) -> int:
    allowed = allowed_counts(flow.stage(name), cluster.count(pool.kind), cluster.node_of(pool.kind).devices)
    within = allowed[allowed <= max(share, 1)]
    if not len(within):
        raise PlanError(f"{name} cannot run on its share of {share} {pool.kind} devices; it may use {allowed.tolist()}")
    return int(within[-1])
