"""``rlinf-plugins profile --trainer verl``: measure the stages of the user's own job by running it.

A job measures its stages itself (``trainer.v1.m2flow.profile``). Profiling is a handful of short jobs: one for each
device count, taking granularities in turn, and one with rollout on devices of its own, to see what running side by side
and moving weights between devices cost.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from omegaconf import DictConfig

from rlinf_plugins.core.errors import ConfigError, TrainingJobError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.fit import Surface
from rlinf_plugins.scheduler.planning.profile import Profile, StageProfile
from rlinf_verl.config import NODE, M2FlowConfig, m2flow_config
from rlinf_verl.job import TrainingJob
from rlinf_verl.job_flow import ROLLOUT, job_cluster, job_flow
from rlinf_verl.profiles import JobProfile

WARM_UP = 2

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One short job.

    Attributes:
        mode: ``trainer.v1.m2flow.mode``.
        trainer: Devices of the trainer's pool.
        rollout: Devices of rollout's own pool; 0: it shares the trainer's.
        overrides: What makes the user's job this one.
    """

    mode: str
    trainer: int
    rollout: int
    overrides: tuple[str, ...]


def profile(
    out: Path, overrides: Sequence[str], *, devices: Sequence[int] = (), repeats: int = 3, report: Report = print
) -> Profile:
    """Run the trials of a job and return its profile, which is also written to ``out``.

    Args:
        out: Profile to write, or to add to if it is there. Flow and cluster are written beside it, for
            ``rlinf-plugins plan``, as ``*.flow.yaml`` and ``*.cluster.yaml``.
        overrides: The user's own Hydra overrides, as for ``verl.trainer.main_ppo``.
        devices: Device counts to try; empty: powers of two, and all devices.
        repeats: Steps at every granularity.
        report: Takes lines about the progress.

    Raises:
        ConfigError: The job is impossible, or no device count fits it.
        ProfileError: ``out`` is of another job or other hardware, or stale.
        TrainingJobError: A trial failed; its last lines are in the message.
    """
    out = out.resolve()
    config = composed(overrides)
    options = m2flow_config(config)
    flow, cluster = job_flow(config), job_cluster(config, options)
    JobProfile(out, flow, cluster)
    out.with_suffix(".flow.yaml").write_text(yaml.safe_dump(flow.to_mapping(), sort_keys=False))
    out.with_suffix(".cluster.yaml").write_text(yaml.safe_dump(cluster.to_mapping(), sort_keys=False))
    sizes = granularities(config)
    alone = shared_trials(overrides, cluster, devices or counts(cluster.size), report)
    with tempfile.TemporaryDirectory(prefix="rlinf-profile-") as name:
        for trial in alone:
            report(f"temporal on {trial.trainer} device(s), granularities {', '.join(map(str, sizes))}")
            _run(trial, [*overrides, *fixed(sizes, repeats), f"++{NODE}.profile.path={out}"], Path(name))
        found = JobProfile(out, flow, cluster).read()
        for trial in apart_trials(overrides, [trial.trainer for trial in alone], cluster):
            beside = Path(name) / "beside.json"
            report(f"spatial on {trial.trainer} + {trial.rollout} device(s)")
            # As many steps as alone, so that both see the same prompts.
            streamed = [*sizes[1:], sizes[-1]]
            _run(trial, [*overrides, *fixed(streamed, repeats), f"++{NODE}.profile.path={beside}"], Path(name))
            apart = JobProfile(beside, flow, cluster).read()
            found = found.appended(slowdowns(found, apart), syncs=apart.syncs)
            found.write(out)
    for stage, measured in found.stages.items():
        report(f"{stage}: {len(measured.samples)} samples, slowdown {measured.slowdown or 'none'}")
    served = ",".join(stage.name for stage in flow.stages if stage.name != ROLLOUT)
    report(
        f"plan it: rlinf-plugins plan {out.with_suffix('.flow.yaml')} --cluster {out.with_suffix('.cluster.yaml')} "
        f"--profile {out} --mode temporal --mode spatial --together {served} --out plan.json"
    )
    return found


def composed(overrides: Sequence[str]) -> DictConfig:
    """Return veRL's configuration under the overrides.

    Raises:
        ConfigError: Hydra refuses an override.
    """
    import verl  # noqa: F401  stores the recipes
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", list(overrides))
    except HydraException as error:
        raise ConfigError(f"veRL cannot read the overrides {list(overrides)}: {error}") from error


def granularities(config: DictConfig) -> tuple[int, ...]:
    """Return the granularities to measure: the whole batch (0), a mini-batch, a fourth and a sixteenth of it."""
    mini = int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
    return (0, *(mini >> shift for shift in (0, 2, 4) if mini % (1 << shift) == 0))


def fixed(sizes: Sequence[int], repeats: int) -> list[str]:
    """Return what trials share: ``repeats`` steps at each granularity, from scratch, nothing saved or validated."""
    return [
        f"trainer.total_training_steps={WARM_UP + repeats * len(sizes)}",
        "trainer.total_epochs=1000000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        "trainer.v1.trainer_mode=m2flow",
        f"++{NODE}.profile.warmup={WARM_UP}",
        f"++{NODE}.profile.granularities=[{','.join(map(str, sizes))}]",
    ]


def counts(total: int) -> list[int]:
    """Return the device counts to try of ``total``: powers of two, and all."""
    return sorted({*(1 << power for power in range(total.bit_length()) if 1 << power <= total), total})


def shared_trials(overrides: Sequence[str], cluster: Cluster, devices: Sequence[int], report: Report) -> list[Trial]:
    """Return one temporal trial per device count that the job can use.

    Raises:
        ConfigError: No count fits.
    """
    trials, refused = [], []
    for count in devices:
        trial = Trial(mode="temporal", trainer=count, rollout=0, overrides=tuple(_pool("trainer", count, cluster)))
        reason = refusal([*overrides, *trial.overrides])
        if reason is None:
            trials.append(trial)
        else:
            refused.append(f"{count} device(s): {reason}")
            report(f"left out {refused[-1]}")
    if not trials:
        raise ConfigError(f"the job can use none of {list(devices)} devices; {'; '.join(refused)}")
    return trials


def apart_trials(overrides: Sequence[str], usable: Sequence[int], cluster: Cluster) -> list[Trial]:
    """Return the trial with half of the devices for rollout, if both halves were measured alone."""
    half = cluster.size // 2
    if half not in usable:
        return []
    pools = [*_pool("trainer", half, cluster), *_pool("actor_rollout_ref.rollout", half, cluster)]
    trial = Trial(mode="spatial", trainer=half, rollout=half, overrides=(*pools, f"++{NODE}.mode=spatial"))
    return [trial] if refusal([*overrides, *trial.overrides]) is None else []


def refusal(overrides: Sequence[str]) -> str | None:
    """Return why the plugin's checks refuse a job; None: they do not."""
    from rlinf_verl.modes import check_mode
    from rlinf_verl.preflight import check_sizes

    try:
        config = composed(overrides)
        options: M2FlowConfig = m2flow_config(config)
        check_sizes(config, options)
        check_mode(config, options)
    except ConfigError as error:
        return str(error)
    return None


def slowdowns(alone: Profile, apart: Profile) -> dict[str, StageProfile]:
    """Return how many times as long stages take while others run on other devices, from the two kinds of trials.

    A stage's calls apart are compared with what its calls alone say for the same items and devices. The whole of the
    trainer's stages counts as one neighbour of rollout, entered under the actor.
    """
    found = {}
    for name, measured in apart.stages.items():
        known = alone.stages.get(name)
        if known is None or not known.samples or not measured.samples:
            continue
        on, items, seconds = zip(*((s.devices, s.items, s.seconds) for s in known.samples), strict=True)
        surface = Surface.fit(on, items, seconds, "time")
        expected = sum(float(surface.at(np.array([s.devices]), s.items)[0]) for s in measured.samples)
        factor = max(sum(s.seconds for s in measured.samples) / expected, 1.0)
        found[name] = StageProfile(slowdown={"actor" if name == "rollout" else "rollout": factor})
    return found


def _pool(prefix: str, count: int, cluster: Cluster) -> list[str]:
    per_node = min(count, cluster.node_of(cluster.kinds[0]).devices)
    return [f"{prefix}.nnodes={-(-count // per_node)}", f"{prefix}.n_gpus_per_node={per_node}"]


def _run(trial: Trial, overrides: Sequence[str], folder: Path) -> None:
    log = folder / f"{trial.mode}-{trial.trainer}.log"
    job = TrainingJob([*overrides, *trial.overrides], folder=Path.cwd(), log=log, metrics=folder / "metrics.jsonl")
    with job:
        for _ in job.steps():
            pass
    if job.returncode:
        raise TrainingJobError(f"profiling {trial.mode} on {trial.trainer} device(s) failed:\n{job.last_lines()}")
