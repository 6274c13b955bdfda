"""The producer's client: numbers items, packs them, and has them admitted exactly once."""

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from rlinf_plugins.core.errors import ItemTooLargeError, StaleProducerError, UnknownMemberError
from rlinf_plugins.scheduler.channel.failpoints import hit
from rlinf_plugins.scheduler.channel.heart import Heart
from rlinf_plugins.scheduler.channel.link import Link, Reply, Steps, drive, drive_async
from rlinf_plugins.scheduler.channel.payload import Packer, Rows, Wire
from rlinf_plugins.scheduler.channel.rows import length
from rlinf_plugins.scheduler.channel.shelf import Shelf
from rlinf_plugins.scheduler.channel.stream import Stream
from rlinf_plugins.scheduler.channel.wire import DEFAULT_KEY, Attached, Put, Row, check_key


class Producer:
    """Puts items into a channel; safe to use from several threads.

    Obtained from :meth:`Channel.producer`. A later producer of the same name replaces this one.
    """

    def __init__(self, link: Link, name: str, node: str) -> None:
        self.name = name
        self._link = link
        self._node = node
        self._lock = threading.Lock()
        self._next = 0
        self._heart: Heart | None = None
        self._accept(drive(self._attach(None)))

    def put(
        self,
        value: Any,
        *,
        key: Hashable = DEFAULT_KEY,
        weight: int = 1,
        version: int | None = None,
        group: tuple[str, int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Put one item; returns when the channel has it.

        Args:
            value: Any Python object.
            key: Queue of the channel it belongs to.
            weight: What it counts for in weighted batches and balancing, e.g. its tokens.
            version: Weight version it was made with.
            group: Name and size of the group it is a member of.
            timeout: Seconds to wait for room; ``None``: as long as it takes.

        Raises:
            ChannelClosedError: The channel was closed.
            ChannelTimeoutError: There was no room in time; the item was not taken.
            ItemTooLargeError: It can never fit.
            UnserialisableItemError: It cannot be pickled.
            StaleProducerError: Another producer of this name has replaced this one.
        """
        drive(self._put([Put(value, key, weight, version, group)], timeout))

    async def put_async(
        self,
        value: Any,
        *,
        key: Hashable = DEFAULT_KEY,
        weight: int = 1,
        version: int | None = None,
        group: tuple[str, int] | None = None,
        timeout: float | None = None,
    ) -> None:
        """As :meth:`put`, without blocking the loop."""
        await drive_async(self._put([Put(value, key, weight, version, group)], timeout))

    def put_many(self, items: Iterable[Put], *, timeout: float | None = None) -> None:
        """Put several items with one request, in order. On a time-out those that had found room stay in the channel."""
        drive(self._put(list(items), timeout))

    async def put_many_async(self, items: Iterable[Put], *, timeout: float | None = None) -> None:
        """As :meth:`put_many`, without blocking the loop."""
        await drive_async(self._put(list(items), timeout))

    def fail(self, group: tuple[str, int], reason: str, *, key: Hashable = DEFAULT_KEY) -> None:
        """Say that a member of a group will never come, so that the group is delivered without it.

        Args:
            group: Name and size of the group.
            reason: What consumers are told.
            key: Queue of the group.
        """
        drive(self._send([(key, b"", 0, 0, None, group, reason)], None))

    async def fail_async(self, group: tuple[str, int], reason: str, *, key: Hashable = DEFAULT_KEY) -> None:
        """As :meth:`fail`, without blocking the loop."""
        await drive_async(self._send([(key, b"", 0, 0, None, group, reason)], None))

    def put_rows(
        self,
        batch: Any,
        *,
        key: Hashable = DEFAULT_KEY,
        weights: Sequence[int] | None = None,
        version: int | None = None,
        groups: Sequence[tuple[str, int]] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Put a batch so that each of its rows is an item; it travels, and is stored, as one.

        Args:
            batch: A TensorDict, or a mapping of columns (tensors, arrays or lists) of one length.
            key: Queue of the channel it belongs to.
            weights: Weight of each row; 1 by default.
            version: Weight version the rows were made with.
            groups: Group of each row, as in :meth:`put`.
            timeout: Seconds to wait for room; ``None``: as long as it takes.

        Raises:
            ValueError: Columns, weights or groups differ in length.
        """
        drive(self._put_rows(batch, key, weights, version, groups, timeout))

    async def put_rows_async(
        self,
        batch: Any,
        *,
        key: Hashable = DEFAULT_KEY,
        weights: Sequence[int] | None = None,
        version: int | None = None,
        groups: Sequence[tuple[str, int]] | None = None,
        timeout: float | None = None,
    ) -> None:
        """As :meth:`put_rows`, without blocking the loop."""
        await drive_async(self._put_rows(batch, key, weights, version, groups, timeout))

    def stream(self, window: int = 1024, window_bytes: int = 256 << 20) -> Stream:
        """Put without waiting for each item; several requests become one where the channel is slower.

        Args:
            window: Items that may be unconfirmed before a put waits.
            window_bytes: Bytes that may be unconfirmed before it waits.
        """
        return Stream(self, window, window_bytes)

    def finish(self) -> None:
        """Say that nothing more will come; see ``ChannelConfig.producers``."""
        drive(self._simple("finish"))

    def detach(self) -> None:
        """Finish, and stop being attached; with tensors that stay here (``direct``), once all were taken."""
        if self._shelf is not None:
            self._shelf.wait_empty()
        if self._heart is not None:
            self._heart.remove(self.attached.handle)
        drive(self._simple("detach"))

    @property
    def channel(self) -> str:
        """Name of the channel."""
        return self._link.name

    def submit(self, rows: list[Row], base: int | None = None) -> tuple[int, Reply]:
        """Send packed rows without waiting; for streams.

        Args:
            rows: What :meth:`pack` returned.
            base: Number of the first where the rows were sent before.

        Returns:
            The number of the first row, and the reply to wait for.
        """
        with self._lock:
            if base is None or base > self._next:
                base = self._next
            self._next = max(self._next, base + len(rows))
            return base, self._link.submit("put", (self.attached.handle, base, rows, None))

    def resume(self) -> None:
        """Attach anew to a broker that was restarted, and go on from what it knows."""
        drive(self._resume(self.attached.epoch))
        with self._lock:
            self._next = self.attached.claimed

    def pack(self, items: Iterable[Put]) -> list[Row]:
        """Rows to send; large items are written to shared memory here.

        Raises:
            ItemTooLargeError: One can never fit; nothing was written for those after it.
        """
        rows: list[Row] = []
        for value, key, weight, version, group in items:
            check_key(key)
            payload, size = self.packer.pack(value)
            self._check_size(size, payload)
            rows.append((key, payload, weight, size, version, group, None))
        return rows

    def _put(self, items: Sequence[Put], timeout: float | None) -> Steps[None]:
        rows = self.pack(items)
        hit("producer.packed")
        yield from self._send(rows, timeout)

    def _put_rows(
        self,
        batch: Any,
        key: Hashable,
        weights: Sequence[int] | None,
        version: int | None,
        groups: Sequence[tuple[str, int]] | None,
        timeout: float | None,
    ) -> Steps[None]:
        count = length(batch)
        for name, given in (("weights", weights), ("groups", groups)):
            if given is not None and len(given) != count:
                raise ValueError(f"{len(given)} {name} for a batch of {count} rows")
        if count == 0:
            return
        check_key(key)
        payload, size = self.packer.pack_rows(batch)
        share = -(-size // count)
        self._check_size(share, payload)
        rows: list[Row] = [
            (
                key,
                Rows(payload, index, count),
                1 if weights is None else weights[index],
                share,
                version,
                None if groups is None else groups[index],
                None,
            )
            for index in range(count)
        ]
        yield from self._send(rows, timeout)

    def _check_size(self, size: int, payload: Wire) -> None:
        limit = self.attached.config.max_bytes
        if size > limit:
            self.packer.discard(payload)
            raise ItemTooLargeError(
                f"an item of {size} bytes can never fit channel {self._link.name!r} of max_bytes={limit}: "
                "raise the bound or split the item"
            )

    def _send(self, rows: list[Row], timeout: float | None) -> Steps[None]:
        with self._lock:
            base, self._next = self._next, self._next + len(rows)
            epoch = self.attached.epoch
            reply = self._link.submit("put", (self.attached.handle, base, rows, timeout))
        hit("producer.sent")
        while True:
            try:
                yield reply, timeout
                return
            except UnknownMemberError:
                yield from self._resume(epoch)
                with self._lock:
                    # What the restarted broker does not remember was never admitted; numbers go on from what it does.
                    base = min(base, self.attached.claimed)
                    self._next = max(base + len(rows), self.attached.claimed)
                reply = self._link.submit("put", (self.attached.handle, base, rows, timeout))

    def _resume(self, epoch: int) -> Steps[None]:
        """Attach anew to a broker that was restarted.

        Raises:
            StaleProducerError: The name belongs to a newer producer now.
        """
        before = self.attached
        attached = yield from self._attach(epoch)
        if attached.epoch != epoch:
            raise StaleProducerError(
                f"producer {self.name!r} of channel {self._link.name!r} was replaced, or the broker lost its state"
            )
        if self._heart is not None:
            self._heart.remove(before.handle)
        self._accept(attached)

    def _attach(self, resume: int | None) -> Steps[Attached]:
        attached: Attached = yield self._link.submit("attach_producer", (self.name, self._node, resume)), None
        return attached

    def _accept(self, attached: Attached) -> None:
        self.attached = attached
        config = attached.config
        here = self._node == self._link.node
        self._shelf = Shelf(self._link, attached.handle, self._node, config.direct) if config.direct else None
        self.packer = Packer(
            attached.directory if here else None,
            str(attached.handle),
            config.inline_bytes,
            config.transport,
            config.journal is not None and config.journal.sync == "disk",
            self._shelf,
        )
        self._heart = self._heart or Heart(self._link, config.lease_seconds)
        self._heart.add(attached.handle)

    def _simple(self, operation: str) -> Steps[None]:
        yield self._link.submit(operation, (self.attached.handle,)), None
