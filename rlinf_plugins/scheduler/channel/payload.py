"""How an item travels: inside the message, as a segment in shared memory, or over Ray to the broker's node.

Segments always live on the broker's node. A producer there writes them itself; one elsewhere hands the buffers to the
broker with the call (Ray moves them), which writes them. A consumer on the broker's node maps them; one elsewhere asks
the broker to read them. So it is decided by where the ends are, and every item has one home.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlinf_plugins.scheduler.channel import codec, segments


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


Whole = bytes | Inline | Relayed | Segment
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
    """

    def __init__(self, directory: str | None, prefix: str, inline_bytes: int, transport: str, sync: bool) -> None:
        self._directory = directory
        self._prefix = prefix
        self._inline = inline_bytes
        self._transport = transport
        self._sync = sync
        self._numbers = itertools.count()

    def pack(self, value: Any) -> tuple[Whole, int]:
        """Return what travels for ``value`` and its size in bytes.

        Raises:
            UnserialisableItemError: Some part cannot be pickled.
            ChannelError: Shared memory is full.
        """
        head, buffers = codec.encode(value)
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
    return inner if isinstance(inner, Segment) else None


class Unpacker:
    """Turns what travelled into values.

    Args:
        directory: The broker's folder.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def unpack(self, wire: Wire, buffers: Sequence[codec.Buffer] | None = None) -> Any:
        """Rebuild a value, a whole batch for a row of it.

        Arrays and tensors share memory with the segment, copy-on-write.

        Args:
            wire: What travelled.
            buffers: A segment's buffers, where they came over the network.

        Raises:
            UndecodableItemError: It cannot be rebuilt in this process.
            FileNotFoundError: The item was committed by somebody else meanwhile.
        """
        if isinstance(wire, Rows):
            wire = wire.batch
        if isinstance(wire, bytes):
            return codec.decode(wire)
        if not isinstance(wire, Segment):
            return codec.decode(wire.head, [bytearray(buffer) for buffer in wire.buffers])
        if buffers is None:
            found = segments.read(os.path.join(self._directory, wire.name), wire.layout)
        else:
            found = [bytearray(buffer) for buffer in buffers]
        head = found.pop() if wire.head is None else wire.head
        return codec.decode(head, found)
