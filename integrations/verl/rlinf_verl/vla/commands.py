"""Commands for embodied policies: evaluate a checkpoint, make a tiny one."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""

    @app.command()
    def evaluate(
        checkpoint: Annotated[Path, typer.Argument(help="Folder of an OpenVLA or OpenVLA-OFT checkpoint.")],
        suite: Annotated[str, typer.Argument(help="A suite's name, or a YAML file; a wrong name lists the suites.")],
        overrides: Annotated[list[str] | None, typer.Argument(help="key=value, e.g. trials=10 num_envs=2.")] = None,
        videos: Annotated[Path | None, typer.Option(help="Folder for a video of every episode.")] = None,
        output: Annotated[Path | None, typer.Option(help="JSON file for rates and single episodes.")] = None,
        device: Annotated[str, typer.Option(help="Where the policy computes.")] = "cpu",
        dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Type of its weights.")] = "float32",
    ) -> None:
        """Run each (task, initial state) of a suite once; report success with Wilson's 95 % interval per task."""
        import torch
        from rich.console import Console

        from rlinf_verl.vla import evaluate as job
        from rlinf_verl.vla import evaluate_report as report
        from rlinf_verl.vla.suites import read_suite

        # Films are encoded behind the episodes; give the last ones time to be finished.
        more = [f"pool.video.folder={videos}", "pool.deadlines.close=120.0"] if videos is not None else []
        chosen = read_suite(suite, [*(overrides or ()), *more])
        engine = job.load_engine(checkpoint, chosen, device=device, dtype=getattr(torch, dtype))
        done: list[report.Verdict] = []

        def say(verdict: report.Verdict, total: int) -> None:
            done.append(verdict)
            result = verdict.failure or ("solved" if verdict.success else "not solved")
            typer.echo(f"{len(done):4d}/{total}  task {verdict.task} trial {verdict.trial}  {result}", err=True)

        typer.echo(f"starting {chosen.num_envs} environments; an episode is reported when it ends", err=True)
        verdicts, names = job.evaluate(engine, chosen, say)
        Console().print(report.table(verdicts, names, f"{checkpoint} on {suite}"))
        if output is not None:
            report.write_json(output, verdicts, names, {"checkpoint": str(checkpoint), "suite": suite})

    @app.command()
    def smoke(
        recipe: Annotated[str, typer.Argument(help="A tiny OpenVLA recipe; a wrong name lists them.")],
        overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for veRL.")] = None,
        folder: Annotated[Path | None, typer.Option(help="Where to keep everything; runs/RECIPE.")] = None,
    ) -> None:
        """Run a tiny recipe for a few steps, from a random checkpoint it makes: does everything work together here?"""
        from rlinf_verl.vla import smoke as job

        job.run(recipe, folder or Path("runs") / recipe, overrides or ())

    @app.command("make-tiny-openvla")
    def make_tiny_openvla(
        folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
        variant: Annotated[Literal["openvla", "openvla-oft"], typer.Option(help="Which model.")] = "openvla",
        dim: Annotated[int, typer.Option(help="Numbers in an action.")] = 7,
        chunk: Annotated[int | None, typer.Option(help="Actions at once; 1, or 8 for openvla-oft.")] = None,
        proprio: Annotated[int, typer.Option(help="Size of the proprioceptive state; 0 for none.")] = 0,
        images: Annotated[int, typer.Option(help="Camera images.")] = 1,
        value_head: Annotated[
            Literal["none", "chunk", "action"], typer.Option(help="Outputs of the value head; PPO needs one.")
        ] = "none",
        bins: Annotated[int, typer.Option(help="Action tokens per number.")] = 256,
        size: Annotated[
            Literal["smallest", "demo"], typer.Option(help="For tests, or 7 M parameters that train on a CPU.")
        ] = "demo",
        seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    ) -> None:
        """Write a random checkpoint in the published layout: every key, file and convention, at a tiny size."""
        import dataclasses

        from rlinf_plugins.models.openvla import ActionSpec, TinySizes, make_tiny_checkpoint

        parallel = variant == "openvla-oft"
        spec = ActionSpec(
            decoding="parallel" if parallel else "autoregressive",
            chunk=chunk or (8 if parallel else 1),
            dim=dim,
            proprio_dim=proprio,
            num_images=images,
            value_head=value_head,
        )
        spec.validate("--")
        sizes = TinySizes.demo() if size == "demo" else TinySizes()
        sizes = dataclasses.replace(sizes, action_bins=bins)
        make_tiny_checkpoint(folder, variant=variant, seed=seed, sizes=sizes, spec=spec)
        typer.echo(f"wrote a random {variant} checkpoint to {folder}")
