"""Who shares the devices of a veRL trainer, found out from its worker groups once they exist."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rlinf_plugins.scheduler.lock.resident import Resident
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.rollout.replica import InProcessReplica
from rlinf_verl.trainer.all_replicas import AllReplicas
from rlinf_verl.trainer.residents import EngineResident, WorkingRoom
from rlinf_verl.trainer.sharing import ROLLOUT, Tenants, fence_folder
from rlinf_verl.trainer.sharing_sizes import count_parameters, rollout_bytes, sync_fetches_actor
from rlinf_verl.trainer.sharing_worker import EngineFacts, RankFacts, describe
from rlinf_verl.trainer.worker_side import Part


def tenants_of(trainer: Any, options: M2FlowConfig) -> Tenants:
    """Ask the workers of ``trainer`` for their devices and engines.

    Args:
        trainer: veRL's trainer, set up, its replicas asleep.
        options: Options of the trainer mode.
    """
    groups: dict[Part, Any] = {"actor": trainer.actor_rollout_wg}
    if trainer.use_reference_policy and not trainer.ref_in_actor:
        groups["ref"] = trainer.ref_policy_wg
    if trainer.use_critic:
        groups["critic"] = trainer.critic_wg
    facts = {part: _ask(group.workers, [part]) for part, group in groups.items()}
    capacity = {rank.device: rank.capacity for ranks in facts.values() for rank in ranks}
    working = int((options.sharing.working_gb or 0) * 2**30)
    engines: dict[str, Resident] = {
        part: _resident(part, groups[part].workers, ranks, working) for part, ranks in facts.items()
    }
    known = options.sharing.working_gb is not None or options.virtual_devices.count > 0
    replicas = trainer.checkpoint_manager.replicas
    return Tenants(
        capacity=capacity,
        rollout=_rollout(trainer, options, facts["actor"]),
        engines=engines,
        # Others than ours are not known to take weights while they are awake.
        rollout_leaves=not (known and all(isinstance(replica, InProcessReplica) for replica in replicas)),
        rollout_fixed=not trainer.config.actor_rollout_ref.rollout.free_cache_engine,
        replicas=_devices_of(replicas, trainer.actor_rollout_wg.workers, facts["actor"]),
    )


def _devices_of(
    replicas: Sequence[Any], workers: Sequence[Any], ranks: Sequence[RankFacts]
) -> dict[str, frozenset[str]]:
    """Devices of the replicas that share the actor's workers, by name."""
    devices = {worker._actor_id: rank.device for worker, rank in zip(workers, ranks, strict=True)}
    return {
        f"replica {replica.replica_rank}": frozenset(devices[worker._actor_id] for worker in replica.workers)
        for replica in replicas
        if all(worker._actor_id in devices for worker in replica.workers)
    }


def _rollout(trainer: Any, options: M2FlowConfig, ranks: Sequence[RankFacts]) -> AllReplicas:
    config = trainer.config
    parameters = count_parameters(str(config.actor_rollout_ref.model.path))
    fetches = sync_fetches_actor(config)
    return AllReplicas(
        ROLLOUT,
        trainer.checkpoint_manager,
        trainer.actor_rollout_wg.workers,
        [rank.device for rank in ranks],
        rollout_bytes(config, options, parameters, min(rank.capacity for rank in ranks)),
        lambda: int(trainer.global_steps),
        fence_folder=fence_folder(),
        awake=not config.actor_rollout_ref.rollout.free_cache_engine,
        fetches_actor=fetches,
    )


def _resident(part: Part, workers: Sequence[Any], ranks: Sequence[RankFacts], working: int) -> Resident:
    devices = [rank.device for rank in ranks]
    engines: list[EngineFacts] = [rank.engines[part] for rank in ranks]
    nbytes = max(engine.nbytes for engine in engines) + working
    if not engines[0].stays:
        return WorkingRoom(part, workers, devices, nbytes, fence_folder=fence_folder())
    moves_optimizer = engines[0].optimizer_stays
    return EngineResident(part, workers, part, devices, nbytes, fence_folder=fence_folder(), optimizer=moves_optimizer)


def _ask(workers: Sequence[Any], parts: Sequence[Part]) -> list[RankFacts]:
    calls: Mapping[int, Any] = {
        index: worker.__ray_call__.remote(describe, tuple(parts)) for index, worker in enumerate(workers)
    }
    found: list[RankFacts] = ray.get([calls[index] for index in range(len(workers))])
    return found
