"""``rlinf-plugins demo``: a small but structurally real OpenVLA, trained by veRL's GRPO on a real ManiSkill task.

It shows every step as it happens, leaves metrics, a checkpoint that resumes and rollout videos, and says at the end
what was learned and what was not.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from rlinf_plugins.core.errors import ConfigError, MissingAssetError, TrainingJobError
from rlinf_verl.job import TrainingJob

RECIPE = "openvla_maniskill_grpo_tiny"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPaths:
    """Where the demo keeps its files, all below one folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """The random checkpoint training starts from."""
        return self.folder / "model"

    @property
    def checkpoints(self) -> Path:
        """VeRL's training checkpoints, one folder a saved step."""
        return self.folder / "checkpoints"

    @property
    def videos(self) -> Path:
        """Films of episodes."""
        return self.folder / "videos"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.folder / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """Everything veRL and Ray print."""
        return self.folder / "train.log"


def run(folder: Path, *, steps: int, resume: bool, overrides: Sequence[str] = ()) -> None:
    """Train and report.

    Args:
        folder: Where everything is kept; created if needed.
        steps: Train up to this step.
        resume: Go on from the last checkpoint in ``folder``.
        overrides: Further Hydra overrides.

    Raises:
        ConfigError: ``steps`` is not positive.
        MissingAssetError: There is nothing to resume from.
        TrainingJobError: veRL's command failed; the message ends with what it printed last.
    """
    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    paths = DemoPaths(folder=folder.resolve())
    if resume and not (paths.checkpoints / "latest_checkpointed_iteration.txt").is_file():
        raise MissingAssetError(f"there is no checkpoint in {paths.checkpoints} to resume from; run without --resume")
    paths.folder.mkdir(parents=True, exist_ok=True)
    parameters = _make_model(paths.model)
    typer.echo(
        f"OpenVLA, {parameters / 1e6:.1f} M random parameters (two vision transformers, projector, Llama, 256 bins)"
    )
    typer.echo("ManiSkill PushCube-v1 from 128-pixel RGB, four environments, one process each; veRL GRPO, mode m2flow")
    typer.echo(f"starting veRL and Ray takes a minute or two; everything they print goes to {paths.log}\n")
    job = TrainingJob(
        _overrides(paths, steps, resume, overrides), folder=paths.folder, log=paths.log, metrics=paths.metrics
    )
    started, history, peak = time.monotonic(), [], 0.0
    try:
        with job:
            for step in job.steps():
                history.append(step)
                peak = max(peak, job.memory_bytes())
                typer.echo(_line(step, steps))
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; nothing is left running. To go on from the last checkpoint:\n  {_again(paths, steps)}")
        raise
    if job.returncode:
        raise TrainingJobError(
            f"veRL's command ended with exit code {job.returncode} after {len(history)} steps; "
            f"the end of {paths.log}:\n{job.last_lines()}"
        )
    typer.echo("\n" + _summary(history, paths, time.monotonic() - started, peak))


def _make_model(folder: Path) -> int:
    """Write the random checkpoint if it is not there; return its number of parameters."""
    from safetensors import safe_open

    from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint

    if not (folder / "model.safetensors").is_file():
        make_tiny_checkpoint(folder, variant="openvla", seed=0, sizes=TinySizes.demo(), spec=ActionSpec(dim=4))
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  not a mapping
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def _overrides(paths: DemoPaths, steps: int, resume: bool, more: Sequence[str]) -> list[str]:
    return [
        f"+recipe={RECIPE}",
        "trainer.v1.trainer_mode=m2flow",
        "trainer.logger=[console,file]",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={min(steps, 10)}",
        "trainer.max_actor_ckpt_to_keep=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"trainer.default_local_dir={paths.checkpoints}",
        f"trainer.resume_mode={'auto' if resume else 'disable'}",
        f"actor_rollout_ref.model.path={paths.model}",
        f"+trainer.v1.m2flow.envs.pool.video={{folder: {paths.videos}, fps: 10, every: 10}}",
        *more,
    ]


def _line(step: dict[str, Any], steps: int) -> str:
    rollout, train = step["timing_s/gen"], step["timing_s/old_log_prob"] + step["timing_s/update_actor"]
    return (
        f"step {step['training/global_step']:3d}/{steps}  "
        f"success {step['rollout/acc/mean']:.2f}  return {step['critic/score/mean']:6.3f}  "
        f"gradient norm {step['actor/grad_norm']:7.4f}  failed episodes {step['training/rollout_failure/count']:.0f}  "
        f"{step['timing_s/step']:5.1f} s (rollout {rollout:.1f}, log-prob and update {train:.1f}, "
        f"weights {step['timing_s/update_weights']:.1f})"
    )


def _summary(history: Sequence[dict[str, Any]], paths: DemoPaths, seconds: float, peak: float) -> str:
    quarter = max(1, len(history) // 4)
    first = sum(step["critic/score/mean"] for step in history[:quarter]) / quarter
    last = sum(step["critic/score/mean"] for step in history[-quarter:]) / quarter
    success = sum(step["rollout/acc/mean"] for step in history[-quarter:]) / quarter
    norms = [step["actor/grad_norm"] for step in history]
    videos = sorted(paths.videos.glob("**/*.mp4"))
    trend = "rose" if last > first * 1.02 else "fell" if last < first * 0.98 else "stayed level"
    return "\n".join(
        [
            f"what happened: {len(history)} GRPO steps in {seconds / 60:.1f} minutes, "
            f"peak memory {peak / 2**30:.1f} GiB",
            f"  gradients flowed: norm {min(norms):.4f} to {max(norms):.4f}",
            f"  the return {trend}: {first:.3f} in the first steps, {last:.3f} in the last ones",
            f"  success {success:.2f}: a policy that starts from random weights does not solve this in minutes; the",
            "  run shows that simulator, policy, veRL's trainer and weight sync work together on this machine",
            "what it left:",
            f"  metrics {paths.metrics}, log {paths.log}",
            f"  checkpoints {paths.checkpoints}, videos {paths.videos} ({len(videos)} files)",
            "what to run next:",
            f"  {_again(paths, 2 * history[-1]['training/global_step'])}",
            f"  {_command()} evaluate {_last_policy(paths)} maniskill trials=4 pool.episode.max_steps=25",
            f"  {_command()} doctor    what else works on this machine",
            "  docs/models.md    your own OpenVLA or OpenVLA-OFT checkpoint",
        ]
    )


def _again(paths: DemoPaths, steps: int) -> str:
    return f"{_command()} demo --folder {paths.folder} --resume --steps {steps}"


def _command() -> str:
    """Return how this environment's ``rlinf-plugins`` is called from the user's shell."""
    found = shutil.which("rlinf-plugins")
    ours = Path(sys.executable).with_name("rlinf-plugins")
    return "rlinf-plugins" if found is not None and Path(found).samefile(ours) else str(ours)


def _last_policy(paths: DemoPaths) -> Path:
    step = (paths.checkpoints / "latest_checkpointed_iteration.txt").read_text().strip()
    return paths.checkpoints / f"global_step_{step}" / "actor" / "huggingface"
