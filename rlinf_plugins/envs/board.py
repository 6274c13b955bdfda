"""The shared memory between the pool and its workers: a small board that outlives a worker, and the data.

The board is there from the start of a worker, so that a worker which dies or hangs anywhere leaves behind what it was
doing and how far its episode had come. The data can be laid out only when the first worker has said what its
environment takes and gives.
"""

from enum import IntEnum

import numpy as np

from rlinf_plugins.core.buffers import Field, SharedArrays
from rlinf_plugins.envs.protocol import EnvSpec


class Phase(IntEnum):
    """What a worker is doing."""

    BOOT = 0
    BUILD = 1
    FIRST_RESET = 2
    FIRST_RENDER = 3
    IDLE = 4
    RESET = 5
    STEP = 6
    OBSERVE = 7
    SAVE = 8
    LOAD = 9
    CLOSE = 10

    @property
    def words(self) -> str:
        """Return the phase as it appears in messages."""
        return self.name.lower().replace("_", " ")


class Board:
    """What is known of each worker without asking it.

    Args:
        fd: Descriptor of the shared memory.
        slots: Number of workers.

    Attributes:
        phase: :class:`Phase` of each worker, int64 ``[slots]``.
        beat: Number of phases and steps each worker has begun, int64 ``[slots]``.
        steps: Steps taken in the episode, int64 ``[slots]``.
        ret: Return so far, float64 ``[slots]``.
        flags: success once, success now, terminated, truncated, done; bool ``[slots, 5]``.
        private: Private bytes of the process at the last reset or end of an episode, int64 ``[slots]``.
    """

    def __init__(self, fd: int, slots: int) -> None:
        number, real = Field(shape=(slots,), dtype="int64"), Field(shape=(slots,), dtype="float64")
        flags = Field(shape=(slots, 5), dtype="bool")
        layout = {"phase": number, "beat": number, "steps": number, "ret": real, "flags": flags, "private": number}
        arrays = SharedArrays(fd, layout).arrays
        self.phase, self.beat, self.steps = arrays["phase"], arrays["beat"], arrays["steps"]
        self.ret, self.flags, self.private = arrays["ret"], arrays["flags"], arrays["private"]

    def clear(self, slot: int) -> None:
        """Forget the episode of ``slot``."""
        self.steps[slot], self.ret[slot], self.flags[slot] = 0, 0.0, False

    def enter(self, slot: int, phase: Phase) -> None:
        """Note that worker ``slot`` begins ``phase``."""
        self.phase[slot] = phase
        self.beat[slot] += 1


class Data:
    """Actions, outcomes and observations of all slots.

    Args:
        fd: Descriptor of the shared memory.
        spec: What the environments take and give.
        slots: Number of environments.
        chunk: Longest action chunk.

    Attributes:
        actions: float32 ``[slots, chunk, action_dim]``.
        rewards: float32 ``[slots, chunk]``.
        terminated: bool ``[slots, chunk]``.
        truncated: bool ``[slots, chunk]``.
        valid: bool ``[slots, chunk]``: whether the step was taken and belongs to the episode.
        metrics: float32 ``[slots, chunk, metrics]``.
        observation: By name, ``[slots, ...]``.
        nbytes: Size of the shared memory.
    """

    def __init__(self, fd: int, spec: EnvSpec, slots: int, chunk: int) -> None:
        steps = {
            "actions": Field(shape=(chunk, spec.action_dim), dtype="float32"),
            "rewards": Field(shape=(chunk,), dtype="float32"),
            "terminated": Field(shape=(chunk,), dtype="bool"),
            "truncated": Field(shape=(chunk,), dtype="bool"),
            "valid": Field(shape=(chunk,), dtype="bool"),
            "metrics": Field(shape=(chunk, len(spec.metrics)), dtype="float32"),
        }
        seen = {f"observation/{name}": field for name, field in spec.observation.items()}
        shared = SharedArrays(fd, {name: field.rows(slots) for name, field in (steps | seen).items()})
        arrays = shared.arrays
        self.actions: np.ndarray = arrays["actions"]
        self.rewards, self.valid, self.metrics = arrays["rewards"], arrays["valid"], arrays["metrics"]
        self.terminated, self.truncated = arrays["terminated"], arrays["truncated"]
        self.observation = {name: arrays[f"observation/{name}"] for name in spec.observation}
        self.nbytes = shared.nbytes
