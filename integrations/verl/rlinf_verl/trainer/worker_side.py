"""What runs inside veRL's worker processes when a resident moves: the fence, the engine's own verb, the measurement.

Sent to the workers through Ray's ``__ray_call__``, so that no class of veRL needs another method.
"""

import weakref
from pathlib import Path
from typing import Any, Literal

from rlinf_plugins.core.errors import ResidentStateError
from rlinf_plugins.scheduler.lock.fence import FileFence, Permit

Part = Literal["actor", "ref", "critic"]

_SENT_OFF: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Engines told to leave. On a virtual device the host is the same memory, so this is all that tells where one is."""


def move_engine(
    worker: Any, part: Part, onto_device: bool, optimizer: bool, permit: Permit, folder: str, device: str
) -> None:
    """Move an engine with :meth:`TrainingWorker.to`, under the fence of this worker's device.

    Raises:
        StaleTokenError: The permit is not valid any more; nothing was moved.
        ResidentStateError: The worker has no such engine.
    """
    training_worker = find_training_worker(worker, part)
    with FileFence(Path(folder)).admit(permit, [device]):
        training_worker.to("device" if onto_device else "cpu", model=True, optimizer=optimizer, grad=True)
        synchronise()
        if not onto_device:
            _SENT_OFF.add(training_worker)
        else:
            _SENT_OFF.discard(training_worker)


def put_back(worker: Any, part: Part) -> None:
    """Take off the device again what a weight sync fetched of an engine that had been sent off it."""
    training_worker = find_training_worker(worker, part)
    if training_worker in _SENT_OFF:
        training_worker.to("cpu", model=True, optimizer=False, grad=False)
        synchronise()


def seal(worker: Any, permit: Permit, folder: str, device: str) -> None:
    """Show a permit to the fence of this worker's device.

    Raises:
        StaleTokenError: The permit is not valid any more.
    """
    del worker
    FileFence(Path(folder)).seal(Permit({device: permit.tokens[device]}, permit.holder, permit.not_after, permit.host))


def engine_bytes(worker: Any, part: Part) -> int:
    """Bytes of the engine's parameters, gradients and optimizer state on the accelerator, after synchronising."""
    from verl.utils.device import get_device_name

    synchronise()
    training_worker = find_training_worker(worker, part)
    if get_device_name() == "cpu" and training_worker in _SENT_OFF:
        return 0
    engine = training_worker.engine
    tensors = list(engine.module.parameters()) + list(engine.module.buffers())
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    optimizer = getattr(engine, "optimizer", None)
    if optimizer is not None:
        tensors += [value for state in optimizer.state.values() for value in state.values() if hasattr(value, "device")]
    shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    there = {
        shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes()
        for shard in shards
        if shard.device.type == get_device_name()
    }
    return sum(there.values())


def device_used_bytes(worker: Any) -> int:
    """All bytes in use on this worker's accelerator, whoever's they are, after synchronising."""
    del worker
    from verl.utils.device import get_torch_device

    synchronise()
    free, total = get_torch_device().mem_get_info()
    return int(total - free)


def synchronise(worker: Any = None) -> None:
    """Wait for the accelerator, and give cached blocks back so that other processes see them as free."""
    del worker
    from verl.utils.device import get_torch_device

    device = get_torch_device()
    device.synchronize()
    device.empty_cache()


def find_training_worker(worker: Any, part: Part) -> Any:
    """Return veRL's ``TrainingWorker`` of ``part`` in a worker process, through the classes that fuse several roles.

    Raises:
        ResidentStateError: There is none.
    """
    for inner in [worker, *getattr(worker, "worker_dict", {}).values()]:
        if part == "critic" and hasattr(inner, "engine") and not hasattr(inner, "actor"):
            return inner
        if part != "critic" and getattr(inner, part, None) is not None:
            return getattr(inner, part)
    held = ", ".join(getattr(worker, "worker_dict", {})) or type(worker).__name__
    raise ResidentStateError(f"this worker has no {part} engine; it holds {held}")
