"""Seconds per training step: ``m2flow`` against veRL's ``sync`` with its poll at 0.05 s, in turn on one machine.

Run: ``$(make -s python) benchmarks/step/step.py [--rounds 3] [--steps 12]``; about five minutes on two idle cores.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

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


def run(mode: str, folder: Path, steps: int, seed: int) -> list[dict[str, float]]:
    """Return the seconds of each counted step of one job, by stage."""
    overrides = [
        "+recipe=text_grpo_tiny",
        *MODES[mode],
        "trainer.logger=[file]",
        f"trainer.total_training_steps={steps}",
        f"data.seed={seed}",
    ]
    job = TrainingJob(overrides, folder=folder, log=folder / f"{mode}.log", metrics=folder / f"{mode}.jsonl")
    with job:
        seconds = [{stage: step[f"timing_s/{stage}"] for stage in STAGES} for step in job.steps()]
    if job.returncode:
        raise SystemExit(f"{mode} failed:\n{job.last_lines()}")
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    seconds: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_text.make(folder / "runs" / "tiny-text")
        for turn in range(arguments.rounds):
            order = list(MODES) if turn % 2 == 0 else list(MODES)[::-1]
            for mode in order:
                steps = run(mode, folder, arguments.steps, seed=turn)
                print(f"round {turn} {mode:8s} step {statistics.median(s['step'] for s in steps):.3f} s", flush=True)
                seconds[mode] += steps
    medians = {
        mode: {stage: statistics.median(step[stage] for step in steps) for stage in STAGES}
        for mode, steps in seconds.items()
    }
    for mode, steps in seconds.items():
        low, _, high = statistics.quantiles([step["step"] for step in steps], n=4)
        stages = "  ".join(f"{stage} {medians[mode][stage]:.3f}" for stage in STAGES)
        print(f"{mode:8s} {len(steps)} steps  {stages}  step quartiles {low:.3f}-{high:.3f}")
    print(f"m2flow / sync: {medians['m2flow']['step'] / medians['sync']['step']:.3f} (goal <= 1.05)")


if __name__ == "__main__":
    main()
