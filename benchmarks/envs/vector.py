"""The time to finish 64 (task, initial state) episodes, against Gymnasium's AsyncVectorEnv; the policy takes 20 ms.

The simulators sleep, as if there were a core for each. The peer is driven in its two best loops: one vector environment
in lockstep, in which those that finished are reset by mask, and two of half the size, of which one steps while the
policy looks at the other. Both peers and we run one after the other, in each of the rounds.
"""

import argparse
import functools
import time
from collections import deque
from dataclasses import dataclass, field

import gymnasium
import numpy as np
from common import TimedGym, median
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.envs import EnvPool, EnvSpec, InitialState, Outcome, play

ENVS, EPISODES, POLICY_S = 8, 64, 0.02


@dataclass(frozen=True)
class Load:
    """How long episodes and their steps are; functions of the episode alone."""

    ragged: bool

    def length(self, episode: int) -> int:
        """Return 12 steps, or 5 to 25."""
        return int(np.random.default_rng(episode).integers(5, 26)) if self.ragged else 12

    def step(self, episode: int, step: int) -> float:
        """Return 20 ms, or a log-normal time with that median (one step in fifty takes more than 60 ms)."""
        return 0.02 * float(np.exp(np.random.default_rng([episode, step]).normal(0, 0.5))) if self.ragged else 0.02

    def reset(self, episode: int) -> float:
        """Return the time of ten steps; LIBERO's takes that of fifteen."""
        return 10 * self.step(episode, 0)


@dataclass
class TimedEnv:
    """The same environment for the pool."""

    load: Load
    spec: EnvSpec = field(
        default_factory=lambda: EnvSpec(
            name="Timed",
            action_low=(-1.0,) * 3,
            action_high=(1.0,) * 3,
            observation={"states": Field(shape=(4,), dtype="float32")},
        )
    )

    def reset(self, initial: InitialState) -> str:
        """Begin an episode."""
        self.episode, self.steps = initial.trial, 0
        time.sleep(self.load.reset(self.episode))
        return "wait"

    def step(self, action: np.ndarray) -> Outcome:
        """Take the time."""
        time.sleep(self.load.step(self.episode, self.steps))
        self.steps += 1
        return Outcome(reward=0.0, terminated=self.steps >= self.load.length(self.episode))

    def observe(self) -> dict[str, np.ndarray]:
        """Return the counters."""
        return {"states": np.array([self.episode, self.steps, 0, 0], np.float32)}

    def close(self) -> None:
        """Do nothing."""


def ours(load: Load, stages: int) -> float:
    """Return seconds."""
    with EnvPool(functools.partial(TimedEnv, load), ENVS) as pool:
        began = time.perf_counter()
        records = list(
            play(pool, _think(pool.spec.action_dim), [InitialState(trial=i) for i in range(EPISODES)], stages=stages)
        )
        seconds = time.perf_counter() - began
    assert sorted((r.initial.trial, r.length) for r in records) == [(i, load.length(i)) for i in range(EPISODES)]
    return seconds


def _think(dim: int):
    def policy(shown):
        time.sleep(POLICY_S)
        return np.zeros((len(shown.slots), 1, dim), np.float32)

    return policy


class Half:
    """A vector environment and the episodes that its places run."""

    def __init__(self, load: Load, envs: int) -> None:
        make = functools.partial(TimedGym, load.length, load.step, load.reset)
        self.venv = AsyncVectorEnv([make] * envs, autoreset_mode=AutoresetMode.DISABLED)
        self.venv.reset()  # processes are up
        self.playing = np.zeros(envs, bool)
        self.steps, self.episode = np.zeros(envs, int), np.zeros(envs, int)
        self.under_way = ""

    def begin(self, waiting: deque[int]) -> bool:
        """Start to reset the places that are free with whatever waits; return whether any is reset."""
        chosen = list(zip(np.flatnonzero(~self.playing), list(waiting), strict=False))
        if not chosen:
            return False
        mask = np.zeros(len(self.playing), bool)
        seeds: list[int | None] = [None] * len(mask)
        for place, episode in chosen:
            waiting.popleft()
            seeds[place], mask[place], self.playing[place] = episode, True, True
            self.episode[place], self.steps[place] = episode, 0
        self.venv.reset_async(seed=seeds, options={"reset_mask": mask})
        self.under_way = "reset"
        return True

    def step(self, actions: np.ndarray) -> None:
        """Start to step."""
        self.venv.step_async(actions)
        self.under_way = "step"

    def wait(self, finished: dict[int, int]) -> None:
        """Take in what is under way."""
        if self.under_way == "reset":
            self.venv.reset_wait()
        elif self.under_way == "step":
            _, _, terminated, _, _ = self.venv.step_wait()
            self.steps += 1
            for place in np.flatnonzero(terminated & self.playing):
                finished[int(self.episode[place])] = int(self.steps[place])
                self.playing[place] = False
        self.under_way = ""


def peer(load: Load, parts: int) -> float:
    """Return seconds. A finished place without a successor goes on stepping, for the vector steps as one."""
    halves = [Half(load, ENVS // parts) for _ in range(parts)]
    actions = np.zeros((ENVS // parts, 3), np.float32)
    waiting, finished = deque(range(EPISODES)), {}
    running = list(halves)
    began = time.perf_counter()
    while running:
        for half in list(running):
            half.wait(finished)
            if half.begin(waiting):
                continue  # the other one meanwhile
            if half.playing.any():
                time.sleep(POLICY_S)
                half.step(actions)
            else:
                running.remove(half)
    seconds = time.perf_counter() - began
    for half in halves:
        half.venv.close()
    assert finished == {i: load.length(i) for i in range(EPISODES)}
    return seconds


RUNS = {
    "lockstep": ("AsyncVectorEnv, lockstep", peer, 1),
    "double": ("AsyncVectorEnv, double buffer", peer, 2),
    "one": ("pool, 1 stage", ours, 1),
    "two": ("pool, 2 stages", ours, 2),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", nargs="+", choices=("equal", "ragged"), default=["equal", "ragged"])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    gymnasium.logger.min_level = 50
    print(
        f"{EPISODES} episodes, {ENVS} environments, policy {POLICY_S * 1e3:.0f} ms, medians of {options.rounds} rounds"
    )
    for kind in options.loads:
        load = Load(ragged=kind == "ragged")
        seconds: dict[str, list[float]] = {key: [] for key in options.runs}
        for _ in range(options.rounds):
            for key, values in seconds.items():
                _, run, parts = RUNS[key]
                values.append(run(load, parts))
        best = min(median(values) for key, values in seconds.items() if RUNS[key][1] is peer)
        for key, values in seconds.items():
            ratio = best / median(values)
            print(f"  {kind:6} {RUNS[key][0]:30} {median(values):6.2f} s  {ratio:.2f}x the best peer", flush=True)


if __name__ == "__main__":
    main()
