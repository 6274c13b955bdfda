"""``mode=auto``: measure the job's stages, plan, and set mode, granularity and device split in veRL's configuration.

It runs in the driver before Ray starts. What it measures with is the job itself: short trials of the user's own command
(see ``profiling.py``), unless there is a profile.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from rlinf_plugins.core.errors import ConfigError, PlanError, RlinfError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_verl.config import NODE, M2FlowConfig
from rlinf_verl.forecast import Choice, Forecast
from rlinf_verl.job_flow import ROLLOUT, job_cluster, job_flow
from rlinf_verl.placement import layout
from rlinf_verl.profiling import profile as measure
from rlinf_verl.say import say
from rlinf_verl.trainer.barriers import streaming_of, whole_batch_reasons

_TRIAL = ("++skip.rollout_tq.enable=false",)
"""What a trial must not do."""

Check = Callable[[DictConfig], None]


def choose(config: DictConfig, options: M2FlowConfig, check: Check) -> None:
    """Choose and write the choice into ``config``.

    Args:
        config: veRL's whole configuration.
        options: The options in it; ``mode`` is ``auto``.
        check: Refuses a configuration that cannot run, by raising; a choice it refuses is passed over.

    Raises:
        ConfigError: There is nothing to choose from, or the plan is for another cluster.
        ProfileError: The profile does not hold for this job.
        TrainingJobError: A trial failed.
    """
    cluster = job_cluster(config, options)
    if options.plan:
        choice = _planned(options.plan, cluster)
        _apply(config, choice)
        _predict(config, choice)
        say(f"mode=auto: as {options.plan} says, {config.trainer.v1.m2flow.mode}")
        return
    reasons = [*whole_batch_reasons(config), *streaming_of(config).reasons] if cluster.size > 1 else ["one device"]
    if reasons and not _own_devices(config):
        _apply(config, Choice(mode="temporal", trainer=cluster.size))
        say(f"mode=auto chose temporal: nothing could overlap ({'; '.join(reasons)})")
        return
    path = Path(options.profile.path or Path(config.trainer.default_local_dir) / "m2flow" / "profile.json")
    if not path.exists():
        say(f"mode=auto: no profile at {path}; short trials of this job measure its stages")
        path.parent.mkdir(parents=True, exist_ok=True)
        measure(path, [*sys.argv[1:], f"++{NODE}.mode=temporal", *_TRIAL], repeats=1, report=say)
    profile = Profile.read(path)
    profile.check_usable(job_flow(config), cluster, now=time.time())
    shards = checkpoint_shards(config)
    choices = choices_of(config, cluster, profile, trainer_devices=shards)
    if shards is not None:
        say(f"mode=auto: the checkpoint to resume from was written by {shards} trainer device(s), so it stays at that")
    chosen, refused = _first_possible(config, choices, check)
    _apply(config, chosen)
    _predict(config, chosen)
    with open_dict(config):
        OmegaConf.update(config, f"{NODE}.profile.path", str(path), force_add=True)
    stages = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in chosen.stages.items())
    say(f"mode=auto chose {chosen} a step, by {path}: {stages}")
    for reason in refused:
        say(f"  impossible: {reason}")
    for other in choices[len(refused) + 1 :]:
        if other.seconds <= 2 * chosen.seconds:
            say(f"  rather than {other} (+{other.seconds / chosen.seconds - 1:.0%})")


def choices_of(
    config: DictConfig, cluster: Cluster, profile: Profile, *, trainer_devices: int | None = None
) -> list[Choice]:
    """Return the ways to run a job, fastest first.

    Args:
        config: veRL's whole configuration.
        cluster: The job's devices.
        profile: What its stages took.
        trainer_devices: Devices the trainer must have; None: any number.
    """
    mini = int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
    splits = splits_of(config, cluster)
    forecast = Forecast(job_flow(config), cluster, profile, mini_batch=mini, trainer_devices=trainer_devices)
    found = [
        choice for choice in forecast.planned() if not choice.rollout or (choice.rollout, choice.trainer) in splits
    ]
    if _own_devices(config):
        found = [choice for choice in found if choice.rollout]
    for rollout, trainer in splits:
        if trainer_devices in (None, trainer):
            choices = [forecast.hybrid(rollout, trainer, size) for size in granularities_of(config)]
            found.append(min(choices, key=lambda choice: choice.seconds))
    return sorted(found, key=lambda choice: choice.seconds)


def splits_of(config: DictConfig, cluster: Cluster) -> list[tuple[int, int]]:
    """Return the devices rollout and training may have apart: whole replicas, and whole nodes if there are several."""
    own, rollout = _own_devices(config), config.actor_rollout_ref.rollout
    if own:
        return [(own, cluster.size - own)]
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    nodes = len(cluster.machines())
    step = replica if nodes == 1 else cluster.size // nodes
    return [(count, cluster.size - count) for count in range(step, cluster.size, step) if count % replica == 0]


def granularities_of(config: DictConfig) -> tuple[int, ...]:
    """Return the chunk sizes in prompts that divide a mini-batch, ascending."""
    mini = int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
    return tuple(sorted({mini >> shift for shift in range(6) if mini % (1 << shift) == 0}))


def checkpoint_shards(config: DictConfig) -> int | None:
    """Return by how many trainer devices the checkpoint that the job resumes from was written; None: there is none."""
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        folder = Path(str(trainer.resume_from_path))
    else:
        tracker = Path(str(trainer.default_local_dir)) / "latest_checkpointed_iteration.txt"
        if not tracker.exists():
            return None
        folder = tracker.with_name(f"global_step_{tracker.read_text().strip()}")
    sizes = [path.name.split("_")[3] for path in folder.glob("actor/model_world_size_*_rank_0.pt")]
    return int(sizes[0]) if sizes else None


def _own_devices(config: DictConfig) -> int:
    rollout = config.actor_rollout_ref.rollout
    return int(rollout.nnodes * rollout.n_gpus_per_node)


def _overrides(config: DictConfig, choice: Choice) -> list[str]:
    """Return a choice as values of veRL's configuration."""
    found = [f"{NODE}.mode={choice.mode}", f"{NODE}.granularity={choice.granularity}"]
    if choice.mode == "hybrid":
        found.append(f"{NODE}.lend_until={choice.lend_until}")
    nodes, per_node = config.trainer.nnodes, config.trainer.n_gpus_per_node
    rollout = "actor_rollout_ref.rollout"
    if choice.mode == "temporal" or _own_devices(config):
        return found
    if nodes == 1:
        split = (1, choice.trainer, 1, choice.rollout)
    else:
        split = (choice.trainer // per_node, per_node, choice.rollout // per_node, per_node)
    keys = ("trainer.nnodes", "trainer.n_gpus_per_node", f"{rollout}.nnodes", f"{rollout}.n_gpus_per_node")
    return found + [f"{key}={value}" for key, value in zip(keys, split, strict=True)]


def _apply(config: DictConfig, choice: Choice) -> None:
    entries = OmegaConf.from_dotlist(_overrides(config, choice))
    with open_dict(config):
        config.merge_with(entries)


def _predict(config: DictConfig, choice: Choice) -> None:
    with open_dict(config):
        config.trainer.v1.m2flow.predicted = {"step": choice.seconds, **choice.stages}


def _first_possible(config: DictConfig, choices: list[Choice], check: Check) -> tuple[Choice, list[str]]:
    refused: list[str] = []
    for choice in choices:
        trial = config.copy()
        _apply(trial, choice)
        try:
            check(trial)
        except RlinfError as error:
            refused.append(f"{choice}: {error}")
            continue
        return choice, refused
    listed = "; ".join(refused) or "no device split lets its stages divide the mini-batch"
    raise ConfigError(f"{NODE}.mode=auto finds no mode that can run: {listed}")


def _planned(path: str, cluster: Cluster) -> Choice:
    """Return the choice that a plan's file stands for."""
    plan = Plan.read(path)
    mine = {kind: cluster.count(kind) for kind in cluster.kinds}
    if plan.devices != mine:
        raise ConfigError(
            f"{NODE}.plan={path} is for {_words(plan.devices)}, this job has {_words(mine)}; plan for this cluster, "
            f"or leave {NODE}.plan empty"
        )
    placed = layout(plan, cluster)
    if placed.kind == "hybrid" or (placed.kind == "spatial") != (plan.mode == "spatial"):
        raise PlanError(
            f"{path} is a plan ({plan.summary()}) that {NODE} cannot follow; it follows one phase of rollout beside "
            "training, or all devices in turn: plan with `--mode spatial` or `--mode temporal`"
        )
    choice = Choice(mode=placed.kind, trainer=len(placed.devices["actor"]), seconds=plan.seconds)
    if placed.kind == "temporal":
        return choice
    return replace(choice, rollout=len(placed.devices[ROLLOUT]), granularity=plan.phases[0].items)


def _words(devices: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind} device(s)" for kind, count in devices.items())
