"""Decisions of the policy server's engine against batch size: the demo's policy, one thread, CPU milliseconds.

python benchmarks/rollout/policy_server.py
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from rlinf_plugins.models.openvla import (
    ActionSpec,
    OpenVLAProcessor,
    Sampling,
    TinySizes,
    load_policy,
    make_tiny_checkpoint,
)
from rlinf_verl.rollout.weights import ResidentWeights
from rlinf_verl.vla.rollout_engine import PolicyEngine, PolicyRequest


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_checkpoint(Path(folder), variant="openvla", sizes=TinySizes.demo(), spec=ActionSpec(dim=4))
        policy = load_policy(folder)
        processor = OpenVLAProcessor.from_folder(folder, unnorm_key="tiny")
    frame = np.random.default_rng(0).integers(0, 255, (128, 128, 3), dtype=np.uint8)
    for batch in (1, 2, 4, 8, 16):
        engine = PolicyEngine(policy, processor, ResidentWeights(policy, loaded=True), max_batch=batch, max_wait_s=0.0)
        best = min(_cpu(engine, frame, batch) for _ in range(8))
        print(f"batch {batch:2d}: {best * 1e3:6.1f} ms, {best * 1e3 / batch:5.1f} ms a decision, {batch / best:5.0f}/s")


def _cpu(engine, frame, batch):
    for i in range(batch):
        engine.submit(
            PolicyRequest(id=str(i), instruction="push the cube", images=[frame], proprio=None, sampling=Sampling())
        )
    start = time.process_time()
    ended = engine.step()
    if len(ended) != batch or any(d.error for d in ended):
        raise SystemExit("a decision failed")
    return time.process_time() - start


if __name__ == "__main__":
    main()
