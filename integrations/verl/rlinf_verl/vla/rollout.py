"""Makes ``actor_rollout_ref.rollout.name=openvla`` known to veRL."""

NAME = "openvla"


def register() -> None:
    """Tell veRL of the ``openvla`` rollout; may be called again. Imports veRL's two registries only."""
    from verl.workers.rollout import base, replica

    def load() -> type[replica.RolloutReplica]:
        from rlinf_verl.vla.rollout_server import VLAReplica

        return VLAReplica

    replica.RolloutReplicaRegistry.register(NAME, load)
    base._ROLLOUT_REGISTRY[(NAME, "async")] = "rlinf_verl.vla.rollout_server.VLAAdapter"
