"""The process behind one slot of the pool: makes the environment, then serves commands until it is told to close."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from rlinf_plugins.core.errors import EnvContractError, SnapshotError
from rlinf_plugins.core.supervision import Channel, pack, trim_output, unpack
from rlinf_plugins.envs.board import Board, Data, Phase
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.episode import Episode
from rlinf_plugins.envs.protocol import Environment, EnvSpec, InitialState, Snapshotting
from rlinf_plugins.envs.recording import Recorder, make_recorder
from rlinf_plugins.envs.rendering import check_frame

TARGET = "rlinf_plugins.envs.worker:serve"
DONE = pack(("done", None))
"""The usual answer, compared as bytes so that the pool need not decode it."""


def serve(channel: Channel, slot: int, slots: int, payload: int, board: int, data: int) -> None:
    """Run the worker of ``slot`` out of ``slots``.

    ``payload``, ``board`` and ``data`` are descriptors of anonymous files: the pickled factory and configuration, and
    the two shared memories.
    """
    worker = _EnvWorker(channel, slot, slots, Board(board, slots), data)
    try:
        worker.start(os.pread(payload, os.fstat(payload).st_size, 0))
        worker.serve()
    except _PoolGoneError:
        return
    except BaseException as error:  # SystemExit too: a simulator that asks a question on stdin ends that way
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        channel.send(pack(("raised", (type(error).__name__, message, text))))


class _PoolGoneError(Exception):
    """The other end of the channel is closed; not an EOFError, which a simulator's question on stdin raises."""


class _EnvWorker:
    def __init__(self, channel: Channel, slot: int, slots: int, board: Board, data_fd: int) -> None:
        self._channel = channel
        self._slot = slot
        self._slots = slots
        self._board = board
        self._data_fd = data_fd
        self._episode = Episode(initial=InitialState(), done=True)
        self._task = ""

    def start(self, payload: bytes) -> None:
        """Make the environment, draw its first frame, tell the pool what it is and map the shared data."""
        factory, config = cloudpickle.loads(payload)
        self._config: PoolConfig = config
        self._board.enter(self._slot, Phase.BUILD)
        self._env: Environment = factory()
        spec: EnvSpec = self._env.spec
        spec.validate()
        self._recorder: Recorder | None = make_recorder(config.video, spec, self._slot)
        if config.preflight:
            self._preflight(spec)
        self._channel.send(pack(("hello", spec)))
        self._receive()  # the pool has sized the memory
        self._map(Data(self._data_fd, spec, self._slots, config.max_chunk), spec)

    def _receive(self) -> bytes:
        try:
            return self._channel.recv()
        except EOFError as error:
            raise _PoolGoneError from error

    def _preflight(self, spec: EnvSpec) -> None:
        self._board.enter(self._slot, Phase.FIRST_RESET)
        self._env.reset(InitialState())
        self._board.enter(self._slot, Phase.FIRST_RENDER)
        seen = self._env.observe()
        for name, field in spec.observation.items():
            if name not in seen:
                raise EnvContractError(f"{spec.name}: observe() gives {sorted(seen)}, the specification has {name!r}")
            if seen[name].shape != field.shape or seen[name].dtype != np.dtype(field.dtype):
                raise EnvContractError(
                    f"{spec.name}: observation {name!r} is {seen[name].dtype}{list(seen[name].shape)}, "
                    f"the specification says {field.dtype}{list(field.shape)}"
                )
        for name in spec.images():
            check_frame(seen[name], f"{spec.name}, {name}")

    def _map(self, data: Data, spec: EnvSpec) -> None:
        slot = self._slot
        self._actions, self._rewards = data.actions[slot], data.rewards[slot]
        self._terminated, self._truncated = data.terminated[slot], data.truncated[slot]
        self._valid, self._metrics = data.valid[slot], data.metrics[slot]
        self._metric_names = list(enumerate(spec.metrics))
        self._observation = {name: rows[slot] for name, rows in data.observation.items()}
        flat = {name: row.reshape(-1) for name, row in self._observation.items() if row.dtype.kind == "f"}
        self._numbers = [(name, row, np.zeros_like(row)) for name, row in flat.items()]

    def serve(self) -> None:
        """Answer commands until ``close``."""
        commands: dict[str, Callable[[Any], bytes]] = {
            "step": self._step,
            "reset": self._reset,
            "save": self._save,
            "load": self._load,
        }
        while True:
            self._board.phase[self._slot] = Phase.IDLE
            name, argument = unpack(self._receive())
            if name == "close":
                self._close()
                return
            self._channel.send(commands[name](argument))

    def _reset(self, where: tuple[InitialState, int]) -> bytes:
        initial, number = where
        self._board.enter(self._slot, Phase.RESET)
        self._episode = Episode(initial=initial)
        trim_output()
        self._task = self._env.reset(initial)
        self._observe()
        self._publish()
        self._board.private[self._slot] = private_bytes()
        self._film(number)
        return pack(("task", self._task))

    def _film(self, number: int) -> None:
        """Begin the film of an episode with what is seen now."""
        if self._recorder is not None:
            self._recorder.begin(self._episode.initial, self._task, number)
            self._recorder.add(self._observation)

    def _step(self, count: int) -> bytes:
        episode, config, board, slot = self._episode, self._config, self._board, self._slot
        board.phase[slot] = Phase.STEP
        done_before = -1  # index of the last step of the episode
        for index in range(count):
            if episode.done and not (config.episode.run_after_done and done_before >= 0):
                self._valid[index:count] = False
                self._rewards[index:count] = 0.0
                self._terminated[index:count] = False
                self._truncated[index:count] = False
                self._metrics[index:count] = 0.0
                break
            board.beat[slot] += 1
            outcome = self._env.step(self._actions[index].copy())
            if done_before >= 0:  # executed, but no longer part of the episode
                self._valid[index] = False
                self._rewards[index] = 0.0
                continue
            self._rewards[index] = episode.advance(outcome, config.episode, config.reward)
            self._terminated[index] = episode.terminated
            self._truncated[index] = episode.truncated
            self._valid[index] = True
            for position, name in self._metric_names:
                self._metrics[index, position] = outcome.metrics.get(name, 0.0)
            self._publish()
            if episode.done:
                done_before = index
        self._observe()
        if self._recorder is not None:
            self._recorder.add(self._observation)
        if done_before >= 0:
            board.private[slot] = private_bytes()
            if self._recorder is not None:
                self._recorder.finish(success=episode.success_once, ret=episode.ret)
        return DONE

    def _save(self, _: None) -> bytes:
        self._board.enter(self._slot, Phase.SAVE)
        if not isinstance(self._env, Snapshotting):
            raise SnapshotError(f"{self._env.spec.name} has no save() and load(): it cannot be snapshotted")
        state = {"env": self._env.save(), "episode": self._episode.state(), "task": self._task}
        return pack(("state", pack(state)))

    def _load(self, what: tuple[bytes, int]) -> bytes:
        packed, number = what
        self._board.enter(self._slot, Phase.LOAD)
        if not isinstance(self._env, Snapshotting):
            raise SnapshotError(f"{self._env.spec.name} has no save() and load(): it cannot be restored")
        state: dict[str, Any] = unpack(packed)
        self._env.load(state["env"])
        self._episode = Episode(**state["episode"])
        self._task = state["task"]
        self._observe()
        self._publish()
        self._film(number)
        return pack(("task", self._task))

    def _observe(self) -> None:
        self._board.phase[self._slot] = Phase.OBSERVE
        seen = self._env.observe()
        for name, row in self._observation.items():
            row[...] = seen[name]
        for name, numbers, zeros in self._numbers:
            if numbers.dot(zeros) != 0:  # NaN and infinity give NaN; the fastest test there is
                raise EnvContractError(
                    f"{self._env.spec.name}: observation {name!r} has values that are not finite after step "
                    f"{self._episode.steps}; the simulation has diverged"
                )

    def _publish(self) -> None:
        episode, board, slot = self._episode, self._board, self._slot
        board.steps[slot] = episode.steps
        board.ret[slot] = episode.ret
        flags = (episode.success_once, episode.success, episode.terminated, episode.truncated, episode.done)
        board.flags[slot] = flags

    def _close(self) -> None:
        self._board.enter(self._slot, Phase.CLOSE)
        if self._recorder is not None:
            self._recorder.close()
        self._env.close()


def private_bytes() -> int:
    """Return the memory of this process that it shares with no other, in bytes."""
    with open("/proc/self/statm", "rb") as statm:
        resident, shared = statm.read().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
