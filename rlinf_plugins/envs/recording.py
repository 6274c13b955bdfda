"""Videos of episodes, encoded off the hot path by a low-priority thread of the worker."""

import contextlib
import itertools
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.envs.config import VideoConfig
from rlinf_plugins.envs.protocol import EnvSpec, InitialState, Observation

_LOWEST_PRIORITY = 19
_QUEUED_EPISODES = 2
"""Episodes that wait for the encoder; more are not filmed, so that filming neither stalls nor fills the memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Film:
    frames: list[np.ndarray]
    path: Path
    comment: str


class Recorder:
    """Collects one episode's frames and hands them to an encoder thread at its end.

    Args:
        config: Where and how.
        name: Name of the environment, for the files.
        slot: Slot of the pool, for the files.
        view: Name of the observation that is filmed: uint8 ``[height, width, 3]``.
    """

    def __init__(self, config: VideoConfig, name: str, slot: int, view: str) -> None:
        self._config, self._name, self._slot, self._view = config, name, slot, view
        self._folder = Path(config.folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._frames: list[np.ndarray] = []
        self._films: queue.Queue[_Film | None] = queue.Queue(_QUEUED_EPISODES)
        self._thread = threading.Thread(target=self._encode_all, name="video", daemon=True)
        self._thread.start()

    def begin(self, initial: InitialState, task: str, number: int) -> None:
        """Start the pool's episode ``number``; what was collected of an unfinished one is forgotten."""
        self._initial, self._task, self._number = initial, task, number
        self._films_it = number % self._config.every == 0
        self._frames = []

    def add(self, observation: Observation) -> None:
        """Take the observation's image, if this episode is filmed."""
        if self._films_it:
            self._frames.append(observation[self._view].copy())

    def finish(self, success: bool, ret: float) -> None:
        """Hand the episode to the encoder; never waits."""
        if not self._frames:
            return
        at = self._initial
        outcome = "success" if success else "failure"
        name = f"{self._name}-task{at.task}-trial{at.trial}-slot{self._slot}-{self._number:06d}-{outcome}.mp4"
        comment = f"task={at.task} trial={at.trial} return={ret:.4f} {outcome} instruction={self._task}"
        with contextlib.suppress(queue.Full):
            self._films.put_nowait(_Film(frames=self._frames, path=self._folder / name, comment=comment))
        self._frames = []

    def close(self) -> None:
        """Finish the videos that are queued."""
        self._films.put(None)
        self._thread.join()

    def _encode_all(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while (film := self._films.get()) is not None:
            _encode(film, self._config.fps)


def make_recorder(config: VideoConfig | None, spec: EnvSpec, slot: int) -> Recorder | None:
    """Return the recorder of a slot, or None where nothing is to be filmed.

    Raises:
        ConfigError: Videos are asked of an environment that has no image.
    """
    if config is None:
        return None
    images = spec.images()
    if not images:
        raise ConfigError(f"video: {spec.name} observes no image (fields: {', '.join(spec.observation)})")
    return Recorder(config, spec.name, slot, images[0])


def _encode(film: _Film, fps: int) -> None:
    import imageio_ffmpeg

    height, width = film.frames[0].shape[:2]
    unfinished = film.path.with_suffix(f".{os.getpid()}.part.mp4")
    writer = imageio_ffmpeg.write_frames(
        str(unfinished),
        (width, height),
        fps=fps,
        macro_block_size=2,
        output_params=["-metadata", f"comment={film.comment}", "-threads", "1"],
    )
    writer.send(None)
    for frame in film.frames:
        writer.send(np.ascontiguousarray(frame[..., :3]))
    writer.close()
    _publish(unfinished, film.path)


def _publish(unfinished: Path, path: Path) -> None:
    """Give a file its name; a film of another pool that has the same name stays."""
    for copy in itertools.count(2):
        try:
            os.link(unfinished, path)
        except FileExistsError:
            path = path.with_stem(f"{path.stem.partition('~')[0]}~{copy}")
        else:
            unfinished.unlink()
            return
