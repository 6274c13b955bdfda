"""The ``rlinf-plugins`` command. Parts and integrations add commands through the entry-point group below."""

import importlib.metadata
import sys
from typing import Annotated

import typer

from rlinf_plugins import __version__
from rlinf_plugins.core.errors import RlinfError

COMMAND_GROUP = "rlinf_plugins.commands"
"""Entry points of this group are callables ``register(app: typer.Typer) -> None``; names are only labels."""


def build_app() -> typer.Typer:
    """Return the command-line application with every registered command."""
    app = typer.Typer(name="rlinf-plugins", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback(invoke_without_command=True)
    def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
        """Embodied and agentic RL, fast, in veRL."""
        if version:
            typer.echo(__version__)
            raise typer.Exit

    for entry in sorted(importlib.metadata.entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        entry.load()(app)
    return app


def main() -> None:
    """Run the command line; a reported failure prints its message and exits with 1, a defect its traceback."""
    try:
        build_app()()
    except RlinfError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        sys.exit(1)


if __name__ == "__main__":
    main()
