"""Rollout engines registered with veRL, each a server actor with the engine in it."""

import pkgutil


def register(name: str, *, replica: str, adapter: str) -> None:
    """Make ``actor_rollout_ref.rollout.name=NAME`` known to veRL; may be called again.

    Imports veRL's two registries and nothing else of it; the engine is imported when a job asks for it. veRL has no
    function to register an adapter, hence the write into its table (pinned by a contract test).

    Args:
        name: Name of the rollout.
        replica: Dotted name of its replica class.
        adapter: Dotted name of the class that pushes weights to it.
    """
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    def load() -> type[RolloutReplica]:
        found: type[RolloutReplica] = pkgutil.resolve_name(replica)
        return found

    RolloutReplicaRegistry.register(name, load)
    base._ROLLOUT_REGISTRY[(name, "async")] = adapter
