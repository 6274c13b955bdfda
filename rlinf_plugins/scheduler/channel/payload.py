"""How an item travels: inside the message, as a segment in shared memory, or over Ray to the broker's node.

Segments always live on the broker's node. A producer there writes them itself; one elsewhere hands the buffers to the
broker with the call (Ray moves them), which writes them. A consumer on the broker's node maps them; one elsewhere asks
the broker to read them. So it is decided by where the ends are, and every item has one home.
"""

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlinf_plugins.scheduler.channel import codec, segments
from rlinf_plugins.scheduler.channel.held import Held, Holding

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.shelf import Shelf


class Inline(NamedTuple):
    """Head and buffers inside the message."""

    head: bytes
    buffers: tuple[bytes, ...]


class Relayed(NamedTuple):
    """Head and buffers on their way to the broker, which makes a segment of them."""

    head: bytes
    buffers: tuple[codec.Buffer, ...]


class Segment(NamedTuple):
    """Buffers in a file of the channel's folder; the head is the last buffer if it is not here.

    Attributes:
        name: File name.
        head: Pickle, or ``None`` if it is in the file too.
        layout: Place of each buffer in the file.
    """

    name: str
    head: bytes | None
    layout: segments.Layout


class Shelved(NamedTuple):
    """An item of which some tensors stay with their producer.

    Attributes:
        rest: How the rest of it travels.
        held: The tensors, in the order in which the rest counts them.
    """

    rest: "bytes | Inline | Relayed | Segment"
    held: tuple[Held, ...]


class Rows(NamedTuple):
    """One row of a batch that travelled as a whole.

    Attributes:
        batch: How the batch travels; the same for all its rows.
        row: Which row.
        total: Rows of the batch; its segment is removed after the last.
    """

    batch: "Whole"
    row: int
    total: int


Whole = bytes | Inline | Relayed | Segment | Shelved
Wire = Whole | Rows
"""What a producer sends: plain bytes are a pickle without buffers."""


class Packer:
    """Turns values into what travels.

    Args:
        directory: Folder for segments, ``None`` where the broker's folder cannot be written from here.
        prefix: Makes file names unique; the broker removes leftovers by it.
        inline_bytes: Items up to this size travel inside the message.
        transport: As in :class:`~.config.ChannelConfig`.
        sync: Whether segments must be on disk before the item is put.
        shelf: Where tensors are kept that do not travel; ``None`` for none.
    """

    def __init__(
        self,
        directory: str | None,
        prefix: str,
        inline_bytes: int,
        transport: str,
        sync: bool,
        shelf: "Shelf | None" = None,
    ) -> None:
        self._directory = directory
        self._prefix = prefix
        self._inline = inline_bytes
        self._transport = transport
        self._sync = sync
        self._shelf = shelf
        self._numbers = itertools.count()

    def pack(self, value: Any) -> tuple[Whole, int]:
        """Return what travels for ``value`` and its size in bytes.

        Raises:
            UnserialisableItemError: Some part cannot be pickled.
            ChannelError: Shared memory is full.
        """
        if self._shelf is None:
            return self._pack(*codec.encode(value))
        holding = Holding(self._shelf)
        try:
            rest, size = self._pack(*codec.encode(value, holding))
        except BaseException:
            holding.undo()
            raise
        if not holding.held:
            return rest, size
        return Shelved(rest, tuple(holding.held)), size + sum(held.nbytes for held in holding.held)

    def pack_rows(self, batch: Any) -> tuple[Whole, int]:
        """As :meth:`pack`, for a batch whose rows are items of their own: nothing of it stays here."""
        return self._pack(*codec.encode(batch))

    def discard(self, payload: "Wire") -> None:
        """Forget what was packed and will not be put."""
        segment = segment_of(payload)
        if segment is not None:
            os.unlink(os.path.join(self._directory or "", segment.name))
        if isinstance(payload, Shelved) and self._shelf is not None:
            self._shelf.discard([held.number for held in payload.held])

    def _pack(self, head: bytes, buffers: Sequence[memoryview]) -> tuple[Any, int]:
        size = len(head) + sum(buffer.nbytes for buffer in buffers)
        if size <= self._inline or self._transport == "inline":
            return (Inline(head, tuple(bytes(b) for b in buffers)) if buffers else head), size
        if self._directory is None or self._transport == "relay":
            return Relayed(head, tuple(bytes(b) for b in buffers)), size
        return self.store(head, buffers), size

    def store(self, head: bytes, buffers: Sequence[codec.Buffer]) -> Segment:
        """Write a segment."""
        name = f"{self._prefix}-{next(self._numbers)}"
        inside = len(head) > self._inline
        layout = segments.write(
            os.path.join(self._directory or "", name), [*buffers, head] if inside else buffers, self._sync
        )
        return Segment(name, None if inside else head, layout)


def segment_of(wire: Wire) -> Segment | None:
    """The segment an item lives in, if any."""
    inner = wire.batch if isinstance(wire, Rows) else wire
    inner = inner.rest if isinstance(inner, Shelved) else inner
    return inner if isinstance(inner, Segment) else None


def held_of(wire: Wire) -> tuple[Held, ...]:
    """The tensors of an item that stayed with their producer."""
    return wire.held if isinstance(wire, Shelved) else ()


class Unpacker:
    """Turns what travelled into values.

    Args:
        directory: The broker's folder.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def unpack(self, wire: Wire, buffers: Sequence[codec.Buffer] | None = None, held: Sequence[Any] = ()) -> Any:
        """Rebuild a value, a whole batch for a row of it.

        Arrays and tensors share memory with the segment, copy-on-write.

        Args:
            wire: What travelled.
            buffers: A segment's buffers, where they came over the network.
            held: Tensors that had stayed with the producer.

        Raises:
            UndecodableItemError: It cannot be rebuilt in this process.
            FileNotFoundError: The item was committed by somebody else meanwhile.
        """
        if isinstance(wire, Rows):
            wire = wire.batch
        if isinstance(wire, Shelved):
            wire = wire.rest
        if isinstance(wire, bytes):
            return codec.decode(wire, held=held)
        if not isinstance(wire, Segment):
            return codec.decode(wire.head, [bytearray(buffer) for buffer in wire.buffers], held)
        if buffers is None:
            found = segments.read(os.path.join(self._directory, wire.name), wire.layout)
        else:
            found = [bytearray(buffer) for buffer in buffers]
        head = found.pop() if wire.head is None else wire.head
        return codec.decode(head, found, held)
