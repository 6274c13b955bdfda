"""Commands this part adds to ``rlinf-plugins``."""

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
