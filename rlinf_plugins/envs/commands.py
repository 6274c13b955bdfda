"""Commands this part adds to ``rlinf-plugins``."""

import functools
import importlib
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from rlinf_plugins.core.errors import ConfigError, UnknownNameError
from rlinf_plugins.core.options import parse_options
from rlinf_plugins.envs.protocol import EnvFactory


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""

    @app.command("check-env")
    def check_env(
        target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="What makes the environment.")],
        option: Annotated[
            list[str] | None, typer.Option(help="Argument of the factory, NAME=VALUE; may be repeated.")
        ] = None,
        timeout: Annotated[float, typer.Option(help="Seconds that one rule may take.")] = 300.0,
        seed: Annotated[int, typer.Option(help="Of the actions that are tried.")] = 0,
    ) -> None:
        """Run the contract's rules on an environment and say in plain words which ones it breaks; then exit with 1."""
        from rlinf_plugins.testing.env_check import check_environment, sentence

        factory = load_factory(target, parse_options(option or []))
        broken = 0
        for finding in check_environment(factory, timeout=timeout, seed=seed):
            broken += finding.verdict != "kept"
            colour = {"kept": typer.colors.GREEN, "broken": typer.colors.RED, "unknown": typer.colors.YELLOW}
            typer.echo(f"{typer.style(f'{finding.verdict:8}', fg=colour[finding.verdict])}{finding.rule}")
            if finding.verdict == "broken":
                for line in filter(None, (sentence(finding.rule), finding.explanation)):
                    typer.echo(f"        {line}")
        typer.echo(
            f"{target} keeps the contract" if not broken else f"{target} breaks or does not reach {broken} rules"
        )
        raise typer.Exit(1 if broken else 0)


def load_factory(target: str, options: dict[str, Any]) -> EnvFactory:
    """Import what makes an environment.

    Args:
        target: ``module:name``; modules of the working folder are found too.
        options: Arguments. A factory class (one whose instances are called to make an environment) is called with
            them; a function or an environment class gets them each time it makes one.

    Raises:
        ConfigError: ``target`` is not of that form, or the options do not fit.
        UnknownNameError: There is no such module or name.
    """
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"expected MODULE:FACTORY, e.g. rlinf_plugins.envs.gym:GymFactory, got {target!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnknownNameError(f"{target} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{target} is {found!r}, which cannot be called to make an environment")
    if inspect.isclass(found) and "__call__" in dir(found):
        try:
            return cast(EnvFactory, found(**options))
        except TypeError as error:
            raise ConfigError(f"the options do not fit {target}: {error}") from error
    return cast(EnvFactory, functools.partial(found, **options) if options else found)
