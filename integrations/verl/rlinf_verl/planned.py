"""Plan a veRL job: the placements that the trainer mode ``m2flow`` can run, compared by the planner."""

import time
from dataclasses import replace

from omegaconf import DictConfig

from rlinf_plugins.core.errors import InfeasiblePlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.constraints import Constraints, Pin
from rlinf_plugins.scheduler.planning.cost import allowed_counts
from rlinf_plugins.scheduler.planning.plan import Alternative, Plan
from rlinf_plugins.scheduler.planning.planner import PlanRequest, plan
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.job_flow import ROLLOUT, job_cluster, job_flow


def plan_job(
    config: DictConfig,
    options: M2FlowConfig,
    profile: Profile,
    *,
    cluster: Cluster | None = None,
    actor_devices: int | None = None,
) -> Plan:
    """Return the fastest placement of a job that its trainer can run; apply it with :func:`rlinf_verl.placement.apply`.

    Args:
        config: veRL's configuration.
        options: Options of the trainer mode.
        profile: What was measured of the job.
        cluster: The devices; None: :func:`rlinf_verl.job_flow.job_cluster`.
        actor_devices: Devices the trainer's pool must have; None: any number.

    Raises:
        ProfileError: The profile is empty, stale, foreign or lacks a stage.
        InfeasiblePlanError: Nothing fits; the smallest conflicting set is in the message.
    """
    cluster = cluster or job_cluster(config, options)
    mini = int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
    found, refused = [], []
    for request in requests(job_flow(config), cluster, profile, mini_batch=mini, actor_devices=actor_devices):
        try:
            found.append(plan(request, now=time.time()))
        except InfeasiblePlanError as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    best, *others = sorted(found, key=lambda one: one.seconds)
    known = {best.summary()}
    alternatives = []
    for other in [*(_as_alternative(one, best) for one in others), *best.alternatives]:
        if other.summary not in known:
            known.add(other.summary)
            alternatives.append(other)
    return replace(best, alternatives=tuple(sorted(alternatives, key=lambda one: one.seconds)[:5]))


def requests(
    flow: Flow, cluster: Cluster, profile: Profile, *, mini_batch: int, actor_devices: int | None = None
) -> list[PlanRequest]:
    """Return the planning problems whose best solutions, together, hold the best placement the trainer can run.

    Temporal: every stage on all devices of the trainer's pool, for each size of it. Spatial: rollout on devices of its
    own, all other stages in the trainer's pool, and micro-batches within a mini-batch.
    """
    kind = next(kind for kind in cluster.kinds if not flow.stage("actor").kinds or kind in flow.stage("actor").kinds)
    counts = allowed_counts(flow.stage("actor"), cluster.count(kind), cluster.node_of(kind).devices).tolist()
    sizes = [count for count in counts if actor_devices in (None, count)]
    names = [stage.name for stage in flow.stages]
    trainer = tuple(name for name in names if name != ROLLOUT)
    found = [
        PlanRequest(
            flow=flow,
            cluster=cluster,
            profile=profile,
            constraints=Constraints(modes=("temporal",), pins=tuple(Pin(stage=name, devices=size) for name in names)),
        )
        for size in sizes
        if size % flow.stage(ROLLOUT).replica == 0
    ]
    fine = tuple(size for size in flow.batch_sizes if mini_batch % size == 0)
    pins = () if actor_devices is None else (Pin(stage="actor", devices=actor_devices),)
    found.append(
        PlanRequest(
            flow=replace(flow, granularities=fine),
            cluster=cluster,
            profile=profile,
            constraints=Constraints(modes=("spatial",), pins=pins, together=(trainer,) if len(trainer) > 1 else ()),
        )
    )
    return found


def _as_alternative(other: Plan, best: Plan) -> Alternative:
    slower = other.seconds - best.seconds
    return Alternative(
        summary=other.summary(),
        seconds=other.seconds,
        reason=f"{other.mode}: +{slower:.3g} s ({slower / best.seconds:.1%}); {other.reasons[-1]}",
    )
