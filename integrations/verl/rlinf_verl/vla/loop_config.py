"""The options under ``trainer.v1.m2flow.envs``: the environments of an embodied job, and how they meet the policy."""

import importlib
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal

from omegaconf import DictConfig

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError, MissingExtraError, UnknownNameError
from rlinf_plugins.envs import EnvFactory, EnvSpec, PoolConfig
from rlinf_verl.config import NODE, m2flow_config
from rlinf_verl.vla.loss_filter import check_bounds

WHERE = f"{NODE}.envs"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbodiedConfig:
    """Environments of an embodied job.

    Attributes:
        factory: ``module:name`` of what makes an environment factory, e.g.
            ``rlinf_plugins.envs.maniskill:ManiSkillFactory``; called with ``kwargs``.
        kwargs: Arguments of the factory.
        num_envs: Environments in all; one process each.
        workers: Actors they are spread over. One is right on one machine.
        cameras: Observation arrays the policy sees, in its order; None takes all images, the main one first.
        proprio: Observation array that is the policy's proprioceptive state; None for a policy that takes none.
        view: ``libero`` brings frames to what OpenVLA-OFT's LIBERO checkpoints were trained on (JPEG, Lanczos-3 to 224
            pixels, the centre 0.9 of the area); ``none`` leaves them.
        gripper: How the last number of an action, in [0, 1], becomes the robot's: ``libero``, ``widowx`` or ``none``.
        execute: Actions of a chunk that are executed before the policy looks again; None executes all.
        keep_groups: ``[lowest, highest]`` mean return of the groups that are learnt from; the others leave the loss and
            its denominator. None keeps all.
        pool: Options of the pool.
    """

    factory: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    num_envs: int = 4
    workers: int = 1
    cameras: list[str] | None = None
    proprio: str | None = None
    view: Literal["none", "libero"] = "none"
    gripper: Literal["none", "libero", "widowx"] = "none"
    execute: int | None = None
    keep_groups: list[float] | None = None
    pool: PoolConfig = field(default_factory=PoolConfig)

    def validate(self, where: str) -> None:
        """Refuse sizes that cannot be."""
        if not 1 <= self.workers <= self.num_envs:
            raise ConfigError(
                f"{where}.workers must lie between 1 and num_envs={self.num_envs}, got {self.workers}: each worker "
                "hosts at least one environment"
            )
        if self.execute is not None and self.execute < 1:
            raise ConfigError(f"{where}.execute must be at least 1, got {self.execute}")
        if self.keep_groups is not None:
            check_bounds(self.keep_groups, f"{where}.keep_groups")
        if ":" not in self.factory:
            raise ConfigError(f"{where}.factory must be module:name, got {self.factory!r}")

    def share(self, worker: int) -> int:
        """Environments of one worker; the first ones take what does not divide."""
        return self.num_envs // self.workers + (worker < self.num_envs % self.workers)

    def choose_cameras(self, spec: EnvSpec) -> list[str]:
        """Return the observation arrays the policy sees.

        Raises:
            ConfigError: One the environment does not have.
        """
        cameras = spec.images() if self.cameras is None else self.cameras
        for name in [*cameras, *([self.proprio] if self.proprio else [])]:
            if name not in spec.observation:
                known = ", ".join(sorted(spec.observation))
                raise ConfigError(f"{WHERE}: the environment has no observation {name!r}; it has {known}")
        return cameras

    def make_factory(self) -> EnvFactory:
        """Import and call the factory's maker.

        Raises:
            UnknownNameError: The module or the name in it does not exist.
            ConfigError: It does not take these arguments.
        """
        module, _, name = self.factory.partition(":")
        try:
            maker = getattr(importlib.import_module(module), name)
        except MissingExtraError:
            raise
        except (ImportError, AttributeError) as error:
            raise UnknownNameError(f"{WHERE}.factory={self.factory!r} cannot be imported: {error}") from error
        try:
            factory: EnvFactory = maker(**self.kwargs)
        except TypeError as error:
            raise ConfigError(f"{WHERE}.kwargs do not fit {self.factory}{signature(maker)}: {error}") from error
        return factory


def embodied_config(config: DictConfig) -> EmbodiedConfig:
    """Read and check ``trainer.v1.m2flow.envs`` from veRL's configuration.

    Raises:
        ConfigError: An unknown option, a wrong type or an impossible value.
    """
    return from_mapping(EmbodiedConfig, m2flow_config(config).envs, WHERE)
