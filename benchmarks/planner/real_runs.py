"""Predictions against real runs on two virtual devices: the long-tail text job of benchmarks/m2flow, by its profile.

python benchmarks/planner/real_runs.py [--rounds 2] [--steps 12] [--repeats 2] [--profile PATH]

Profiles the job, predicts a temporal step on two devices and a spatial one on one device each, then runs both in turn.
A prediction is right within 5 % (temporal) or 10 % (spatial), or within twice the run-to-run deviation if that is more.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

MODES = Path(__file__).parents[1] / "m2flow"
sys.path.insert(0, str(MODES))

import workload  # noqa: E402

from rlinf_plugins.scheduler.planning.plan import Plan  # noqa: E402
from rlinf_plugins.scheduler.planning.planner import plan  # noqa: E402
from rlinf_plugins.scheduler.planning.profile import Profile  # noqa: E402
from rlinf_verl.config import m2flow_config  # noqa: E402
from rlinf_verl.job import TrainingJob  # noqa: E402
from rlinf_verl.job_flow import job_cluster, job_flow  # noqa: E402
from rlinf_verl.placement import overrides  # noqa: E402
from rlinf_verl.planned import requests  # noqa: E402
from rlinf_verl.profiling import composed, profile  # noqa: E402

WARM_UP = 2
ALLOWED = {"temporal": 0.05, "spatial": 0.10}
SPATIAL_ITEMS = 4


def predicted(measured: Profile) -> dict[str, tuple[Plan, list[str]]]:
    """Return the best temporal plan on both devices and the spatial one with chunks of four, with their overrides."""
    config = composed(workload.WORKLOAD)
    flow, cluster = job_flow(config), job_cluster(config, m2flow_config(config))
    found = {}
    for request in requests(flow, cluster, measured, mini_batch=workload.BATCH):
        if request.constraints.modes == ("spatial",):
            request = replace(request, flow=replace(flow, granularities=(SPATIAL_ITEMS,)))
        chosen = plan(request)
        if chosen.mode == "spatial" or len(chosen.numbers_of("actor")) == cluster.size:
            found[chosen.mode] = chosen, overrides(chosen, cluster)
    return found


def run(mode: str, extra: list[str], folder: Path, steps: int) -> list[dict[str, float]]:
    """Return the timings of each counted step of one job."""
    options = [*workload.WORKLOAD, *extra, "trainer.logger=[file]", f"trainer.total_training_steps={steps}"]
    job = TrainingJob(options, folder=folder, log=folder / f"{mode}.log", metrics=folder / "m.jsonl")
    with job:
        found = [{k: v for k, v in step.items() if k.startswith("timing_s/")} for step in job.steps()]
    if job.returncode:
        raise SystemExit(f"{mode} failed:\n{job.last_lines(60)}")
    return found[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2, help="profiled steps at every granularity")
    parser.add_argument("--profile", type=Path, help="use or make this profile; default: one of its own")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{MODES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.make(folder)
        path = (options.profile or folder / "profile.json").resolve()
        os.chdir(folder)
        if not path.exists():
            profile(path, workload.WORKLOAD, devices=[1, 2], repeats=options.repeats, report=_say)
        plans = predicted(Profile.read(path))
        for mode, (chosen, extra) in plans.items():
            _say(f"{mode}: predicted {chosen.seconds:.3f} s, band {chosen.band}, {chosen.summary()}; {' '.join(extra)}")
        means: dict[str, list[float]] = {mode: [] for mode in plans}
        for turn in range(options.rounds):
            for mode in list(plans) if turn % 2 == 0 else list(plans)[::-1]:
                steps = run(mode, plans[mode][1], folder, options.steps)
                means[mode].append(statistics.fmean(step["timing_s/step"] for step in steps))
                parts = {k.removeprefix("timing_s/"): statistics.fmean(s.get(k, 0.0) for s in steps) for k in steps[0]}
                _say(f"{turn} {mode}: " + "  ".join(f"{k} {v:.3f}" for k, v in parts.items() if v > 0.005))
        for mode, seconds in means.items():
            mean = statistics.fmean(seconds)
            deviation = statistics.stdev(seconds) / mean if len(seconds) > 1 else 0.0
            error = plans[mode][0].seconds / mean - 1
            allowed = max(ALLOWED[mode], 2 * deviation)
            verdict = "within" if abs(error) <= allowed else "OUTSIDE"
            _say(
                f"{mode}: predicted {plans[mode][0].seconds:.3f} s, ran {mean:.3f} s ({len(seconds)} jobs, deviation "
                f"{deviation:.1%}), error {error:+.1%}, {verdict} {allowed:.1%}"
            )


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
