"""What the scripts here share: CPU time of a process tree, and environments for Gymnasium that behave as ours do."""

import os
import statistics
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import psutil


def cpu_seconds() -> float:
    """Return the CPU time of this process and of every living descendant, to a microsecond."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                with open(f"/proc/{process.pid}/task/{thread}/schedstat") as schedstat:
                    total += int(schedstat.read().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def measure(work: Callable[[], int]) -> tuple[float, float]:
    """Return CPU and wall seconds per unit of ``work``, which returns the number of its units."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    units = work()
    return (cpu_seconds() - cpu) / units, (time.perf_counter() - wall) / units


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


class NullGym(gymnasium.Env):
    """Does nothing, as ``rlinf_plugins.testing.envs.NullEnv``.

    Args:
        image: Edge of the square image; 0 for none.
    """

    def __init__(self, image: int = 0) -> None:
        seen = {"states": gymnasium.spaces.Box(-1, 1, (8,), np.float32)}
        self._seen = {"states": np.zeros(8, np.float32)}
        if image:
            seen["main_images"] = gymnasium.spaces.Box(0, 255, (image, image, 3), np.uint8)
            self._seen["main_images"] = np.random.default_rng(0).integers(0, 255, (image, image, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(seen)
        self.action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Do nothing."""
        return self._seen, {}

    def step(self, action: np.ndarray) -> tuple:
        """Do nothing."""
        return self._seen, 0.0, False, False, {}


class TimedGym(gymnasium.Env):
    """Takes as long as it is told: the seed of a reset is the episode.

    Args:
        length: Steps of an episode.
        step_seconds: Time of a step, by episode and step.
        reset_seconds: Time of a reset, by episode.
    """

    def __init__(
        self,
        length: Callable[[int], int],
        step_seconds: Callable[[int, int], float],
        reset_seconds: Callable[[int], float],
    ) -> None:
        self._length, self._step_seconds, self._reset_seconds = length, step_seconds, reset_seconds
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        self._episode = self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Begin episode ``seed``."""
        self._episode, self._steps = int(seed or 0), 0
        time.sleep(self._reset_seconds(self._episode))
        return self._see(), {}

    def step(self, action: np.ndarray) -> tuple:
        """Take the time."""
        time.sleep(self._step_seconds(self._episode, self._steps))
        self._steps += 1
        return self._see(), 0.0, self._steps >= self._length(self._episode), False, {}

    def _see(self) -> np.ndarray:
        return np.array([self._episode, self._steps, 0, 0], np.float32)
