"""``rlinf-plugins profile``, ``plan`` and ``simulate``."""

import importlib.metadata
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from rlinf_plugins.core.config import from_mapping, suggest
from rlinf_plugins.core.errors import FlowError, PlanError, UnknownNameError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.constraints import Constraints, Pin
from rlinf_plugins.scheduler.planning.gantt import html_gantt, text_gantt
from rlinf_plugins.scheduler.planning.objectives import OBJECTIVES, choose
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.planner import PlanRequest
from rlinf_plugins.scheduler.planning.planner import plan as best_plan
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_plugins.scheduler.planning.profiler import Profiler, ProfilerConfig, load_factories
from rlinf_plugins.scheduler.planning.rescale import rescaled
from rlinf_plugins.scheduler.planning.simulator import Failures, Simulated, mean_and_tail, simulate
from rlinf_plugins.scheduler.planning.uncertainty import robustness, worth_measuring

WRITER_GROUP = "rlinf_plugins.plan_writers"
"""Entry points of this group are callables ``(plan, path, cluster) -> str``: what a trainer needs to run a plan."""

PROFILER_GROUP = "rlinf_plugins.profilers"
"""Entry points of this group are callables ``(out, overrides, *, devices, repeats, report)`` that measure a trainer's
job and write its profile; they are named after the trainer."""


def run_trainer_profile(
    trainer: str, overrides: list[str], out: Path, *, devices: list[int], repeats: int, append: bool
) -> None:
    """Measure a job of ``trainer``; see ``rlinf-plugins profile --trainer``.

    Raises:
        UnknownNameError: No such trainer is installed.
    """
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=PROFILER_GROUP)}
    if trainer not in entries:
        raise UnknownNameError(f"no profiler for trainer {trainer!r}; {suggest(trainer, entries)}")
    if not append:
        out.unlink(missing_ok=True)
    console = Console()

    def report(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    entries[trainer].load()(out, overrides, devices=devices, repeats=repeats, report=report)
    console.print(f"wrote {out}")


def run_profile(flow: Path, cluster: Path, probes: Path, out: Path, *, append: bool) -> None:
    """Measure the components and write or extend the profile; see ``rlinf-plugins profile``."""
    console = Console()
    graph, machines = read_flow(flow), Cluster.read(cluster)
    config = from_mapping(ProfilerConfig, _yaml(probes), str(probes))
    sys.path.insert(0, str(probes.resolve().parent))
    measured = Profiler(graph, machines, load_factories(config.probes), config).run(console.print)
    if append:
        measured = Profile.read(out).appended(measured.stages)
    measured.write(out)
    console.print(f"wrote {sum(len(s.samples) for s in measured.stages.values())} samples to {out}")


def run_plan(
    flow: Path,
    cluster: Path,
    profile: Path,
    *,
    pins: list[str],
    modes: list[str],
    together: list[str],
    objective: str,
    max_staleness: int,
    limit_s: float | None,
    max_age_days: float,
    out: Path | None,
    html: Path | None,
    robust: bool,
    as_json: bool,
) -> None:
    """Plan, print and write; see ``rlinf-plugins plan``."""
    request = PlanRequest(
        flow=read_flow(flow),
        cluster=Cluster.read(cluster),
        profile=Profile.read(profile),
        constraints=from_mapping(
            Constraints,
            {
                "pins": [_plain(parse_pin(text)) for text in pins],
                "max_staleness": max_staleness,
                "together": [[name.strip() for name in group.split(",")] for group in together],
                **({"modes": modes} if modes else {}),
            },
            "options",
        ),
        limit_s=limit_s,
        max_age_days=max_age_days,
    )
    chosen = best_plan(request)
    console = Console()
    if objective != "time":
        chosen = _by_objective(request, chosen, objective, console, quiet=as_json)
    if out is not None:
        out.write_bytes(chosen.to_json())
    if html is not None:
        run = _simulated(request.flow, request.cluster, request.profile, chosen)
        html.write_text(html_gantt(chosen, run.spans, run.seconds))
    if as_json:
        typer.echo(chosen.to_json().decode())
        return
    print_plan(chosen, console)
    run = _simulated(request.flow, request.cluster, request.profile, chosen)
    console.print(text_gantt(chosen, run.spans, run.seconds, console.width), highlight=False)
    if robust:
        _print_robustness(request, chosen, console)
    if out is not None:
        for line in overrides(chosen, out, request.cluster):
            console.print(line, soft_wrap=True, highlight=False)


def run_simulation(
    flow: Path,
    cluster: Path,
    profile: Path,
    plan: Path,
    *,
    repeats: int,
    seed: int,
    failures_per_device_hour: float,
    restart_s: float,
    html: Path | None,
) -> None:
    """Replay a plan and print what it took; see ``rlinf-plugins simulate``."""
    graph, machines, measured = read_flow(flow), Cluster.read(cluster), Profile.read(profile)
    chosen = rescaled(Plan.read(plan), graph, machines, measured)
    failures = None
    if failures_per_device_hour > 0:
        failures = Failures(per_device_hour=failures_per_device_hour, restart_seconds=restart_s)
    runs = [
        simulate(graph, machines, measured, chosen, np.random.default_rng(s), failures=failures)
        for s in np.random.SeedSequence(seed).spawn(repeats)
    ]
    seconds = np.array([run.seconds for run in runs])
    mean, p99, cvar = mean_and_tail(seconds)
    console = Console()
    print_plan(chosen, console)
    console.print(text_gantt(chosen, runs[0].spans, runs[0].seconds, console.width), highlight=False)
    console.print(
        f"simulated {repeats} steps: mean {mean:.4g} s, P99 {p99:.4g} s, CVaR {cvar:.4g} s, "
        f"{sum(run.failures for run in runs)} failures; predicted {chosen.seconds:.4g} s"
    )
    if html is not None:
        html.write_text(html_gantt(chosen, runs[0].spans, runs[0].seconds))


def read_flow(path: Path) -> Flow:
    """Read a flow file.

    Raises:
        FlowError: The file cannot be read or is not a usable flow.
        ConfigError: An unknown key or a wrong type.
    """
    return Flow.from_mapping(_yaml(path), str(path))


def parse_pin(text: str) -> Pin:
    """Read ``NAME=8``, ``NAME=8:gpu``, ``NAME=temporal`` or ``NAME=spatial``.

    Raises:
        PlanError: The text is of another form.
    """
    name, _, value = text.partition("=")
    count, _, kind = value.partition(":")
    if name and value in ("temporal", "spatial"):
        return Pin(stage=name, mode="temporal" if value == "temporal" else "spatial")
    if not name or not count.isdecimal() or int(count) < 1:
        raise PlanError(f"cannot read the pin {text!r}; write NAME=8, NAME=8:gpu, NAME=temporal or NAME=spatial")
    return Pin(stage=name, devices=int(count), kind=kind or None)


def overrides(plan: Plan, path: Path, cluster: Cluster) -> list[str]:
    """Return what the installed trainers need to apply the plan, one text a trainer."""
    entries = sorted(importlib.metadata.entry_points(group=WRITER_GROUP), key=lambda entry: entry.name)
    writers: list[tuple[str, Callable[[Plan, Path, Cluster], str]]] = [(entry.name, entry.load()) for entry in entries]
    return [f"{name}: {writer(plan, path, cluster)}" for name, writer in writers]


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan's table, prediction, reasons and alternatives."""
    table = Table(title=f"{plan.flow}: {plan.mode}", title_justify="left", box=None)
    for column in ("phase", "stage", "devices", "numbers", "shares with", "micro-batch", "remark"):
        table.add_column(column, overflow="fold")
    for row in plan.rows():
        table.add_row(*row)
    console.print(table)
    band = f" (90 % band {plan.band[0]:.4g} to {plan.band[1]:.4g} s)" if plan.band else ""
    gap = f", at most {plan.gap:.2%} from the optimum" if plan.gap else ""
    memory = ", ".join(f"{share:.0%} of a device's memory" for share in plan.memory.values())
    console.print(f"predicted step: {plan.seconds:.4g} s{band}{gap}; {memory}")
    for line in plan.reasons:
        console.print(f"  {line}")
    for line in plan.warnings:
        console.print(f"  [yellow]warning:[/] {line}")
    if plan.alternatives:
        console.print("not chosen:")
        for other in plan.alternatives:
            console.print(f"  {other.seconds:.4g} s  {other.summary}\n      {other.reason}", highlight=False)


def _by_objective(request: PlanRequest, fastest: Plan, objective: str, console: Console, *, quiet: bool) -> Plan:
    known = {name: name for name in OBJECTIVES}
    if objective not in known:
        raise PlanError(f"unknown objective {objective!r}; {suggest(objective, known)}")
    choice = choose(request, known[objective])
    if not quiet:
        table = Table(title=f"scored plans, best by {objective} first", title_justify="left", box=None)
        for column in ("plan", "", "time s", "P99 s", "CVaR s", "hours", "Wh", "memory", "lag"):
            table.add_column(column)
        order = sorted(range(len(choice.scores)), key=lambda i: choice.scores[i].value(known[objective]))
        for number, i in enumerate(order, start=1):
            s = choice.scores[i]
            mark = ("front" if i in choice.front else "") + (", knee" if i == choice.knee else "")
            energy = "-" if s.energy is None else f"{s.energy:.4g}"
            cells = [f"{v:.4g}" for v in (s.time, s.p99, s.cvar, s.gpu_hours)]
            table.add_row(str(number), mark, *cells, energy, f"{s.memory:.0%}", str(s.staleness))
        console.print(table)
        for number, i in enumerate(order, start=1):
            console.print(f"  {number}: {choice.scores[i].plan.summary()}", highlight=False)
        bound = "no bound is known" if choice.gap is None else f"at most {choice.gap:.2%} better"
        console.print(f"plans that were not scored: {bound}")
    best = choice.best.plan
    return replace(best, alternatives=fastest.alternatives, reasons=(f"best of {len(choice.scores)} by {objective}",))


def _print_robustness(request: PlanRequest, plan: Plan, console: Console) -> None:
    found = robustness(request, plan)
    table = Table(title="the plan holds while a component's true time is", title_justify="left", box=None)
    for column in ("stage", "at least", "at most", "mode holds from", "mode holds to"):
        table.add_column(column)
    for entry in found:
        ends = (entry.faster, entry.slower, entry.mode_faster, entry.mode_slower)
        table.add_row(entry.stage, *["any" if v in (0.0, math.inf) else f"{v:.2f} x" for v in ends])
    console.print(table)
    console.print(worth_measuring(found))


def _simulated(flow: Flow, cluster: Cluster, profile: Profile, plan: Plan) -> Simulated:
    return simulate(flow, cluster, profile, plan, np.random.default_rng(0), noise=False)


def _yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise FlowError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise FlowError(f"{path} must hold a mapping, got {type(values).__name__}")
    return values


def _plain(pin: Pin) -> dict[str, Any]:
    return {key: getattr(pin, key) for key in ("stage", "devices", "kind", "mode")}
