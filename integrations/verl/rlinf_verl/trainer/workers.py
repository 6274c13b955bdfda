"""veRL's workers, bound to their virtual device and sure that the plugin is loaded in their process."""

from typing import Any

from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from rlinf_verl import handshake
from rlinf_verl.cpu.devices import bind_assigned_device


class M2FlowActorRolloutRefWorker(ActorRolloutRefWorker):  # type: ignore[misc]
    """Actor, rollout adapter and reference in one process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        handshake.require()
        bind_assigned_device()
        super().__init__(*args, **kwargs)


class M2FlowTrainingWorker(TrainingWorker):  # type: ignore[misc]
    """Critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        handshake.require()
        bind_assigned_device()
        super().__init__(*args, **kwargs)


WORKER_CLASSES = {ActorRolloutRefWorker: M2FlowActorRolloutRefWorker, TrainingWorker: M2FlowTrainingWorker}
"""veRL's class -> the one the trainer mode uses in its place."""
