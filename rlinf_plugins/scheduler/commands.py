"""Commands this part adds to ``rlinf-plugins``; what they need is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

FlowFile = Annotated[Path, typer.Argument(help="Flow file (YAML or JSON).")]
ClusterFile = Annotated[Path, typer.Option("--cluster", help="Cluster file (YAML or JSON).")]
ProfileFile = Annotated[Path, typer.Option("--profile", help="Profile (JSON).")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("profile")(profile)
    app.command("plan")(plan)
    app.command("simulate")(simulate_plan)


def profile(
    arguments: Annotated[
        list[str], typer.Argument(metavar="FLOW | OVERRIDES...", help="Flow file; with --trainer: its own options.")
    ],
    out: Annotated[Path, typer.Option(help="Profile to write, or to append to.")],
    trainer: Annotated[str | None, typer.Option(help="Measure a job of this trainer (verl) by running it.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="Cluster file (YAML or JSON).")] = None,
    probes: Annotated[
        Path | None, typer.Option(help="What to run (YAML): stage -> 'module:factory', devices, items, ...")
    ] = None,
    devices: Annotated[list[int] | None, typer.Option(help="With --trainer: device counts to try.")] = None,
    repeats: Annotated[int, typer.Option(help="With --trainer: steps at every granularity.")] = 3,
    append: Annotated[bool, typer.Option(help="Add to the profile at --out instead of replacing it.")] = False,
) -> None:
    """Run each component at several device counts and granularities and write its samples.

    With --trainer, the components are those of a training job: give its options as you would to the trainer, after --.
    """
    from rlinf_plugins.scheduler.planning.cli import run_profile, run_trainer_profile

    if trainer is not None:
        run_trainer_profile(trainer, arguments, out, devices=devices or [], repeats=repeats, append=append)
        return
    if len(arguments) != 1 or cluster is None or probes is None:
        raise typer.BadParameter("give one flow file, --cluster and --probes; or --trainer and its options after --")
    run_profile(Path(arguments[0]), cluster, probes, out, append=append)


def plan(
    flow: FlowFile,
    cluster: ClusterFile,
    profile: ProfileFile,
    pin: Annotated[
        list[str] | None, typer.Option(help="Fix a stage: NAME=8, NAME=8:gpu, NAME=temporal or NAME=spatial.")
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Allowed modes: temporal, spatial, hybrid.")] = None,
    together: Annotated[
        list[str] | None, typer.Option(help="Stages that one process serves, as A,B: they share a pool.")
    ] = None,
    objective: Annotated[str, typer.Option(help="time, p99, cvar, gpu-hours, energy, memory or staleness.")] = "time",
    max_staleness: Annotated[int, typer.Option(help="Steps by which data may lag behind the weights (0 or 1).")] = 0,
    limit_s: Annotated[float | None, typer.Option(help="Stop searching after so many seconds.")] = None,
    max_age_days: Annotated[float, typer.Option(help="Refuse profiles older than this.")] = 30.0,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan (JSON) here; also prints a trainer's overrides.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the Gantt chart (HTML) here.")] = None,
    robust: Annotated[bool, typer.Option(help="Say how wrong each component's profile may be.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON only.")] = False,
) -> None:
    """Find the best placement and explain it."""
    from rlinf_plugins.scheduler.planning.cli import run_plan

    run_plan(
        flow,
        cluster,
        profile,
        pins=pin or [],
        modes=mode or [],
        together=together or [],
        objective=objective,
        max_staleness=max_staleness,
        limit_s=limit_s,
        max_age_days=max_age_days,
        out=out,
        html=html,
        robust=robust,
        as_json=as_json,
    )


def simulate_plan(
    flow: FlowFile,
    cluster: ClusterFile,
    profile: ProfileFile,
    plan: Annotated[Path, typer.Option(help="Plan (JSON).")],
    repeats: Annotated[int, typer.Option(help="Simulated steps.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the first step.")] = 0,
    failures_per_device_hour: Annotated[float, typer.Option(help="Rate at which a busy device fails.")] = 0.0,
    restart_s: Annotated[float, typer.Option(help="Seconds until a failed pool is back.")] = 60.0,
    html: Annotated[Path | None, typer.Option(help="Write the first step's Gantt chart (HTML) here.")] = None,
) -> None:
    """Replay a plan in the simulator; on a cluster of another size its pools grow or shrink in proportion."""
    from rlinf_plugins.scheduler.planning.cli import run_simulation

    run_simulation(
        flow,
        cluster,
        profile,
        plan,
        repeats=repeats,
        seed=seed,
        failures_per_device_hour=failures_per_device_hour,
        restart_s=restart_s,
        html=html,
    )
