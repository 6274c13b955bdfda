"""The producer's client: numbers items, packs them, and has them admitted exactly once."""

import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from rlinf_plugins.core.errors import ItemTooLargeError, StaleProducerError, UnknownMemberError
from rlinf_plugins.scheduler.channel.failpoints import hit
from rlinf_plugins.scheduler.channel.heart import Heart
from rlinf_plugins.scheduler.channel.link import Link, Steps, drive, drive_async
from rlinf_plugins.scheduler.channel.payload import Packer
from rlinf_plugins.scheduler.channel.wire import Attached, Row

DEFAULT_KEY = "default"


class Put(NamedTuple):
    """One item for :meth:`Producer.put_many`.

    Attributes:
        value: Any Python object; tensors and arrays inside travel without being pickled.
        key: Queue of the channel it belongs to.
        weight: What it counts for in weighted batches and balancing, e.g. its tokens.
        version: Weight version it was made with.
        group: Name and size of the group it is a member of.
    """

    value: Any
    key: Hashable = DEFAULT_KEY
    weight: int = 1
    version: int | None = None
    group: tuple[str, int] | None = None


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

    def finish(self) -> None:
        """Say that nothing more will come; see ``ChannelConfig.producers``."""
        drive(self._simple("finish"))

    def detach(self) -> None:
        """Finish, and stop being attached."""
        if self._heart is not None:
            self._heart.remove(self.attached.handle)
        drive(self._simple("detach"))

    def pack(self, items: Iterable[Put]) -> list[Row]:
        """Rows to send; large items are written to shared memory here.

        Raises:
            ItemTooLargeError: One can never fit; nothing was written for those after it.
        """
        rows: list[Row] = []
        limit = self.attached.config.max_bytes
        for item in items:
            payload, size = self.packer.pack(item.value)
            if size > limit:
                raise ItemTooLargeError(
                    f"an item of {size} bytes can never fit channel {self._link.name!r} of max_bytes={limit}: "
                    "raise the bound or split the item"
                )
            rows.append((item.key, payload, item.weight, size, item.version, item.group, None))
        return rows

    def _put(self, items: Sequence[Put], timeout: float | None) -> Steps[None]:
        rows = self.pack(items)
        hit("producer.packed")
        yield from self._send(rows, timeout)

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
        self.packer = Packer(
            attached.directory if here else None,
            str(attached.handle),
            config.inline_bytes,
            config.transport,
            config.journal is not None and config.journal.sync == "disk",
        )
        self._heart = self._heart or Heart(self._link, config.lease_seconds)
        self._heart.add(attached.handle)

    def _simple(self, operation: str) -> Steps[None]:
        yield self._link.submit(operation, (self.attached.handle,)), None
