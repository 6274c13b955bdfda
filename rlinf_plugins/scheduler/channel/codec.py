"""Python objects as a small head and large buffers, so that the buffers are never copied into a pickle.

Pickle protocol 5 does the nesting; what it does not know is told here: torch tensors (TensorDict included, which is
made of them), nested tensors, and classes that only exist in the sender's ``__main__``.
"""

import io
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any, Protocol

from rlinf_plugins.core.errors import UndecodableItemError, UnserialisableItemError

Buffer = bytes | bytearray | memoryview

_PLAIN = (int, float, str, bytes, bool, type(None))


class Hold(Protocol):
    """Takes parts out of what is encoded."""

    def __call__(self, obj: Any) -> int | None:
        """The number of a part that travels otherwise; ``None`` for any other."""
        ...

    def undo(self) -> None:
        """What was taken is encoded once more, from the start."""
        ...


class _ByValueError(Exception):
    """The object refers to something the receiver cannot import."""


def encode(value: Any, hold: Hold | None = None) -> tuple[bytes, list[memoryview]]:
    """Return the head and the contiguous buffers of ``value``.

    Tensors on the CPU become buffers that share memory with the original until they are written out; tensors on
    other devices are copied to the CPU. Views of one storage arrive as separate tensors.

    Args:
        value: Any Python object.
        hold: Called with every part; a number says that the part travels otherwise, and which of those it is.

    Raises:
        UnserialisableItemError: Some part cannot be pickled.
    """
    if type(value) in _PLAIN:
        return pickle.dumps(value, protocol=5), []
    buffers: list[pickle.PickleBuffer] = []
    try:
        try:
            head = _dump(_Pickler, value, buffers, hold)
        except _ByValueError:
            buffers.clear()
            if hold is not None:
                hold.undo()
            head = _dump(_by_value_pickler(), value, buffers, hold)
    except Exception as error:  # a user's __reduce__ may raise anything
        raise UnserialisableItemError(
            f"an item of type {type(value).__qualname__} cannot be sent to another process: {error}"
        ) from error
    return head, [buffer.raw() for buffer in buffers]


def decode(head: Buffer, buffers: Sequence[Buffer] = (), held: Sequence[Any] = ()) -> Any:
    """Rebuild what :func:`encode` took apart; tensors and arrays share memory with ``buffers``.

    Args:
        head: The head.
        buffers: The buffers.
        held: The parts that travelled otherwise, by number.

    Raises:
        UndecodableItemError: A class cannot be imported here, or its constructor fails.
    """
    try:
        return _Unpickler(head, buffers, held).load() if held else pickle.loads(head, buffers=buffers)
    except Exception as error:  # unpickling runs foreign constructors
        raise UndecodableItemError(f"an item cannot be rebuilt here: {type(error).__name__}: {error}") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, head: Buffer, buffers: Sequence[Buffer], held: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(head), buffers=buffers)
        self._held = held

    def persistent_load(self, number: int) -> Any:
        return self._held[number]


def _dump(pickler: Any, value: Any, buffers: list[pickle.PickleBuffer], hold: Hold | None) -> bytes:
    stream = io.BytesIO()

    def keep(buffer: pickle.PickleBuffer) -> bool:
        buffers.append(buffer)
        return False

    if hold is not None:
        pickler = type("Holding", (pickler,), {"persistent_id": staticmethod(hold.__call__)})
    pickler(stream, protocol=5, buffer_callback=keep).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Plain pickling with tensors out of band."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType):
            if obj.__module__ == "__main__" or "<locals>" in obj.__qualname__ or obj.__qualname__ == "<lambda>":
                raise _ByValueError
            return NotImplemented
        return reduce_tensor(obj)


def _by_value_pickler() -> Any:
    """A pickler that sends classes and functions of ``__main__`` along; slower, hence only where needed."""
    import cloudpickle  # type: ignore[import-untyped]

    class ByValue(cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = reduce_tensor(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return ByValue


def reduce_tensor(obj: Any) -> Any:
    """Reduction of a torch tensor to buffers; ``NotImplemented`` for anything else, as pickle wants it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(obj, torch.Tensor):
        return NotImplemented
    if type(obj) is torch.nn.Parameter:
        return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
    if obj.layout == torch.jagged:
        return _rebuild_jagged, (obj.values().detach(), obj.offsets(), obj.lengths())
    if type(obj) is not torch.Tensor or obj.layout != torch.strided or obj.is_quantized or obj.is_nested:
        return NotImplemented
    dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if dense.numel() == 0:
        return _rebuild_empty, (tuple(dense.shape), dense.dtype)
    flat = dense.view(-1).view(torch.uint8)
    return _rebuild_dense, (pickle.PickleBuffer(flat.numpy()), dense.dtype, tuple(dense.shape), _wants_grad(obj))


def _wants_grad(tensor: Any) -> bool:
    return bool(tensor.requires_grad and tensor.is_leaf)


def _rebuild_dense(buffer: Buffer, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)  # torch cannot mark a tensor as read-only
    tensor = torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _rebuild_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    import torch

    return torch.empty(shape, dtype=dtype)


def _rebuild_jagged(values: Any, offsets: Any, lengths: Any) -> Any:
    import torch

    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
