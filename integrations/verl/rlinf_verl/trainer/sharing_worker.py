"""What the driver asks of worker processes before it shares their devices: which device, how large, what is on it."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_verl.trainer import worker_side
from rlinf_verl.trainer.sharing_sizes import TRAINED_COPIES
from rlinf_verl.trainer.worker_side import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """One engine of a rank.

    Attributes:
        nbytes: Most bytes it has on the device while it works: parameters, buffers, gradients, optimizer state.
        stays: It is where it is put; otherwise it fetches its weights for every call.
        optimizer_stays: The same of its optimizer's state.
    """

    nbytes: int
    stays: bool
    optimizer_stays: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank.

    Attributes:
        device: Name of its device, unique over machines.
        capacity: Bytes of the device.
        engines: Its engines, by part.
    """

    device: str
    capacity: int
    engines: dict[Part, EngineFacts]


def describe(worker: Any, parts: Sequence[Part]) -> RankFacts:
    """Return the facts of a rank that has the engines ``parts``."""
    import ray
    from verl.utils.device import get_torch_device

    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU") or [os.environ.get("LOCAL_RANK", "0")]
    return RankFacts(
        device=f"{socket.gethostname()}/gpu:{ids[0]}",
        capacity=int(get_torch_device().mem_get_info()[1]),
        engines={part: engine_facts(worker_side.find_training_worker(worker, part).engine) for part in parts},
    )


def engine_facts(engine: Any) -> EngineFacts:
    """Return the facts of one of veRL's engines."""
    config = engine.engine_config
    if not str(config.strategy).startswith("fsdp"):
        # Others arrange their memory themselves; how much it is cannot be told from here.
        return EngineFacts(nbytes=0, stays=False, optimizer_stays=False)
    tensors = [*engine.module.parameters(), *engine.module.buffers()]
    frozen = sum(_local_bytes(tensor) for tensor in tensors if not tensor.requires_grad)
    trained = sum(_local_bytes(tensor) for tensor in tensors if tensor.requires_grad)
    if config.forward_only:
        return EngineFacts(nbytes=frozen + trained, stays=False, optimizer_stays=False)
    return EngineFacts(
        nbytes=frozen + TRAINED_COPIES * trained,
        stays=not (config.param_offload or config.offload_policy),
        optimizer_stays=not config.optimizer_offload,
    )


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
