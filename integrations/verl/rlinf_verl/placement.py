"""From a plan to veRL's resource pools: what its seam can place, checked before any placement group is asked for.

veRL 0.9.1 builds its pools in ``PPOTrainer._init_resource_pool_mgr`` from a mapping of roles to pools and a number of
processes a node for each pool. Three layouts fit that seam: ``temporal`` (all roles in one pool, taking turns),
``spatial`` (the trainer's roles in one pool, standalone rollout replicas in pools of their own) and ``hybrid`` (rollout
replicas and environments on parts of the actor's pool). A plan that needs anything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_verl.config import NODE
from rlinf_verl.job_flow import CRITIC_STAGES, TRAINER_STAGES
from rlinf_verl.job_flow import ROLLOUT as ROLLOUT_STAGE
from rlinf_verl.room import PoolRequest

GLOBAL_POOL = "global_pool"
REWARD_POOL = "reward_pool"
CRITIC_POOL = "critic_pool"

REWARD_STAGE = "reward_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A plan in veRL's terms.

    Attributes:
        kind: Which of the three layouts it is.
        pools: Pools to create; standalone rollout replicas create theirs themselves.
        roles: Pool of each role, by the name in ``verl.trainer.ppo.utils.Role``.
        rollout: Machines and devices a machine of standalone rollout replicas; None: they live in the actor's pool.
        parts: First bundle and number of bundles, within the global pool, of stages that use a part of it.
        devices: Global device numbers of each stage.
    """

    kind: Literal["temporal", "spatial", "hybrid"]
    pools: tuple[PoolRequest, ...]
    roles: dict[str, str]
    rollout: tuple[int, int] | None
    parts: dict[str, tuple[int, int]]
    devices: dict[str, tuple[int, ...]]

    @property
    def resource_pool_spec(self) -> dict[str, list[int]]:
        """Processes a node of every pool the trainer creates."""
        return {pool.name: list(pool.processes) for pool in self.pools if pool.name != ROLLOUT_STAGE}


def layout(plan: Plan, cluster: Cluster) -> Layout:
    """Return a plan as veRL's pools.

    Raises:
        PlanError: veRL cannot place it; the message says which stage and why.
    """
    devices = {name: plan.numbers_of(name) for name in plan.stages()}
    trainer = _trainer_devices(devices)
    rollout = devices.get(ROLLOUT_STAGE, trainer)
    pools = [_pool(GLOBAL_POOL, trainer, cluster)]
    roles = {"Actor": GLOBAL_POOL, "RefPolicy": GLOBAL_POOL}
    for stages, role, name in ((CRITIC_STAGES, "Critic", CRITIC_POOL), ({REWARD_STAGE}, "RewardModel", REWARD_POOL)):
        used = {devices[stage] for stage in stages if stage in devices}
        if len(used) > 1:
            raise PlanError(
                f"veRL runs {' and '.join(sorted(stages))} in one process; the plan gives them {len(used)} pools"
            )
        for numbers in used:
            roles[role] = GLOBAL_POOL if set(numbers) == set(trainer) else name
            if roles[role] == name:
                _require_disjoint(name, numbers, "the actor", trainer)
                pools.append(_pool(name, numbers, cluster))
    standalone = None
    kind: Literal["temporal", "spatial", "hybrid"] = "temporal"
    parts = _parts(devices, trainer, cluster)
    if not set(rollout) & set(trainer):
        kind = "spatial"
        standalone = _uniform(rollout, cluster)
        pools.append(_pool(ROLLOUT_STAGE, rollout, cluster))
    elif set(rollout) != set(trainer):
        kind = "hybrid"
        if not set(rollout) <= set(trainer):
            raise PlanError(
                "veRL places rollout replicas beside the actor or inside its pool; the plan does half of each"
            )
    return Layout(kind=kind, pools=tuple(pools), roles=roles, rollout=standalone, parts=parts, devices=devices)


def overrides(plan: Plan, cluster: Cluster) -> list[str]:
    """Return the Hydra overrides under which the trainer mode ``m2flow`` runs the plan.

    Raises:
        PlanError: veRL cannot place it, a pool does not fill its machines evenly, or the trainer has no such mode.
    """
    placed = layout(plan, cluster)
    if placed.kind == "hybrid":
        raise PlanError(
            "the trainer mode m2flow runs rollout on all of the actor's devices or on others, not on a part of them; "
            "plan with --mode temporal --mode spatial"
        )
    spec = {pool.name: pool for pool in placed.pools}
    if CRITIC_POOL in spec:
        raise PlanError("veRL's options give the critic the actor's devices; the plan gives it others: pin critic")
    nodes, per_node = _even(spec[GLOBAL_POOL])
    found = [
        "trainer.v1.trainer_mode=m2flow",
        f"++{NODE}.mode={placed.kind}",
        f"++{NODE}.granularity={placed_items(plan)}",
        f"trainer.nnodes={nodes}",
        f"trainer.n_gpus_per_node={per_node}",
    ]
    if placed.rollout is not None:
        found += [
            f"actor_rollout_ref.rollout.nnodes={placed.rollout[0]}",
            f"actor_rollout_ref.rollout.n_gpus_per_node={placed.rollout[1]}",
        ]
    if REWARD_POOL in spec:
        nodes, per_node = _even(spec[REWARD_POOL])
        found += [
            "reward.reward_model.enable_resource_pool=True",
            f"reward.reward_model.nnodes={nodes}",
            f"reward.reward_model.n_gpus_per_node={per_node}",
        ]
    return found


def placed_items(plan: Plan) -> int:
    """Return the granularity of ``m2flow`` that a plan asks for: its smallest micro-batch; 0: whole batches in turn."""
    smallest = min(phase.items for phase in plan.phases)
    return 0 if smallest == plan.items and plan.mode == "temporal" else smallest


def apply(plan: Plan, config: DictConfig, cluster: Cluster) -> list[str]:
    """Make veRL's configuration fit the plan, in place, before any pool is made.

    Returns:
        What was set, as overrides.

    Raises:
        PlanError: See :func:`overrides`; or the plan is for other devices than there are.
    """
    here = {kind: cluster.count(kind) for kind in cluster.kinds}
    if plan.devices != here:
        raise PlanError(f"the plan is for {plan.devices} devices, the job has {here}; plan for this cluster")
    found = overrides(plan, cluster)
    mini = OmegaConf.select(config, "actor_rollout_ref.actor.ppo_mini_batch_size")
    if placed_items(plan) > mini:  # a chunk never spans two mini-batches
        found = [f"++{NODE}.granularity={mini}" if "granularity" in text else text for text in found]
    with open_dict(config):
        for override in found:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return found


def write_overrides(plan: Plan, path: Path, cluster: Cluster) -> str:
    """Return one line of overrides for a plan saved at ``path``, as ``rlinf-plugins plan`` prints it.

    A plan veRL cannot place is reported in the line instead.
    """
    try:
        return " ".join(overrides(plan, cluster))
    except PlanError as error:
        return f"cannot be placed by veRL ({path}): {error}"


def resource_pool_manager(placed: Layout, *, roles: Mapping[Any, str] | None = None) -> Any:
    """Return veRL's pool manager for a layout; nothing is created before its ``create_resource_pool``.

    Args:
        placed: The layout.
        roles: Further roles of veRL and their pools, e.g. those the trainer has already mapped.
    """
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.ppo.utils import Role

    mapping = {**(roles or {}), **{Role[name]: pool for name, pool in placed.roles.items()}}
    for combined in (Role.ActorRollout, Role.ActorRolloutRef):
        mapping[combined] = placed.roles["Actor"]
    return ResourcePoolManager(resource_pool_spec=placed.resource_pool_spec, mapping=mapping)


def carve(pool: Any, placed: Layout) -> dict[str, Any]:
    """Return, for every stage on a part of the global pool, that part as a pool of veRL's (its bundles are shared).

    Args:
        pool: The created global pool.
        placed: The layout.
    """
    from verl.single_controller.ray.base import SubRayResourcePool

    groups = pool.get_placement_groups()
    return {
        stage: SubRayResourcePool(
            process_on_nodes=pool.store,
            use_gpu=pool.use_gpu,
            name_prefix=f"{pool.name_prefix}_{stage}",
            max_colocate_count=pool.max_colocate_count,
            placement_groups=groups,
            start_bundle_index=first,
            subgroup_world_size=count,
        )
        for stage, (first, count) in placed.parts.items()
    }


def bundles(pool: Any) -> list[tuple[Any, int]]:
    """Return the placement group and bundle index of every device of a pool or of a part of one."""
    flat = [(group, index) for group in pool.get_placement_groups() for index in range(group.bundle_count)]
    first = getattr(pool, "start_bundle_index", 0)
    return flat[first : first + pool.world_size]


def _trainer_devices(devices: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    if "actor" not in devices:
        raise PlanError(f"the plan has no stage 'actor'; veRL's pools start from it (stages: {', '.join(devices)})")
    actor = devices["actor"]
    for stage in sorted(TRAINER_STAGES & devices.keys()):
        if not set(devices[stage]) <= set(actor):
            raise PlanError(
                f"veRL runs {stage} in the actor's worker group on all of its devices; the plan puts it on others "
                f"({_words(devices[stage])} against {_words(actor)}): pin {stage} to the actor's pool"
            )
    return actor


def _parts(
    devices: Mapping[str, tuple[int, ...]], trainer: tuple[int, ...], cluster: Cluster
) -> dict[str, tuple[int, int]]:
    order = [n for _, _, machine in cluster.machines() for n in machine if n in set(trainer)]
    found = {}
    for stage, numbers in devices.items():
        if stage in TRAINER_STAGES or set(numbers) == set(trainer) or not set(numbers) <= set(trainer):
            continue
        places = sorted(order.index(n) for n in numbers)
        if places != list(range(places[0], places[0] + len(places))):
            raise PlanError(
                f"{stage} uses {_words(numbers)}, which are no neighbours in the actor's pool; veRL needs that"
            )
        found[stage] = (places[0], len(places))
    return found


def _pool(name: str, numbers: tuple[int, ...], cluster: Cluster) -> PoolRequest:
    wanted = set(numbers)
    counts = [sum(n in wanted for n in machine) for _, _, machine in cluster.machines()]
    return PoolRequest(name=name, processes=tuple(count for count in counts if count))


def _uniform(numbers: tuple[int, ...], cluster: Cluster) -> tuple[int, int]:
    return _even(_pool(ROLLOUT_STAGE, numbers, cluster))


def _even(pool: PoolRequest) -> tuple[int, int]:
    if len(set(pool.processes)) != 1:
        raise PlanError(
            f"veRL wants as many devices on every machine of {pool.name}; the plan gives {list(pool.processes)}: pin "
            "its devices to whole machines"
        )
    return len(pool.processes), pool.processes[0]


def _require_disjoint(name: str, numbers: tuple[int, ...], other: str, theirs: tuple[int, ...]) -> None:
    both = sorted(set(numbers) & set(theirs))
    if both:
        raise PlanError(
            f"{name} shares devices {both} with {other} but not all of them; veRL gives it the same pool or another one"
        )


def _words(numbers: tuple[int, ...]) -> str:
    return f"devices {numbers[0]}-{numbers[-1]}" if numbers else "no devices"
