"""A veRL job as the planner sees it: its flow, its machines, and what veRL's processes ask of a plan."""

import os
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.scheduler.cluster import Cluster, Node, from_ray_nodes
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.capture import flow_from_roles
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.cpu.devices import VirtualDevices

ROLLOUT = "rollout"

TRAINER_STAGES = frozenset({"actor", "old_log_prob", "inference", "reference"})
"""Stages that veRL runs in the actor's worker group: one process a device, so they take turns on the same pool."""

CRITIC_STAGES = frozenset({"critic", "values"})


def flow_from_config(config: DictConfig, *, tools: bool = False, environments: bool = False, turns: int = 1) -> Flow:
    """Return the flow of a veRL job: which of reward model, reference, critic, tools and environments exist.

    Args:
        config: veRL's configuration.
        tools: The agent loop calls tools.
        environments: The agent loop acts in environments.
        turns: Turns of that cycle.
    """
    multi_turn = bool(OmegaConf.select(config, "actor_rollout_ref.rollout.multi_turn.enable"))
    return _flow(config, tools=tools or (multi_turn and not environments), environments=environments, turns=turns)


def job_flow(config: DictConfig) -> Flow:
    """Return the flow that veRL's trainer schedules and a running job measures.

    Tools and environments are inside ``rollout``: the agent loop calls them on processors, and no pool of veRL's holds
    them. So is a reward model with devices of its own, which scores responses one by one.
    """
    return _flow(config, tools=False, environments=False, turns=1)


def _flow(config: DictConfig, *, tools: bool, environments: bool, turns: int) -> Flow:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    rollout = config.actor_rollout_ref.rollout
    replica = rollout.tensor_model_parallel_size * rollout.get("data_parallel_size", 1)
    reward = OmegaConf.select(config, "reward.reward_model") or {}
    inside = not (tools or environments) and bool(reward.get("enable_resource_pool"))
    return flow_from_roles(
        name=flow_name(config),
        items=int(config.data.train_batch_size),
        turns=turns,
        reference=bool(need_reference_policy(config)),
        critic=bool(need_critic(config)),
        reward_model=bool(reward.get("enable")) and not inside,
        tools=tools,
        environments=environments,
        old_log_prob=not OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"),
        replicas={ROLLOUT: int(replica)},
        mini_batch=int(config.actor_rollout_ref.actor.ppo_mini_batch_size),
        barrier=str(config.algorithm.adv_estimator) == "gae",
    )


def flow_name(config: DictConfig) -> str:
    """Return what binds a profile to a job: model, prompts and rollouts of a step, longest response."""
    model = os.path.normpath(str(OmegaConf.select(config, "actor_rollout_ref.model.path") or "model"))
    rows = f"{config.data.train_batch_size}x{OmegaConf.select(config, 'actor_rollout_ref.rollout.n') or 1}"
    longest = OmegaConf.select(config, "data.max_response_length")
    return "/".join([*model.split(os.sep)[-2:], rows, *([str(longest)] if longest else [])])


def job_cluster(config: DictConfig, options: M2FlowConfig) -> Cluster:
    """Return the devices a job may use: virtual ones, those of the running Ray, or those its options ask for.

    Args:
        config: veRL's configuration.
        options: Options of the trainer mode.

    Raises:
        ClusterError: Ray's nodes have no devices.
        ConfigError: The virtual devices exceed the machine.
    """
    import ray

    virtual = options.virtual_devices
    if virtual.count:
        devices = VirtualDevices.from_environment() or VirtualDevices.divide(
            virtual.count, cores_per_device=virtual.cores_per_device, memory_gb=virtual.memory_gb
        )
        kind = f"{len(devices.cores[0])}-core"
        node = Node(name="localhost", kind=kind, devices=devices.count, memory_gib=devices.memory_bytes / 2**30)
        return Cluster(nodes=(node,))
    if ray.is_initialized():
        return from_ray_nodes(ray.nodes(), **_accelerator())
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    own = (rollout.nnodes or 0) * (rollout.n_gpus_per_node or 0) if options.mode != "temporal" else 0
    per_node = int(trainer.n_gpus_per_node)
    nodes = int(trainer.nnodes) + -(-own // per_node)
    return Cluster(nodes=(Node(name="node", devices=per_node, count=nodes, **_accelerator()),))


def verl_constraints(flow: Flow) -> Constraints:
    """Return what veRL's process layout asks of a plan: the actor's worker group serves all of its stages."""
    names = [stage.name for stage in flow.stages]
    groups = [tuple(name for name in names if name in stages) for stages in (TRAINER_STAGES, CRITIC_STAGES)]
    return Constraints(together=tuple(group for group in groups if len(group) > 1))


def _accelerator() -> dict[str, Any]:
    """Kind and memory of the accelerator this process sees; nothing where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {"kind": properties.name, "memory_gib": properties.total_memory / 2**30}
