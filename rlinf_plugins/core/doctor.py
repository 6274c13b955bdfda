"""``rlinf-plugins doctor``: one screen that says what works on this machine and how to fix what does not.

Parts and integrations contribute checks through the entry-point group ``rlinf_plugins.checks``: each entry is a
callable without arguments that yields :class:`CheckResult` values and imports whatever it needs itself.
"""

import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

CHECK_GROUP = "rlinf_plugins.checks"

Status = Literal["ok", "warn", "fail", "absent"]
"""``absent``: an optional feature that is not installed; a failure only where the user asked for the feature."""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "absent": "dim"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One line of the doctor's report.

    Attributes:
        feature: What the user would ask for: ``"core"``, ``"verl"``, ``"maniskill"``, ``"libero"``, ``"search"``, ...
        name: What was checked.
        status: Outcome.
        detail: The value that was found.
        fix: What to do; empty where nothing is wrong.
    """

    feature: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def run_checks() -> Iterator[CheckResult]:
    """Yield the results of all registered checks; a check that raises is itself a failing result."""
    for entry in sorted(importlib.metadata.entry_points(group=CHECK_GROUP), key=lambda e: e.name):
        try:
            yield from entry.load()()
        except Exception as error:  # a check that breaks must not hide the others
            yield CheckResult(
                feature=entry.name,
                name="checks ran to the end",
                status="fail",
                detail=f"{type(error).__name__}: {error}",
                fix="this is a defect of the check; please report it with this line",
            )


def unusable(results: list[CheckResult], required: set[str]) -> list[CheckResult]:
    """Return the results that make the report fail: failures, and absences of a required feature."""
    return [r for r in results if r.status == "fail" or (r.status == "absent" and r.feature in required)]


def register(app: typer.Typer) -> None:
    """Add the ``doctor`` command."""

    @app.command()
    def doctor(
        require: Annotated[list[str] | None, typer.Option(help="Feature that must work; may be repeated.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of the table.")] = False,
    ) -> None:
        """Check versions, plugin, patches, devices, engines and simulators; exit non-zero where one cannot run."""
        results = list(run_checks())
        failing = unusable(results, set(require or []))
        if as_json:
            typer.echo(json.dumps([asdict(result) for result in results], indent=2))
        else:
            _print(results, failing)
        raise typer.Exit(1 if failing else 0)


def _print(results: list[CheckResult], failing: list[CheckResult]) -> None:
    console = Console()
    table = Table(show_header=True, box=None, pad_edge=False)
    for column in ("", "feature", "check", "found"):
        table.add_column(column, overflow="fold")
    for result in results:
        colour = _COLOURS[result.status]
        found = result.detail if not result.fix else f"{result.detail}\n-> {result.fix}"
        table.add_row(f"[{colour}]{result.status}[/]", result.feature, escape(result.name), escape(found))
    console.print(table)
    console.print(f"{len(results)} checks, {len(failing)} failing")
