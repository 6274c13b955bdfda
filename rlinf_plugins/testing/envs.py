"""Environments for tests and benchmarks: tiny worlds that are exact, slow, ragged or poisoned on request."""

import ctypes
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rlinf_plugins.core.buffers import Field
from rlinf_plugins.envs.protocol import EnvSpec, InitialState, Observation, Outcome

Poison = Literal["kill", "segfault", "exit", "raise", "hang", "hang_holding_gil", "stop", "ask", "leak", "blank", "nan"]
Where = Literal["build", "reset", "observe", "step", "save", "load", "close"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mishap:
    """Something that goes wrong at a named place.

    Attributes:
        poison: What happens: SIGKILL, a segmentation fault, ``sys.exit``, an exception, a hang (with or without the
            interpreter lock), SIGSTOP, a question on standard input, 64 MB that are never freed, a blank image, or
            positions that are not numbers any more.
        where: At which call.
        step: For ``step``: at which step of the episode, from 0.
        marker: If set, a file that makes it happen only once: it is created when it happens.
    """

    poison: Poison
    where: Where
    step: int = 0
    marker: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyFactory:
    """Makes :class:`ToyEnv`; see there for the meaning of the options.

    Attributes:
        image: Edge of the square image; 0 for none.
        length: Steps until success, as a function of task and trial.
        step_seconds: Time of a step, as a function of task, trial and step; None takes none.
        busy: Spend that time computing instead of sleeping.
        mishaps: What goes wrong, by trial; -1 is any trial.
        start_seconds: Time to make the environment.
        tasks: Number of tasks.
        trials: Number of initial states per task; None is no limit.
        environment: Variables of the worker's process.
    """

    image: int = 0
    length: Callable[[int, int], int] = lambda task, trial: 10
    step_seconds: Callable[[int, int, int], float] | None = None
    busy: bool = False
    mishaps: Mapping[int, Mishap] = field(default_factory=dict)
    start_seconds: float = 0.0
    tasks: int = 2
    trials: int | None = 8
    environment: Mapping[str, str] = field(default_factory=dict)

    def __call__(self) -> "ToyEnv":
        """Return a new environment."""
        return ToyEnv(self)


class ToyEnv:
    """A point that moves by its actions; solved after a number of steps that depends on task and trial.

    State: position (3 floats), started from ids alone. Reward: the sum of the action. Exact, with snapshots.

    Args:
        options: How it behaves.
    """

    def __init__(self, options: ToyFactory) -> None:
        self._options = options
        seen = {"states": Field(shape=(4,), dtype="float32")}
        if options.image:
            seen["main_images"] = Field(shape=(options.image, options.image, 3), dtype="uint8")
        self.spec = EnvSpec(
            name="Toy",
            action_low=(-1.0,) * 3,
            action_high=(1.0,) * 3,
            observation=seen,
            metrics=("success", "progress"),
            tasks=tuple(f"move {index}" for index in range(options.tasks)),
            trials=options.trials,
            snapshot_tolerance=0.0,
        )
        self._initial = InitialState()
        self._position = np.zeros(3)
        self._steps = 0
        self._leaks: list[np.ndarray] = []
        time.sleep(options.start_seconds)
        self._mishap("build")

    def reset(self, initial: InitialState) -> str:
        """Start from a position that is a function of the ids."""
        self._initial, self._steps = initial, 0
        self._position = np.random.default_rng([initial.task, initial.trial]).uniform(-1, 1, 3)
        self._mishap("reset")
        return self.spec.tasks[initial.task]

    def step(self, action: np.ndarray) -> Outcome:
        """Move."""
        self._mishap("step")
        options, at = self._options, self._initial
        if options.step_seconds is not None:
            _spend(options.step_seconds(at.task, at.trial, self._steps), options.busy)
        self._position = self._position * 0.9 + action
        self._steps += 1
        length = options.length(at.task, at.trial)
        success = self._steps >= length
        progress = min(1.0, self._steps / length)
        return Outcome(
            reward=float(action.sum() + 0 * self._position[0]),
            terminated=success,
            metrics={"success": success, "progress": progress},
        )

    def observe(self) -> Observation:
        """Return position and step count, and an image of them."""
        blank = self._mishap("observe")
        states = np.array([*self._position, self._steps], np.float32)
        if not self._options.image:
            return {"states": states}
        image = np.zeros((self._options.image, self._options.image, 3), np.uint8)
        if not blank:
            image[: self._options.image // 2] = 200
            image[-1, :3, 0] = (np.tanh(self._position) * 100 + 100).astype(np.uint8)
        return {"states": states, "main_images": image}

    def save(self) -> bytes:
        """Return the whole state."""
        self._mishap("save")
        return pickle.dumps((self._initial, self._position, self._steps))

    def load(self, state: bytes) -> None:
        """Continue from a saved state."""
        self._initial, self._position, self._steps = pickle.loads(state)
        self._mishap("load")

    def close(self) -> None:
        """Release nothing."""
        self._mishap("close")

    def _mishap(self, where: Where) -> bool:
        """Let what is due at this place happen; return whether the image shall be blank."""
        mishap = self._options.mishaps.get(self._initial.trial) or self._options.mishaps.get(-1)
        if mishap is None or mishap.where != where or (where == "step" and mishap.step != self._steps):
            return False
        if mishap.marker:
            try:
                os.close(os.open(mishap.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
        print(f"mishap: {mishap.poison}", file=sys.stderr, flush=True)
        if mishap.poison == "leak":
            self._leaks.append(np.ones(8 << 20))
        elif mishap.poison == "nan":
            self._position = self._position * np.nan
        elif mishap.poison != "blank":
            _POISONS[mishap.poison]()
        return mishap.poison == "blank"


def _spend(seconds: float, busy: bool) -> None:
    if not busy:
        time.sleep(seconds)
        return
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _sleep_holding_gil() -> None:
    libc = ctypes.PyDLL(None)
    while True:  # a signal ends one sleep
        libc.sleep(3600)


def _raise() -> None:
    raise ValueError("the simulator is out of sorts")


_POISONS: dict[str, Callable[[], Any]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: sys.exit(3),
    "raise": _raise,
    "hang": lambda: time.sleep(3600),
    "hang_holding_gil": _sleep_holding_gil,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "ask": lambda: input("download the asset? [y/n] "),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NullFactory:
    """Makes an environment that does nothing: what a pool costs by itself.

    Attributes:
        image: Edge of the square image; 0 for none.
    """

    image: int = 0

    def __call__(self) -> "NullEnv":
        """Return a new environment."""
        return NullEnv(self.image)


class NullEnv:
    """Does nothing and never ends.

    Args:
        image: Edge of the square image; 0 for none.
    """

    def __init__(self, image: int) -> None:
        seen = {"states": Field(shape=(8,), dtype="float32")}
        self._seen: dict[str, np.ndarray] = {"states": np.zeros(8, np.float32)}
        if image:
            seen["main_images"] = Field(shape=(image, image, 3), dtype="uint8")
            self._seen["main_images"] = np.random.default_rng(0).integers(0, 255, (image, image, 3), np.uint8)
        self.spec = EnvSpec(name="Null", action_low=(-1.0,) * 7, action_high=(1.0,) * 7, observation=seen)
        self._outcome = Outcome(reward=0.0)

    def reset(self, initial: InitialState) -> str:
        """Do nothing."""
        return "do nothing"

    def step(self, action: np.ndarray) -> Outcome:
        """Do nothing."""
        return self._outcome

    def observe(self) -> Observation:
        """Return always the same arrays."""
        return self._seen

    def close(self) -> None:
        """Do nothing."""
