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

from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.capture import flow_from_roles
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_verl.room import PoolRequest

GLOBAL_POOL = "global_pool"
REWARD_POOL = "reward_pool"
CRITIC_POOL = "critic_pool"

TRAINER_STAGES = frozenset({"actor", "old_log_prob", "inference", "reference"})
"""Stages that veRL runs in the actor's worker group: one process a device, so they take turns on the same pool."""

CRITIC_STAGES = frozenset({"critic", "values"})
ROLLOUT_STAGE = "rollout"
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
    """Return the Hydra overrides that make veRL's configuration fit the plan.

    Raises:
        PlanError: veRL cannot place it, or a pool does not fill its machines evenly.
    """
    placed = layout(plan, cluster)
    spec = {pool.name: pool for pool in placed.pools}
    nodes, per_node = _even(spec[GLOBAL_POOL])
    found = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}"]
    if placed.rollout is not None:
        found += [
            "trainer.v1.trainer_mode=separate_async",
            f"actor_rollout_ref.rollout.nnodes={placed.rollout[0]}",
            f"actor_rollout_ref.rollout.n_gpus_per_node={placed.rollout[1]}",
        ]
    else:
        found.append("trainer.v1.trainer_mode=m2flow")
    if REWARD_POOL in spec:
        nodes, per_node = _even(spec[REWARD_POOL])
        found += [
            "reward.reward_model.enable_resource_pool=True",
            f"reward.reward_model.nnodes={nodes}",
            f"reward.reward_model.n_gpus_per_node={per_node}",
        ]
    return found


def write_overrides(plan: Plan, path: Path) -> str:
    """Return one line of overrides for a plan saved at ``path``; nodes are taken to hold eight devices.

    Used by ``rlinf-plugins plan``; a plan veRL cannot place is reported in the line instead.
    """
    total = sum(plan.devices.values())
    try:
        return " ".join(overrides(plan, Cluster.uniform(total, per_node=min(8, total))))
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


def flow_from_config(config: DictConfig, *, tools: bool = False, environments: bool = False, turns: int = 1) -> Flow:
    """Return the flow of a veRL job: which of reward model, reference, critic, tools and environments exist.

    Args:
        config: veRL's configuration.
        tools: The agent loop calls tools.
        environments: The agent loop acts in environments.
        turns: Turns of that cycle.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    rollout = config.actor_rollout_ref.rollout
    replica = rollout.tensor_model_parallel_size * rollout.get("data_parallel_size", 1)
    multi_turn = bool(OmegaConf.select(config, "actor_rollout_ref.rollout.multi_turn.enable"))
    return flow_from_roles(
        name=str(config.trainer.experiment_name),
        items=int(config.data.train_batch_size),
        turns=turns,
        reference=bool(need_reference_policy(config)),
        critic=bool(need_critic(config)),
        reward_model=bool(OmegaConf.select(config, "reward.reward_model.enable")),
        tools=tools or (multi_turn and not environments),
        environments=environments,
        replicas={ROLLOUT_STAGE: int(replica)},
        mini_batch=int(config.actor_rollout_ref.actor.ppo_mini_batch_size),
        barrier=str(config.algorithm.adv_estimator) == "gae",
    )


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


def verl_constraints(flow: Flow) -> Constraints:
    """Return what veRL's process layout asks of a plan: the actor's worker group serves all of its stages."""
    names = [stage.name for stage in flow.stages]
    groups = [tuple(name for name in names if name in stages) for stages in (TRAINER_STAGES, CRITIC_STAGES)]
    return Constraints(together=tuple(group for group in groups if len(group) > 1))
