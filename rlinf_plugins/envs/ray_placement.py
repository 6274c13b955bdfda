"""Where the actors of a distributed pool run, and which of them hosts which environment."""

from dataclasses import dataclass, field
from typing import Any

from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Actors of a pool and what they take of the cluster.

    Attributes:
        actors: Number of actors; environments are spread over them evenly, the first ones take what does not divide.
        cpus_per_env: Ray CPUs an actor takes for each of its environments.
        gpus_per_actor: Ray GPUs of an actor, e.g. for simulators that draw there.
        resources: Custom Ray resources of an actor, e.g. ``{"simulation_node": 1}``.
        spread: Put the actors on as many nodes as there are; else fill one node after the other.
        start_timeout: Seconds until all environments must be up.
    """

    actors: int = 1
    cpus_per_env: float = 1.0
    gpus_per_actor: float = 0.0
    resources: dict[str, float] = field(default_factory=dict)
    spread: bool = True
    start_timeout: float = 600.0

    def shares(self, num_envs: int) -> list[list[int]]:
        """Return the slots of each actor: contiguous, stable, and uneven where they must be.

        Raises:
            ConfigError: There are more actors than environments, or none.
        """
        if not 1 <= self.actors <= num_envs:
            raise ConfigError(
                f"actors must lie between 1 and the number of environments, {num_envs}, got {self.actors}: an actor "
                "hosts at least one"
            )
        shares, at = [], 0
        for actor in range(self.actors):
            size = num_envs // self.actors + (actor < num_envs % self.actors)
            shares.append(list(range(at, at + size)))
            at += size
        return shares

    def options(self, envs: int) -> dict[str, Any]:
        """Return Ray's options of an actor with that many environments."""
        return {
            "num_cpus": self.cpus_per_env * envs,
            "num_gpus": self.gpus_per_actor,
            "resources": dict(self.resources),
            "scheduling_strategy": "SPREAD" if self.spread else "DEFAULT",
            "max_restarts": -1,
            "max_concurrency": 2 * envs + 8,
        }

    def describe(self, envs: int) -> str:
        """Say what an actor with that many environments takes."""
        taken = {"CPU": self.cpus_per_env * envs, "GPU": self.gpus_per_actor, **self.resources}
        return ", ".join(f"{name}={amount:g}" for name, amount in taken.items() if amount)
