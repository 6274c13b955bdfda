"""Rollout engines registered with veRL.

``register`` makes ``actor_rollout_ref.rollout.name=hf`` known: a Hugging Face model served in process, the default
on machines without a GPU.
"""

NAME = "hf"


def register() -> None:
    """Tell veRL of the ``hf`` rollout; may be called again.

    Imports veRL's two registries and nothing else of it; the engine is imported when a job asks for it. veRL has no
    function to register an adapter, hence the write into its table (pinned by a contract test).
    """
    from verl.workers.rollout import base, replica

    def load() -> type[replica.RolloutReplica]:
        from rlinf_verl.rollout.replica import InProcessReplica

        return InProcessReplica

    replica.RolloutReplicaRegistry.register(NAME, load)
    base._ROLLOUT_REGISTRY[(NAME, "async")] = "rlinf_verl.rollout.replica.InProcessAdapter"
