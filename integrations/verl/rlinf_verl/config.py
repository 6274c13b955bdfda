"""The options under ``trainer.v1.m2flow``, typed and checked once in the driver."""

from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError

TRAINER_MODE = "m2flow"
"""Value of ``trainer.v1.trainer_mode`` that turns the plugin on."""

NODE = f"trainer.v1.{TRAINER_MODE}"
"""Path of the options in veRL's configuration."""

Mode = Literal["temporal", "spatial", "hybrid", "auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualDevicesConfig:
    """Devices made of CPU cores, for machines without accelerators.

    Attributes:
        count: Number of devices on this machine; 0 means real accelerators are used.
        cores_per_device: Cores of each device; None shares the cores of this process evenly. Where there are fewer
            cores than devices, devices share cores.
        memory_gb: Memory capacity of each device in GiB; None shares 80 % of the machine's memory evenly.
    """

    count: int = 0
    cores_per_device: int | None = None
    memory_gb: float | None = None

    def validate(self, where: str) -> None:
        """Reject impossible sizes."""
        if self.count < 0:
            raise ConfigError(f"{where}.count must be 0 (use real accelerators) or positive, got {self.count}")
        if self.cores_per_device is not None and self.cores_per_device < 1:
            raise ConfigError(f"{where}.cores_per_device must be at least 1, got {self.cores_per_device}")
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise ConfigError(f"{where}.memory_gb must be positive, got {self.memory_gb}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingConfig:
    """How stages share the memory of their devices; see ``docs/lock.md``.

    Attributes:
        rollout_gb: GiB that a rollout replica takes on each of its devices, weights and KV cache; None estimates it
            from the checkpoint, or takes the share of the device the engine reserves.
        working_gb: GiB that activations of a stage take beside its weights. None: nothing on virtual devices; unknown
            on real ones, so that replicas leave after every generation, as under veRL's ``sync``.
    """

    rollout_gb: float | None = None
    working_gb: float | None = None

    def validate(self, where: str) -> None:
        """Reject negative sizes."""
        for name in ("rollout_gb", "working_gb"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{where}.{name} must not be negative, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """What a running job adds to a profile; see ``docs/planner.md``.

    Attributes:
        path: Profile (JSON) that the stages' times are added to; it is made if there is none. None: nothing is kept.
        warmup: Steps at the start of a job that do not count.
        granularities: Granularities to take in turn, one a step, so that stages are measured at each; 0 is the whole
            batch. Empty: the job's own. Used by ``rlinf-plugins profile``.
    """

    path: str | None = None
    warmup: int = 2
    granularities: tuple[int, ...] = ()

    def validate(self, where: str) -> None:
        """Reject negative numbers."""
        if self.warmup < 0 or min(self.granularities, default=0) < 0:
            raise ConfigError(f"{where}: warmup and granularities must not be negative, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class M2FlowConfig:
    """Options of the trainer mode ``m2flow``.

    Attributes:
        mode: How stages share devices. ``temporal``: they take turns on one set, as veRL's ``sync`` does. ``spatial``:
            rollout has devices of its own, and training starts on the first complete groups. ``hybrid``: as spatial,
            and the trainer's devices generate too until ``lend_until`` of the groups are complete. ``auto``: measure,
            plan and take the fastest of them.
        granularity: Prompts that training takes at a time. 0: the whole batch under ``temporal``, an eighth of a
            mini-batch elsewhere.
        lend_until: Under ``hybrid``, the share of a step's groups that must be complete before the trainer's devices
            leave generation to the rollout's.
        plan: Under ``auto``, a plan to follow instead of planning, as ``rlinf-plugins plan`` writes it.
        predicted: Seconds of a step and of its stages by the plan; ``auto`` sets it.
        max_failed_fraction: The job stops when more than this share of a step's rollouts failed.
        stall_timeout_s: The job stops when no rollout finishes for this many seconds.
        virtual_devices: Devices made of CPU cores; see :class:`VirtualDevicesConfig`.
        sharing: How stages share the memory of devices; see :class:`SharingConfig`.
        profile: What the job adds to a profile; see :class:`ProfileConfig`.
        envs: Options of the env-worker pool, read by the embodied agent loop.
        search: Options of the search-tool pool, read by the Search-R1 agent loop.
    """

    mode: Mode = "temporal"
    granularity: int = 0
    lend_until: float = 0.5
    plan: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    max_failed_fraction: float = 0.5
    stall_timeout_s: float = 3600.0
    virtual_devices: VirtualDevicesConfig = field(default_factory=VirtualDevicesConfig)
    sharing: SharingConfig = field(default_factory=SharingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    envs: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)

    def validate(self, where: str) -> None:
        """Reject numbers out of range."""
        if self.granularity < 0:
            raise ConfigError(f"{where}.granularity must be 0 (choose for me) or positive, got {self.granularity}")
        if self.plan and self.mode != "auto" and not self.predicted:
            raise ConfigError(f"{where}.plan is followed under mode=auto only, got mode={self.mode}; set mode=auto")
        if not 0.0 <= self.lend_until <= 1.0:
            raise ConfigError(f"{where}.lend_until must lie in [0, 1], got {self.lend_until}")
        if not 0.0 <= self.max_failed_fraction <= 1.0:
            raise ConfigError(f"{where}.max_failed_fraction must lie in [0, 1], got {self.max_failed_fraction}")
        if self.stall_timeout_s <= 0:
            raise ConfigError(f"{where}.stall_timeout_s must be positive, got {self.stall_timeout_s}")


def is_requested(config: DictConfig) -> bool:
    """Whether the user turned the plugin's trainer on."""
    return bool(OmegaConf.select(config, "trainer.v1.trainer_mode") == TRAINER_MODE)


def m2flow_config(config: DictConfig) -> M2FlowConfig:
    """Read and check ``trainer.v1.m2flow`` from veRL's configuration.

    Raises:
        ConfigError: An unknown option, a wrong type or an impossible value; valid options are listed.
    """
    node = OmegaConf.select(config, NODE)
    values = OmegaConf.to_container(node, resolve=True) if node is not None else {}
    return from_mapping(M2FlowConfig, values, NODE)  # type: ignore[arg-type]
