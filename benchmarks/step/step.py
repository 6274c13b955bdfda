"""Seconds per training step: ``m2flow`` against veRL's ``sync`` with its poll at 0.05 s, in turn on one machine.

Run: ``$(make -s python) benchmarks/step/step.py [--rounds 5] [--steps 12]``; about ten minutes on two idle cores.

Two jobs of the same mode differ by more than the two modes do, so jobs alternate and the median over rounds counts.
"""

import argparse
import contextlib
import statistics
import tempfile
from pathlib import Path

import psutil

from rlinf_verl import tiny_text
from rlinf_verl.job import TrainingJob

WARM_UP = 2  # steps of each job that are not counted: imports, first allocations
HERE = Path(__file__).parent

MODES = {
    "sync": [
        "trainer.v1.trainer_mode=sync",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'fast_poll.py'}",
        "trainer.v1.sampler.custom_sampler.name=FastPollReplayBuffer",
    ],
    "m2flow": ["trainer.v1.trainer_mode=m2flow"],
}


STAGES = ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")


def cpu_seconds() -> dict[int, float]:
    """CPU seconds so far of every process below this one, Ray's included."""
    seconds = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[process.pid] = times.user + times.system
    return seconds


def run(mode: str, folder: Path, steps: int, seed: int) -> tuple[list[dict[str, float]], float]:
    """Return the seconds of each counted step of one job by stage, and its CPU seconds a step in all processes."""
    overrides = [
        "+recipe=text_grpo_tiny",
        *MODES[mode],
        "trainer.logger=[file]",
        f"trainer.total_training_steps={steps}",
        f"data.seed={seed}",
    ]
    job = TrainingJob(overrides, folder=folder, log=folder / f"{mode}.log", metrics=folder / f"{mode}.jsonl")
    with job:
        seconds, cpu = [], []
        for step in job.steps():
            seconds.append({stage: step[f"timing_s/{stage}"] for stage in STAGES})
            cpu.append(cpu_seconds())
    if job.returncode:
        raise SystemExit(f"{mode} failed:\n{job.last_lines()}")
    first, last = cpu[WARM_UP], cpu[-2]  # at the last step processes are ending
    used = sum(last[pid] - first[pid] for pid in first.keys() & last.keys())
    return seconds[WARM_UP:], used / (len(cpu) - 2 - WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    seconds: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    step_of: dict[str, list[float]] = {mode: [] for mode in MODES}
    cpu_of: dict[str, list[float]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_text.make(folder / "runs" / "tiny-text")
        for turn in range(arguments.rounds):
            order = list(MODES) if turn % 2 == 0 else list(MODES)[::-1]
            for mode in order:
                steps, cpu = run(mode, folder, arguments.steps, seed=turn)
                seconds[mode] += steps
                step_of[mode].append(statistics.median(step["step"] for step in steps))
                cpu_of[mode].append(cpu)
                print(f"round {turn} {mode:8s} step {step_of[mode][-1]:.3f} s, CPU {cpu:.3f} s a step", flush=True)
    medians = {
        mode: {stage: statistics.median(step[stage] for step in steps) for stage in STAGES}
        for mode, steps in seconds.items()
    }
    for mode, steps in seconds.items():
        low, _, high = statistics.quantiles([step["step"] for step in steps], n=4)
        stages = "  ".join(f"{stage} {medians[mode][stage]:.3f}" for stage in STAGES)
        print(f"{mode:8s} {len(steps)} steps  {stages}  step quartiles {low:.3f}-{high:.3f}")
    for what, of, goal in (("step", step_of, " (goal <= 1.05)"), ("CPU", cpu_of, "")):
        ratios = [ours / theirs for ours, theirs in zip(of["m2flow"], of["sync"], strict=True)]
        rounds = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"m2flow / sync, {what}: {statistics.median(ratios):.3f} median of the rounds{goal}; by round {rounds}")


if __name__ == "__main__":
    main()
