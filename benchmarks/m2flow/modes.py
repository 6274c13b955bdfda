"""Seconds per training step of every mode on two virtual devices of one core each, in turn on one machine.

Run: ``$(make -s python) benchmarks/m2flow/modes.py [--workload search|embodied] [--modes sync spatial ...]``.

Each job prints the median seconds of its steps and the stages', and how busy the cores were. Goals: the best of our
modes at least 1.5 times as fast as ``sync``, and at least 85 % of the ideal.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import embodied
import psutil
import workload

from rlinf_verl.job import TrainingJob

HERE = Path(__file__).parent
WARM_UP = 2  # steps of each job that are not counted: imports, first allocations

APART = [
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
]


def _polling(name: str) -> list[str]:
    sampler = "trainer.v1.sampler.custom_sampler"
    return [f"{sampler}.path={HERE / 'fast_poll.py'}", f"{sampler}.name={name}"]


MODES = {
    "sync": ["trainer.v1.trainer_mode=sync", *_polling("FastPoll")],
    "temporal": ["trainer.v1.trainer_mode=m2flow"],
    "spatial": ["trainer.v1.trainer_mode=m2flow", "trainer.v1.m2flow.mode=spatial", *APART],
    "hybrid": ["trainer.v1.trainer_mode=m2flow", "trainer.v1.m2flow.mode=hybrid", *APART],
    "colocate_async": [
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=0",
        *_polling("FastPollAsync"),
    ],
    "separate_async": [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.num_warmup_batches=0",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
        *APART,
        *_polling("FastPollAsync"),
    ],
}

AGENT = "actor_rollout_ref.rollout.agent.default_agent_loop"
WORKLOADS = {
    "long_tail": [*workload.WORKLOAD, f"{AGENT}=long_tail"],
    "search": [*workload.WORKLOAD, f"{AGENT}=search"],
    "embodied": embodied.WORKLOAD,
}

STAGES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")


def busy_seconds() -> float:
    """Core-seconds that the machine has spent computing."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def run(mode: str, name: str, folder: Path, steps: int, extra: list[str]) -> list[dict[str, float]]:
    """Return stages' seconds and the cores' busy seconds of each counted step of one job."""
    overrides = [
        *WORKLOADS[name],
        *MODES[mode],
        "trainer.logger=[file]",
        f"trainer.total_training_steps={steps}",
    ]
    job = TrainingJob([*overrides, *extra], folder=folder, log=folder / f"{mode}.log", metrics=folder / "m.jsonl")
    measured, before = [], 0.0
    with job:
        for step in job.steps():
            found = {stage: step[f"timing_s/{stage}"] for stage in STAGES}
            found |= {"rollout": step.get("m2flow/rollout_s", found["gen"])}
            found |= {"reclaim": step.get("timing_s/reclaim", 0.0)}
            now = busy_seconds()
            found["busy"], before = now - before, now
            measured.append(found)
    if job.returncode:
        raise SystemExit(f"{mode} failed:\n{job.last_lines(60)}")
    return measured[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, default="long_tail")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--extra", nargs="*", default=[], help="further overrides")
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    measured: dict[str, list[dict[str, float]]] = {mode: [] for mode in arguments.modes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (embodied if arguments.workload == "embodied" else workload).make(folder)
        for turn in range(arguments.rounds):
            for mode in arguments.modes if turn % 2 == 0 else arguments.modes[::-1]:
                steps = run(mode, arguments.workload, folder, arguments.steps, arguments.extra)
                measured[mode] += steps
                median = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
                print(f"{turn} {mode:14s} " + "  ".join(f"{k} {v:.3f}" for k, v in median.items()), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(measured))
    base = statistics.median(step["step"] for step in measured.get("sync", [])) if "sync" in measured else None
    for mode, steps in measured.items():
        seconds = statistics.median(step["step"] for step in steps)
        ratio = f", {base / seconds:.2f}x sync" if base else ""
        print(f"{mode:14s} {seconds:.3f} s a step{ratio}")


if __name__ == "__main__":
    main()
