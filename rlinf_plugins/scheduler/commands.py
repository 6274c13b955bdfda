"""Commands this part adds to ``rlinf-plugins``."""

import typer

from rlinf_plugins.scheduler.planning.cli import register as register_planning


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    register_planning(app)
