"""Options of the pool, its episodes and its rewards."""

from dataclasses import dataclass, field
from typing import Literal

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.core.supervision import RestartPolicy

SHAPING = {"success": 1.0, "is_src_obj_grasped": 0.1, "consecutive_grasp": 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardConfig:
    """How a step's reward is made. Applied in this order: mode, relative, penalty.

    Attributes:
        mode: ``"raw"``: the environment's own; ``"sparse"``: ``coefficient`` while the task is solved, else 0;
            ``"shaped"``: sum of ``shaping[name] * metric`` over the step's metrics, times ``coefficient``.
        coefficient: Scale of the sparse and shaped rewards.
        shaping: Weights of the shaped reward; the default is RLinf's for picking tasks.
        relative: Give the change since the step before (which counts as 0 at the first step), so that the return of an
            episode is its last reward.
        step_penalty: Subtracted at every step.
    """

    mode: Literal["raw", "sparse", "shaped"] = "raw"
    coefficient: float = 1.0
    shaping: dict[str, float] = field(default_factory=lambda: dict(SHAPING))
    relative: bool = False
    step_penalty: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeConfig:
    """Where an episode ends.

    A finished environment waits for its reset and costs nothing, unless the pool has a ``next_initial``.

    Attributes:
        max_steps: Cut episodes off (``truncated``) after this many steps; None leaves it to the environment.
        ignore_terminations: Go on after success until the episode is truncated; ``terminated`` is still reported.
        run_after_done: Execute the rest of a chunk after the episode's end in it; those steps are still not valid.
    """

    max_steps: int | None = None
    ignore_terminations: bool = False
    run_after_done: bool = False

    def validate(self, where: str) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: Names the option.
        """
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"{where}.max_steps must be at least 1, got {self.max_steps}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlines:
    """How long a worker may take before it counts as hung and is replaced; in seconds.

    Attributes:
        start: From the start of the process to its first frame.
        reset: One reset.
        step: One step; a chunk has this times its length.
        snapshot: One save or load.
        close: Orderly end of an idle worker, before it is killed.
        heartbeat: Interval at which idle workers are checked to be neither stopped nor gone.
    """

    start: float = 300.0
    reset: float = 120.0
    step: float = 30.0
    snapshot: float = 60.0
    close: float = 5.0
    heartbeat: float = 5.0

    def validate(self, where: str) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: Names the option.
        """
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{where}.{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """Where and how episodes are filmed.

    Attributes:
        folder: Folder of the videos; created if needed.
        fps: Frames per second of the file; there is one frame per observation.
        every: Film each n-th episode of the pool.
    """

    folder: str
    fps: int = 10
    every: int = 1

    def validate(self, where: str) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: Names the option.
        """
        for name in ("fps", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Options of :class:`rlinf_plugins.envs.EnvPool`.

    Attributes:
        max_chunk: Longest action chunk a call may hold; sizes the shared memory.
        out_of_range: What an action outside the bounds means: ``"fail"`` the episode, or ``"clip"`` the action.
        preflight: Draw one frame at start and refuse a blank one.
        copy_observations: Give observations that stay as they are. If False they are views of the shared memory, valid
            until the slot's next call.
        parallel_starts: Most workers that start at the same time; 1 serialises the first render, 0 is one for each core
            (and never less than 2): more would only slow each other down until they miss their deadline.
        memory_budget: Private bytes beyond which a worker is replaced at its episode's end; None is no limit.
        episode: Where episodes end.
        reward: How rewards are made.
        deadlines: How long calls may take.
        restart: How often a failing worker is restarted.
        video: Film episodes; None does not.
    """

    max_chunk: int = 32
    out_of_range: Literal["fail", "clip"] = "fail"
    preflight: bool = True
    copy_observations: bool = True
    parallel_starts: int = 0
    memory_budget: int | None = None
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    deadlines: Deadlines = field(default_factory=Deadlines)
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    video: VideoConfig | None = None

    def validate(self, where: str) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: Names the option.
        """
        if self.max_chunk < 1:
            raise ConfigError(f"{where}.max_chunk must be at least 1, got {self.max_chunk}")
        if self.parallel_starts < 0:
            raise ConfigError(f"{where}.parallel_starts must not be negative, got {self.parallel_starts}")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise ConfigError(f"{where}.memory_budget must be positive or left out, got {self.memory_budget}")
