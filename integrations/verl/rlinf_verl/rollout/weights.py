"""Weights on their way from a trainer to a rollout model: buckets of bytes, written in place.

Writing in place keeps every pointer (tied embeddings, compiled graphs, optimizers of nobody) and needs no second
copy of the model. The price is that a sync that stops half-way leaves a mixed model, so a model counts as loaded only
between a finished sync and the start of the next one.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlinf_plugins.core.config import suggest
from rlinf_plugins.core.errors import WeightsNotLoadedError, WeightSyncError

_ALIGN = 16
"""Bytes; every dtype's view needs an offset that its size divides."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tensor's elements inside a bucket.

    Attributes:
        name: Key in the model's state dict.
        dtype: Name of the torch dtype, e.g. ``"bfloat16"``.
        shape: Shape of the whole tensor.
        start: First element of this piece in the flattened tensor.
        count: Number of elements.
        offset: Byte offset in the bucket.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces and the bytes they index (uint8, one dimension; travels through the object store without a copy)."""

    pieces: tuple[Piece, ...]
    data: np.ndarray


class BucketPacker:
    """Cuts named tensors into buckets of at most ``bucket_bytes``; a larger tensor spans several.

    Args:
        bucket_bytes: Upper bound of a bucket, > 0.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._size = max(_ALIGN, bucket_bytes // _ALIGN * _ALIGN)
        self._pieces: list[Piece] = []
        self._parts: list[torch.Tensor] = []
        self._used = 0

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Bucket]:
        """Take a tensor (any device and layout) and yield the buckets that are full."""
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        start = 0
        while start < flat.numel():
            room = (self._size - self._used) // flat.itemsize
            if room == 0:
                yield self._flush()
                continue
            part = flat[start : start + room]
            dtype = str(flat.dtype).removeprefix("torch.")
            self._pieces.append(Piece(name, dtype, tuple(tensor.shape), start, part.numel(), self._used))
            self._parts.append(part.view(torch.uint8))
            self._used += -(-part.nbytes // _ALIGN) * _ALIGN
            start += part.numel()

    def rest(self) -> Iterator[Bucket]:
        """Yield what is left, if anything."""
        if self._pieces:
            yield self._flush()

    def _flush(self) -> Bucket:
        data = np.empty(self._used, dtype=np.uint8)
        for piece, part in zip(self._pieces, self._parts, strict=True):
            data[piece.offset : piece.offset + part.numel()] = part.numpy()
        bucket = Bucket(tuple(self._pieces), data)
        self._pieces, self._parts, self._used = [], [], 0
        return bucket


async def pack(weights: AsyncIterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> AsyncIterator[Bucket]:
    """Drain ``weights`` into buckets."""
    packer = BucketPacker(bucket_bytes)
    async for name, tensor in weights:
        for bucket in packer.add(name, tensor):
            yield bucket
    for bucket in packer.rest():
        yield bucket


class ResidentWeights:
    """The weights of a model that is served, their version, and whether they may be used.

    Args:
        model: The model; its state dict is what a sync must cover.
        loaded: Whether the weights it has now are meant to be used (read from a checkpoint, not random).
        droppable: Names (prefixes) a trainer may send that the model does not have; ignored.
    """

    def __init__(self, model: torch.nn.Module, *, loaded: bool, droppable: Iterable[str] = ()) -> None:
        self._model = model
        self._droppable = tuple(droppable)
        self._state = "loaded" if loaded else "never synced"
        self._received: dict[str, int] = {}
        self.version: int | None = None

    def require(self) -> None:
        """Raise unless the weights are whole.

        Raises:
            WeightsNotLoadedError: No sync has finished yet, the last one broke off, or they were released.
        """
        if self._state != "loaded":
            raise WeightsNotLoadedError(
                f"the rollout model has no usable weights ({self._state}): it was built without a checkpoint or they "
                "were released, and no weight sync has finished since; sync before generating, or load the checkpoint "
                "with rollout.load_format=auto"
            )

    def begin(self) -> None:
        """Start a sync: from here to ``commit`` the weights are mixed."""
        self._state, self._received = "a sync began and did not finish", {}

    @torch.no_grad()
    def write(self, bucket: Bucket) -> None:
        """Copy a bucket into the model, casting to the model's dtype.

        Raises:
            WeightSyncError: A name or shape the model does not have.
        """
        targets = self._model.state_dict()
        for piece in bucket.pieces:
            if piece.name.startswith(self._droppable) and piece.name not in targets:
                continue
            target = self._target(targets, piece)
            dtype = getattr(torch, piece.dtype)
            data = bucket.data[piece.offset : piece.offset + piece.count * dtype.itemsize]
            if not data.flags.writeable:  # out of the object store; torch insists on memory it could write to
                data = data.copy()
            target.view(-1)[piece.start : piece.start + piece.count] = torch.from_numpy(data).view(dtype)
            self._received[piece.name] = self._received.get(piece.name, 0) + piece.count

    def commit(self, version: int | None) -> None:
        """End a sync.

        Raises:
            WeightSyncError: Part of the model got no weights; the missing names are listed.
        """
        missing = self._missing()
        if missing:
            some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(f"the weight sync ended without {some}; the model is not usable until a whole sync")
        self._state, self.version = "loaded", version

    def release(self) -> None:
        """Free the memory of the parameters; they must be synced again before use. Buffers stay."""
        for parameter in self._model.parameters():
            if not parameter.untyped_storage().resizable():  # mapped from a checkpoint's file
                parameter.data = torch.empty_like(parameter.data)
            parameter.untyped_storage().resize_(0)
        self._state = "released"

    def restore(self) -> None:
        """Give released parameters their memory back, with undefined content."""
        for parameter in self._model.parameters():
            storage = parameter.untyped_storage()
            if storage.size() == 0:
                storage.resize_(parameter.numel() * parameter.itemsize)

    @staticmethod
    def _target(targets: dict[str, torch.Tensor], piece: Piece) -> torch.Tensor:
        if piece.name not in targets:
            raise WeightSyncError(f"the rollout model has no weight {piece.name!r}; {suggest(piece.name, targets)}")
        target = targets[piece.name]
        if tuple(target.shape) != piece.shape:
            raise WeightSyncError(
                f"weight {piece.name!r} has shape {piece.shape} in training and {tuple(target.shape)} in rollout: "
                "the two were built from different configurations"
            )
        return target

    def _missing(self) -> list[str]:
        """Names none of whose aliases (tied weights share memory) was received in full."""
        targets = self._model.state_dict()
        covered = {t.data_ptr() for n, t in targets.items() if self._received.get(n, 0) >= t.numel()}
        return [n for n, t in targets.items() if t.data_ptr() not in covered and t.numel()]
