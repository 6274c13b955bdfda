"""A resident made of a torch module and, if it trains, its optimizer; on CUDA or on a virtual CPU device."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rlinf_plugins.scheduler.lock.fence import Fence, Permit
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices


class ModuleResident:
    """Moves a module's parameters, buffers and gradients and its optimizer's state between a device and the host.

    What is there is measured by the storages themselves: one that left is counted until nothing refers to it any more,
    so a forgotten view keeps the resident from being confirmed as gone.

    Args:
        name: Its name.
        module: On the host when this is made.
        device: Name of the device in the lock, e.g. ``"node0/gpu:0"``.
        torch_device: What torch calls it: ``cuda:0``, or ``cpu`` for a virtual device.
        fence: Guards the device.
        optimizer: Its state moves along.
        virtual: The virtual devices on which the bytes count; None on CUDA.
        extra_bytes: Bytes beyond the tensors that are there now: gradients and optimizer state still to come.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        device: str,
        torch_device: torch.device,
        fence: Fence,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        virtual: VirtualDevices | None = None,
        extra_bytes: int = 0,
    ) -> None:
        self.name = name
        self.device = device
        self._module = module
        self._optimizer = optimizer
        self._target = torch_device
        self._fence = fence
        self._virtual = virtual
        self._there: list[tuple[Any, int]] = []
        self._extra = extra_bytes
        self._on = False

    @property
    def footprint(self) -> Mapping[str, int]:
        """Bytes of all tensors, and of those still to come."""
        return {self.device: sum(storage.nbytes() for storage in _storages(self._tensors())) + self._extra}

    async def drain(self) -> None:
        """Wait for the kernels that use the module."""
        await asyncio.to_thread(self._synchronize)

    async def offload(self, permit: Permit) -> None:
        """Copy all tensors to the host and drop those on the device."""
        await asyncio.to_thread(self._move, permit, False)

    async def onload(self, permit: Permit) -> None:
        """Copy all tensors to the device."""
        await asyncio.to_thread(self._move, permit, True)

    async def resident_bytes(self) -> Mapping[str, int]:
        """Bytes of the device's storages that are still alive."""
        await asyncio.to_thread(self._synchronize if self._on else self._settle)
        return {self.device: self._alive_bytes()}

    async def resume(self) -> None:
        """Nothing to do: a module has no work of its own."""

    def _move(self, permit: Permit, onto_device: bool) -> None:
        with self._fence.admit(permit, [self.device]):
            if onto_device == self._on:
                return
            if onto_device and self._virtual is not None:
                self._virtual.allocate(self.device, self.name, self.footprint[self.device])
            if not onto_device:
                self._watch()  # what was made while it was there, gradients above all, leaves with it
            target = self._target if onto_device else torch.device("cpu")
            _move_all(self._tensors(), target, pinned=not onto_device and self._target.type == "cuda")
            self._synchronize()
            self._on = onto_device
            if onto_device:
                self._watch()
            else:
                self._settle()

    def _watch(self) -> None:
        self._there = [(_weak(storage), storage.nbytes()) for storage in _storages(self._tensors())]

    def _alive_bytes(self) -> int:
        return sum(nbytes for storage, nbytes in self._there if not storage.expired())

    def _settle(self) -> None:
        """Give back what is free, to the device or, on a virtual one, in its books."""
        self._synchronize()
        if self._target.type == "cuda":
            torch.cuda.empty_cache()
        if self._virtual is not None and not self._alive_bytes():
            self._virtual.free(self.device, self.name)

    def _synchronize(self) -> None:
        if self._target.type == "cuda":
            torch.cuda.synchronize(self._target)

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        # Step counters have no shape; torch's optimizers keep them on the host.
        return tensors + [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim() > 0]


def used_bytes_of(torch_device: torch.device) -> int:
    """Bytes in use on a CUDA device, whoever's they are."""
    free, total = torch.cuda.mem_get_info(torch_device)
    return total - free


def _move_all(tensors: Iterable[torch.Tensor], target: torch.device, pinned: bool) -> None:
    """Copy the tensors' storages to ``target``; tensors that share one (tied or flattened weights) go on sharing it."""
    moved: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in moved:
                source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                moved[storage._cdata] = _copied(source, target, pinned)
            home = moved[storage._cdata].untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device=target)
            moved_to = view.set_(home, tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = moved_to


def _copied(tensor: torch.Tensor, target: torch.device, pinned: bool) -> torch.Tensor:
    if not pinned:
        return tensor.to(target, copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())


def _weak(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
