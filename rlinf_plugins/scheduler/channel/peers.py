"""Tensors between two processes without a third: by a handle to the sender's memory, or sent over a group of two."""

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

IPC, NCCL, GLOO = "ipc", "nccl", "gloo"
_TIMEOUT = timedelta(seconds=60)
_RECEIVER, _SENDER = 0, 1


def choose(device: str, same_node: bool) -> str:
    """How this process gets a tensor.

    Args:
        device: UUID of the GPU it is on; empty for one in main memory.
        same_node: Whether its holder shares this process's node.

    Returns:
        ``"ipc"`` on the same device, ``"nccl"`` between two, ``"gloo"`` where either end has no GPU.
    """
    if not device or not _has_gpu():
        return GLOO
    return IPC if same_node and _local_index(device) is not None else NCCL


def share(tensor: Any) -> tuple[Any, ...]:
    """What another process needs to open a tensor of this one's GPU."""
    from torch.multiprocessing.reductions import reduce_tensor

    return tuple(reduce_tensor(tensor)[1])  # type: ignore[no-untyped-call]


_DEVICE = 6  # of the arguments of torch's rebuild_cuda_tensor


def open_shared(handle: tuple[Any, ...], device: str) -> Any:
    """Copy, on the device, what :func:`share` gave a handle of.

    Args:
        handle: The handle.
        device: UUID of the GPU.
    """
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    index = _local_index(device)
    arguments = [index if place == _DEVICE else value for place, value in enumerate(handle)]
    theirs = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    copy = theirs.clone()
    torch.cuda.current_stream(copy.device).synchronize()  # before the holder may let go
    return copy


class Peers:
    """The sender's groups, one per receiver and way; used by one thread."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], Any] = {}

    def send(self, tensor: Any, way: str, place: tuple[Any, ...]) -> None:
        """Send to whoever listens at ``place``."""
        key = (way, *place)
        if key not in self._groups:
            self._groups[key] = _group(way, *place, rank=_SENDER)
        flat = _as_bytes(tensor)
        self._groups[key].send([flat.cpu() if way == GLOO else flat], _RECEIVER, 0).wait()
        if way == NCCL:
            _synchronise(tensor.device)


class Receiver:
    """This process's end of a group with one sender; what is asked for first comes first.

    Args:
        way: ``"nccl"`` or ``"gloo"``.
    """

    def __init__(self, way: str) -> None:
        import torch.distributed as dist

        self._way = way
        host = _host()
        self._store = dist.TCPStore(host, 0, 2, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
        self._place = (host, self._store.port)
        self._group: Any = None
        self._orders: queue.SimpleQueue[tuple[Future[Any], tuple[int, ...], str]] = queue.SimpleQueue()
        self._asking = threading.Lock()
        # Not an executor's: waiting for a sender that died must not keep this process from ending.
        threading.Thread(target=self._run, name="channel-receiver", daemon=True).start()

    def receive(self, shape: tuple[int, ...], dtype: str, ask: Callable[[tuple[Any, ...]], Any]) -> "Future[Any]":
        """Ask for a tensor and receive it.

        Args:
            shape: Its shape.
            dtype: Its dtype's name.
            ask: Called with the place where the sender finds this process.
        """
        coming: Future[Any] = Future()
        with self._asking:  # tensors come in the order in which they were asked for
            ask(self._place)
            self._orders.put((coming, shape, dtype))
        return coming

    def close(self) -> None:
        """Receive nothing any more."""
        self._orders.put((Future(), (), ""))

    def _run(self) -> None:
        broken: Exception | None = None
        while True:
            coming, shape, dtype = self._orders.get()
            if not dtype:
                return
            try:
                if broken is not None:
                    raise broken  # what comes through this group now is anybody's
                coming.set_result(self._receive(shape, dtype))
            except Exception as error:  # torch and the network raise anything
                broken = error
                coming.set_exception(error)

    def _receive(self, shape: tuple[int, ...], dtype: str) -> Any:
        import torch

        if self._group is None:
            self._group = _group(self._way, *self._place, rank=_RECEIVER, store=self._store)
        device = torch.device("cuda", torch.cuda.current_device()) if self._way == NCCL else torch.device("cpu")
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        self._group.recv([_as_bytes(tensor)], _SENDER, 0).wait()
        if self._way == NCCL:
            _synchronise(device)
        return tensor


def _group(way: str, host: str, port: int, *, rank: int, store: Any = None) -> Any:
    import torch.distributed as dist

    if store is None:
        store = dist.TCPStore(host, port, 2, is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    if way == NCCL:
        nccl = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
        nccl._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, 2, nccl)  # type: ignore[attr-defined]
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_host())]
    options._timeout = _TIMEOUT
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _as_bytes(tensor: Any) -> Any:
    """A contiguous tensor as bytes, which every backend sends whatever the dtype."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def _host() -> str:
    """This node's address, as others reach it."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address()).strip("[]")
    return "127.0.0.1"


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _local_index(device: str) -> int | None:
    """Number of a GPU in this process, by its UUID; ``None`` if this process does not see it."""
    import torch

    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == device:
            return index
    return None


def _synchronise(device: Any) -> None:
    import torch

    torch.cuda.current_stream(device).synchronize()
