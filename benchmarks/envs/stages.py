"""Two pipeline stages against the bound: the longer of simulation and policy, had each the machine for itself.

Four environments compute for a time given in CPU seconds, so that the machine's cores are what they share; the policy
sleeps, as if on an accelerator. The bound is measured in the same round: the same episodes with a policy that takes no
time, and the policy's calls alone.
"""

import argparse
import time

import numpy as np
from common import median

from rlinf_plugins.envs import EnvPool, InitialState, play
from rlinf_plugins.testing.envs import ToyFactory

ENVS, LENGTH, EPISODES, STEP_S = 4, 20, 8, 0.02


def run(pool: EnvPool, policy_s: float, stages: int) -> tuple[float, int]:
    """Return the seconds that the episodes take, and the policy's calls."""
    calls = 0

    def policy(shown):
        nonlocal calls
        calls += 1
        if policy_s:
            time.sleep(policy_s)
        return np.zeros((len(shown.slots), 1, 3), np.float32)

    began = time.perf_counter()
    records = list(play(pool, policy, [InitialState(trial=i) for i in range(EPISODES)], stages=stages))
    assert [record.length for record in records] == [LENGTH] * EPISODES
    return time.perf_counter() - began, calls


def main() -> None:
    """Print the share of the bound for a policy that takes less, as long, and longer than the simulation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policy-ms", type=float, nargs="+", default=[10, 20, 40])
    options = parser.parse_args()
    factory = ToyFactory(length=lambda *_: LENGTH, step_seconds=lambda *_: STEP_S, busy=True)
    with EnvPool(factory, ENVS) as pool:
        for policy_s in (ms / 1e3 for ms in options.policy_ms):
            shares: dict[int, list[float]] = {1: [], 2: []}
            parts = []
            for _ in range(options.rounds):
                for stages in shares:
                    simulation, _ = run(pool, 0.0, stages)
                    both, calls = run(pool, policy_s, stages)
                    shares[stages].append(max(simulation, calls * policy_s) / both)
                parts.append((simulation, calls * policy_s, both))
            simulation, policy, both = (median([part[at] for part in parts]) for at in range(3))
            print(
                f"step {STEP_S * 1e3:.0f} ms of CPU, policy {policy_s * 1e3:.0f} ms: "
                f"2 stages: simulation {simulation:.2f} s, policy {policy:.2f} s, both {both:.2f} s; "
                f"share of the bound {median(shares[2]):.2f}, with 1 stage {median(shares[1]):.2f}",
                flush=True,
            )


main()
