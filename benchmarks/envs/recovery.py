"""A killed worker: how soon it is back, against its cold start, and what the others lose meanwhile.

Two environments: one steps as fast as it can, the other is killed in the middle of a step. With ``robotics`` they are
FetchReach; with ``toy`` a start takes a second of waiting beside the interpreter's own, and a step 2 ms of CPU.
"""

import os
import signal
import sys
import threading
import time

import numpy as np
from common import median

from rlinf_plugins.envs import EnvPool, InitialState
from rlinf_plugins.envs.gym import GymFactory
from rlinf_plugins.testing.envs import ToyFactory

FACTORIES = {
    "robotics": GymFactory(env_id="FetchReach-v4", modules=("gymnasium_robotics",)),
    "toy": ToyFactory(
        length=lambda *_: 50, start_seconds=1.0, step_seconds=lambda task, trial, step: 0.002 * (trial == 0), busy=True
    ),
}
WHICH, KILLS = sys.argv[1], int(sys.argv[2])
FACTORY = FACTORIES[WHICH]


def cold_start() -> float:
    """Return seconds from nothing to the first observation of an episode."""
    began = time.perf_counter()
    pool = EnvPool(FACTORY, 1)
    pool.reset([InitialState()])
    seconds = time.perf_counter() - began
    pool.close()
    return seconds


def step_until(pool: EnvPool, until: float) -> int:
    """Step slot 0, which is reset when it ends; return its steps."""
    steps = 0
    while time.perf_counter() < until:
        batch = pool.step_chunk(np.zeros((1, 1, pool.spec.action_dim)), [0])
        steps += int(batch.valid.sum())
        if batch.done[0]:
            pool.reset([InitialState()], [0])
    return steps


def main() -> None:
    """Alternate: a cold start of another pool, a quiet stretch, a kill."""
    cold, warm, losses = [], [], []
    with EnvPool(FACTORY, 2) as pool:
        pool.reset([InitialState(), InitialState(trial=1)])
        for _ in range(KILLS):
            cold.append(cold_start())
            quiet_s = cold[-1]
            quiet = step_until(pool, time.perf_counter() + quiet_s) / quiet_s
            worker = pool._desk.crew.slots[1].worker
            assert worker is not None
            pool.send(np.zeros((1, 1, pool.spec.action_dim)), [1])
            began = time.perf_counter()
            os.kill(worker.pid, signal.SIGKILL)
            while not pool.recv(0):
                pass
            pool.send_reset([InitialState(trial=1)], [1])
            steps, back = 0, None
            while back is None:
                steps += step_until(pool, time.perf_counter() + 0.02)
                answers = pool.recv(0)
                back = time.perf_counter() if answers else None
            warm.append(back - began)
            losses.append(1 - steps / (back - began) / quiet)
            while not pool.step_chunk(np.zeros((1, 32, pool.spec.action_dim)), [1]).done[0]:
                pass  # an episode that ends well forgives the failure: the next restart has no pause
            pool.reset([InitialState(trial=1)], [1])
    assert threading.active_count() == 1
    print(
        f"cold start {median(cold):.2f} s, back after a kill {median(warm):.2f} s: {median(warm) / median(cold):.2f}x"
    )
    print(f"the other environment loses {100 * median(losses):.1f} % of its steps meanwhile (each: ", end="")
    print(", ".join(f"{100 * loss:.0f}" for loss in losses) + ")")


main()
