"""Tensors that stay with their producer until a consumer fetches them: on its GPU, or in its memory on another node.

Only a description of such a tensor goes through the broker. Whoever consumes it chooses the way from where the two ends
are: CUDA IPC on one device, NCCL between devices, gloo where one end has no GPU.
"""

import contextlib
import itertools
import sys
import threading
from typing import Any

from rlinf_plugins.core.errors import ChannelError, ItemLostError
from rlinf_plugins.scheduler.channel.errands import Errand
from rlinf_plugins.scheduler.channel.held import Held
from rlinf_plugins.scheduler.channel.link import Link, drive
from rlinf_plugins.scheduler.channel.peers import IPC, Peers, share


class Shelf:
    """A producer's tensors, each kept until the channel has committed its item.

    Args:
        link: Way to the broker.
        owner: The producer's handle.
        node: Where the producer runs.
        kinds: Device types whose tensors are kept here.
    """

    def __init__(self, link: Link, owner: int, node: str, kinds: tuple[str, ...]) -> None:
        self._link = link
        self._owner = owner
        self._node = node
        self._kinds = kinds
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._tensors: dict[int, tuple[Any, Any]] = {}
        self._peers = Peers()
        self._thread: threading.Thread | None = None

    def wants(self, obj: Any) -> bool:
        """Whether an object is a tensor to be kept."""
        torch = sys.modules.get("torch")
        return (
            torch is not None
            and type(obj) is torch.Tensor
            and obj.device.type in self._kinds
            and obj.layout == torch.strided
            and not obj.is_quantized
            and obj.numel() > 0
        )

    def place(self, tensor: Any) -> Held:
        """Keep a copy, so that the producer may go on changing the original."""
        import torch

        copy = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        device, event = "", None
        if copy.is_cuda:
            device = device_uuid(copy.device.index)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(copy.device))
        wants_grad = bool(tensor.requires_grad and tensor.is_leaf)
        dtype = str(copy.dtype).removeprefix("torch.")
        with self._changed:
            number = next(self._numbers)
            self._tensors[number] = (copy, event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="channel-shelf", daemon=True)
                self._thread.start()
        return Held(self._owner, number, self._node, device, tuple(copy.shape), dtype, copy.nbytes, wants_grad)

    def discard(self, numbers: list[int]) -> None:
        """Let go of tensors."""
        with self._changed:
            for number in numbers:
                self._tensors.pop(number, None)
            self._changed.notify_all()

    def wait_empty(self, timeout: float | None = None) -> bool:
        """Wait until all tensors were taken and committed; ``False`` if they were not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tensors, timeout)

    def __len__(self) -> int:
        return len(self._tensors)

    def _serve(self) -> None:
        while True:
            try:
                errands, drops = drive(_collect(self._link, self._owner))
            except ChannelError:  # the broker is gone, and with it whoever could ask
                return
            self.discard(drops)
            for errand in errands:
                answer = self._answer(Errand(*errand))
                self._link.submit("errand_done", (errand[0], answer))

    def _answer(self, errand: Errand) -> Any:
        with self._changed:
            tensor, event = self._tensors.get(errand.tensor, (None, None))
        if tensor is None:
            return ItemLostError(f"tensor {errand.tensor} is not held any more: its item was committed")
        try:
            if event is not None:
                event.synchronize()
            with torch_device(tensor):
                if errand.way == IPC:
                    return share(tensor)
                self._peers.send(tensor, errand.way, errand.place)
        except Exception as error:  # the boundary: torch and the network raise anything
            return ChannelError(f"handing a tensor over by {errand.way} failed: {type(error).__name__}: {error}")
        return None


def torch_device(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Make a tensor's device this thread's, which NCCL takes its own from."""
    import torch

    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def device_uuid(index: int) -> str:
    """UUID of a GPU of this process."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _collect(link: Link, owner: int) -> Any:
    answer = yield link.submit("errands", (owner,)), None
    return answer
