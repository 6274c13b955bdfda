"""The ideal seconds of a step of the long-tail workload: what its arithmetic alone takes on two cores.

Run: ``$(make -s python) benchmarks/m2flow/ideal.py``. The same engine, model, lengths and micro-batches as in
``modes.py``, in one process on one core, without veRL, Ray or any transfer. The ideal is the larger of two bounds: all
core-seconds shared out evenly over the cores, and the critical path - the longest answer of the step generated alone,
its group trained on, the optimizer's step. Processor time is measured, so a busy machine disturbs it little.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import workload
from transformers import AutoModelForCausalLM

from rlinf_verl.rollout.engine import EngineLimits, HFEngine, Request
from rlinf_verl.rollout.sampling import SamplingParams
from rlinf_verl.rollout.weights import ResidentWeights

CORES, MICRO_BATCH, PROMPT = 2, 4, 12


def generate(model: torch.nn.Module, lengths: list[int]) -> float:
    """Return the core-seconds of generating responses of these lengths in one batch."""
    limits = EngineLimits(max_rows=1024, max_prefill_tokens=8192, max_length=512, eos_ids=frozenset())
    engine = HFEngine(model, limits, ResidentWeights(model, loaded=True))
    for number, length in enumerate(lengths):
        params = SamplingParams.from_request({"ignore_eos": True}, max_tokens=length)
        engine.submit(Request(id=str(number), prompt=[2 + number // 4 % 10] * PROMPT, params=params))
    start = time.process_time()
    while engine.busy:
        engine.step()
    return time.process_time() - start


def log_probs(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    logits = model(rows).logits[:, PROMPT - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, rows[:, PROMPT:, None])


def train(model: torch.nn.Module, lengths: list[int]) -> float:
    """Return the core-seconds of old log-probs and of forward and backward pass, in micro-batches of like lengths."""
    start = time.process_time()
    ordered = sorted(lengths)
    for first in range(0, len(ordered), MICRO_BATCH):
        part = ordered[first : first + MICRO_BATCH]
        rows = torch.randint(2, 12, (len(part), PROMPT + max(part)))
        with torch.no_grad():
            log_probs(model, rows)
        log_probs(model, rows).mean().backward()
    return time.process_time() - start


def step_of(optimizer: torch.optim.Optimizer) -> float:
    start = time.process_time()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        workload.make(Path(name))
        model = AutoModelForCausalLM.from_pretrained(Path(name) / "runs/tiny-text/model", attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    found = []
    for step in range(arguments.steps):
        groups = workload.lengths()[step * workload.BATCH : (step + 1) * workload.BATCH]
        lengths = [length for group in groups for length in group]
        longest = max(groups, key=max)
        generation, training, update = generate(model, lengths), train(model, lengths), step_of(optimizer)
        path = generate(model, [max(longest)]) + train(model, longest) + update
        found.append((generation, training, update, path, max((generation + training + update) / CORES, path)))
    names = ("generation", "training", "optimizer", "critical path", "ideal step")
    for name, values in zip(names, zip(*found[2:], strict=True), strict=True):
        print(f"{name:14s} {statistics.median(values):.3f} s  ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
