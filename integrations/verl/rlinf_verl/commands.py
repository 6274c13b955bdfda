"""Commands the veRL integration adds to ``rlinf-plugins``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlinf_verl.search import commands as search_commands
from rlinf_verl.vla import commands as vla_commands


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    search_commands.register(app)
    vla_commands.register(app)

    @app.command("make-tiny")
    def make_tiny(
        what: Annotated[Literal["text"], typer.Argument(help="Which tiny job.")],
        folder: Annotated[Path, typer.Argument(help="Where to write model and data.")],
        seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    ) -> None:
        """Write the model and data of a tiny recipe and print the command that trains it."""
        from rlinf_verl import tiny_text

        size = tiny_text.make(folder, seed=seed)
        typer.echo(f"wrote a random Llama of {size:,} parameters and its data to {folder}")
        typer.echo("train: python -m verl.trainer.main_ppo +recipe=text_grpo_tiny trainer.v1.trainer_mode=m2flow")

    @app.command()
    def demo(
        folder: Annotated[Path, typer.Option(help="Where to keep everything.")] = Path("runs/demo"),
        steps: Annotated[int, typer.Option(help="Train up to this step.")] = 25,
        resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in the folder.")] = False,
        overrides: Annotated[list[str] | None, typer.Argument(help="Further Hydra overrides for veRL.")] = None,
    ) -> None:
        """Train a small OpenVLA with GRPO in veRL on a real ManiSkill task; about ten minutes on two cores."""
        from rlinf_verl import demo as demo_job

        demo_job.run(folder, steps=steps, resume=resume, overrides=overrides or ())
