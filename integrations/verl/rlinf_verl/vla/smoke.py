"""Smoke runs: make the random checkpoint a tiny recipe wants, train a few steps, say that nothing was learnt."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from rlinf_plugins.core.config import suggest
from rlinf_plugins.core.errors import TrainingJobError, UnknownNameError
from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint
from rlinf_verl.job import TrainingJob

SPECS = {
    "openvla_maniskill_grpo_tiny": ActionSpec(dim=4),
    "openvla_maniskill_ppo_tiny": ActionSpec(dim=4, value_head="chunk"),
    "openvla_oft_libero_grpo_tiny": ActionSpec(decoding="parallel", chunk=8),
}
"""How the policy of each tiny recipe decodes."""


def make_checkpoint(recipe: str, folder: Path) -> None:
    """Make the random checkpoint a tiny recipe trains.

    Args:
        recipe: One of :data:`SPECS`.
        folder: Where to write it.
    """
    spec = SPECS[recipe]
    variant: Literal["openvla", "openvla-oft"] = "openvla" if spec.decoding == "autoregressive" else "openvla-oft"
    make_tiny_checkpoint(folder, variant=variant, sizes=TinySizes.demo(), spec=spec)


def run(recipe: str, folder: Path, overrides: Sequence[str] = ()) -> None:
    """Make the checkpoint if it is not there, and train.

    Args:
        recipe: One of :data:`SPECS`.
        folder: Where everything is kept.
        overrides: Further Hydra overrides.

    Raises:
        UnknownNameError: No such tiny recipe.
        TrainingJobError: veRL's command failed; the message ends with what it printed last.
    """
    if recipe not in SPECS:
        raise UnknownNameError(f"there is no smoke run {recipe!r}; {suggest(recipe, SPECS)}")
    folder = folder.resolve()
    model = folder / "model"
    if not (model / "model.safetensors").is_file():
        make_checkpoint(recipe, model)
    log = folder / "train.log"
    typer.echo(f"smoke run of {recipe} with random weights in {folder}; veRL's output goes to {log}")
    command = [
        f"+recipe={recipe}",
        "trainer.v1.trainer_mode=m2flow",
        "trainer.logger=[console,file]",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.resume_mode=disable",
        *overrides,
    ]
    job, steps = TrainingJob(command, folder=folder, log=log, metrics=folder / "metrics.jsonl"), 0
    with job:
        for step in job.steps():
            steps += 1
            typer.echo(
                f"step {step['training/global_step']}: return {step['critic/score/mean']:.3f}, gradient norm "
                f"{step['actor/grad_norm']:.4f}, failed episodes {step['training/rollout_failure/count']:.0f}, "
                f"{step['timing_s/step']:.0f} s"
            )
    if job.returncode:
        raise TrainingJobError(
            f"veRL's command ended with exit code {job.returncode} after {steps} steps; the end of {log}:\n"
            f"{job.last_lines()}"
        )
    typer.echo("everything works together; random weights learn nothing in so few steps, and this run did not try to")
