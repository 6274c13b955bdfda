"""What the pool costs: on an environment that does nothing, and against a simulator's bare loop with pixels.

python benchmarks/envs/overhead.py null | maniskill | robotics
"""

import functools
import sys

import gymnasium
import numpy as np
from common import NullGym, measure, median

from rlinf_plugins.envs import EnvPool, InitialState, PoolConfig
from rlinf_plugins.envs.gym import GymFactory
from rlinf_plugins.envs.maniskill import ManiSkillFactory
from rlinf_plugins.testing.envs import NullFactory

BATCH, STEPS, ROUNDS = 8, 1000, 5


def null(image: int) -> None:
    """Batch of 8, one step a call, CPU of all processes; rounds alternate with Gymnasium's AsyncVectorEnv."""
    actions = np.zeros((BATCH, 7), np.float32)
    ours: dict[bool, list[float]] = {True: [], False: []}
    theirs: list[float] = []
    pools = {copy: EnvPool(NullFactory(image=image), BATCH, PoolConfig(copy_observations=copy)) for copy in ours}
    peer = gymnasium.vector.AsyncVectorEnv([functools.partial(NullGym, image)] * BATCH, shared_memory=True)
    for pool in pools.values():
        pool.reset([InitialState()] * BATCH)
    peer.reset()

    def step(call, *arguments) -> int:
        for _ in range(STEPS):
            call(*arguments)
        return STEPS * BATCH

    for _ in range(ROUNDS):
        for copy, pool in pools.items():
            ours[copy].append(measure(lambda pool=pool: step(pool.step_chunk, actions))[0] * 1e6)
        theirs.append(measure(lambda: step(peer.step, actions))[0] * 1e6)
    frame = np.zeros((BATCH, max(image, 1), max(image, 1), 3), np.uint8)
    copied = measure(lambda: step(frame.copy))[0] * 1e6
    print(f"null, image {image}: CPU us per env step, medians of {ROUNDS} rounds of {STEPS} x {BATCH}")
    print(f"  pool {median(ours[True]):.1f}  pool without the caller's copy {median(ours[False]):.1f}")
    print(f"  AsyncVectorEnv {median(theirs):.1f}  one copy of an image {copied:.1f}")
    print(f"  lowest rounds: pool {min(ours[True]):.1f}, AsyncVectorEnv {min(theirs):.1f}")
    print(f"  AsyncVectorEnv / pool {median(theirs) / median(ours[True]):.2f}x", flush=True)
    for pool in pools.values():
        pool.close()
    peer.close()


def bare(name: str, factory: ManiSkillFactory | GymFactory, steps: int, rounds: int) -> None:
    """One environment in this process, step and frame, against the same in a pool."""
    env = factory()
    random = np.random.default_rng(0)
    low, high = np.asarray(env.spec.action_low), np.asarray(env.spec.action_high)
    actions = random.uniform(low, high, (steps, env.spec.action_dim)).astype(np.float32)
    pool = EnvPool(factory, 1)

    def alone() -> int:
        env.reset(InitialState())
        for action in actions:
            env.step(action)
            env.observe()
        return steps

    def pooled() -> int:
        pool.reset([InitialState()])
        for action in actions:
            assert pool.step_chunk(action[None, None]).valid.all()
        return steps

    found: dict[str, list[tuple[float, float]]] = {"alone": [], "pooled": []}
    for _ in range(rounds):
        found["alone"].append(measure(alone))
        found["pooled"].append(measure(pooled))
    for at, what in enumerate(("CPU", "wall")):
        one, two = (median([values[at] for values in found[key]]) * 1e3 for key in ("alone", "pooled"))
        print(
            f"{name}: {what} ms a step: bare loop {one:.2f}, pool {two:.2f}: {100 * (two / one - 1):+.1f} %", flush=True
        )
    pool.close()
    env.close()


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "null"
    if what == "null":
        null(0)
        null(128)
    elif what == "maniskill":
        plate = ManiSkillFactory(env_id="RlinfPutOnPlate-v1", image_size=128, control_mode="pd_ee_delta_pos")
        bare("ManiSkill RlinfPutOnPlate-v1 RGB 128", plate, 60, 5)
    else:
        fetch = GymFactory(env_id="FetchPickAndPlace-v4", modules=("gymnasium_robotics",), render_size=128)
        bare("Gymnasium-Robotics FetchPickAndPlace-v4 RGB 128", fetch, 45, 7)
