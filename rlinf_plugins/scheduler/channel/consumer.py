"""The consumer's client: batches on lease, acknowledged when they have been dealt with."""

import itertools
import threading
from collections.abc import AsyncIterator, Hashable, Iterator
from types import TracebackType
from typing import Any

from rlinf_plugins.core.errors import EndOfStreamError, StaleDeliveryError, UndecodableItemError, UnknownMemberError
from rlinf_plugins.scheduler.channel.failpoints import hit
from rlinf_plugins.scheduler.channel.heart import Heart
from rlinf_plugins.scheduler.channel.link import Link, Reply, Steps, drive, drive_async
from rlinf_plugins.scheduler.channel.payload import Segment, Unpacker
from rlinf_plugins.scheduler.channel.producer import DEFAULT_KEY
from rlinf_plugins.scheduler.channel.wire import Attached, BatchRow, GroupRow, ItemRow


class Delivery:
    """Items on lease. Acknowledge them when their effect is safe; what is not acknowledged comes again, to somebody.

    As a context manager it is acknowledged at the end of the block, or handed back if the block raises.

    Attributes:
        items: Who made each item, with which weights, how often it was delivered.
        values: The items themselves, in the same order.
        groups: The groups, where they are kept whole; ``None`` otherwise.
        step: Optimiser step the items count towards; ``None`` without a step size.
        ends_step: The last items of the step: time for the optimiser.
        stale: Items that were passed over because their weights were too old.
    """

    def __init__(self, consumer: "Consumer", row: BatchRow, values: list[Any]) -> None:
        self._consumer = consumer
        self.number = row.number
        self.items = [ItemRow(*item) for item in row.items]
        self.values = values
        self.groups: list[GroupRow] | None = row.groups
        self.step = row.step
        self.ends_step = row.ends_step
        self.stale = [ItemRow(*item, None) for item in row.stale]

    @property
    def value(self) -> Any:
        """The only item's value; for deliveries of one."""
        (value,) = self.values
        return value

    def ack(self) -> None:
        """Commit the items.

        Raises:
            StaleDeliveryError: The lease had ended; whatever was done with the items must be undone or ignored.
        """
        self._consumer.ack(self)

    async def ack_async(self) -> None:
        """As :meth:`ack`, without blocking the loop."""
        await self._consumer.ack_async(self)

    def nack(self) -> None:
        """Hand the items back at once."""
        self._consumer.nack(self)

    def __enter__(self) -> "Delivery":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.ack()
        else:
            self.nack()


class Consumer:
    """Gets batches from a channel; safe to use from several threads. Obtained from :meth:`Channel.consumer`."""

    def __init__(self, link: Link, name: str, group: str, node: str, share: float) -> None:
        self.name = name
        self._link = link
        self._identity = (name, group, node, share)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._heart: Heart | None = None
        self._accept(drive(self._attach()))

    def get(
        self, *, key: Hashable = DEFAULT_KEY, timeout: float | None = None, max_staleness: int | None = None
    ) -> Delivery:
        """Get one item, or one whole group where groups are kept whole; see :meth:`get_batch`."""
        return drive(self._get(key, 1, None, True, timeout, max_staleness, None))

    async def get_async(
        self, *, key: Hashable = DEFAULT_KEY, timeout: float | None = None, max_staleness: int | None = None
    ) -> Delivery:
        """As :meth:`get`, without blocking the loop; a cancelled get takes nothing."""
        return await drive_async(self._get(key, 1, None, True, timeout, max_staleness, None))

    def get_batch(
        self,
        limit: int | None = None,
        weight: int | None = None,
        *,
        fill: bool = True,
        key: Hashable = DEFAULT_KEY,
        timeout: float | None = None,
        max_staleness: int | None = None,
        hold: float | None = None,
    ) -> Delivery:
        """Get a batch; without limits, of the granularity the plan has set for the channel.

        Args:
            limit: Items at most.
            weight: Weight at most; a single heavier item is a batch of its own.
            fill: Wait until the batch is full; otherwise take what is ready, at least one item.
            key: Queue to take from.
            timeout: Seconds to wait; ``None``: as long as it takes.
            max_staleness: Oldest weight version, counted back from the current one; ``None``: as configured.
            hold: Seconds after which the lease ends although this process lives; ``None``: never.

        Raises:
            EndOfStreamError: The channel was closed and is empty.
            ChannelTimeoutError: There was no batch in time; the message says why.
            BatchTooLargeError: Such a batch can never fill.
            UndecodableItemError: An item cannot be rebuilt here; the batch was handed back.
        """
        return drive(self._get(key, limit, weight, fill, timeout, max_staleness, hold))

    async def get_batch_async(
        self,
        limit: int | None = None,
        weight: int | None = None,
        *,
        fill: bool = True,
        key: Hashable = DEFAULT_KEY,
        timeout: float | None = None,
        max_staleness: int | None = None,
        hold: float | None = None,
    ) -> Delivery:
        """As :meth:`get_batch`, without blocking the loop; a cancelled get takes nothing."""
        return await drive_async(self._get(key, limit, weight, fill, timeout, max_staleness, hold))

    def ack(self, *deliveries: Delivery) -> None:
        """Commit deliveries with one request.

        Raises:
            StaleDeliveryError: Some lease had ended; the others are committed.
        """
        drive(self._ack(deliveries))

    async def ack_async(self, *deliveries: Delivery) -> None:
        """As :meth:`ack`, without blocking the loop."""
        await drive_async(self._ack(deliveries))

    def nack(self, delivery: Delivery) -> None:
        """Hand a delivery back at once; nothing happens if its lease has ended."""
        drive(self._call("nack", (self.attached.handle, delivery.number)))

    def __iter__(self) -> Iterator[Delivery]:
        """Batches as the plan says, until the end of the stream; each is acknowledged when the next is asked for."""
        before: list[Delivery] = []
        while True:
            try:
                delivery = drive(self._get(DEFAULT_KEY, None, None, True, None, None, None, before))
            except EndOfStreamError:
                return
            yield delivery
            before = [delivery]

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        """As iterating, without blocking the loop."""
        before: list[Delivery] = []
        while True:
            try:
                delivery = await drive_async(self._get(DEFAULT_KEY, None, None, True, None, None, None, before))
            except EndOfStreamError:
                return
            yield delivery
            before = [delivery]

    def detach(self) -> None:
        """Leave; what was not acknowledged goes to others at once."""
        if self._heart is not None:
            self._heart.remove(self.attached.handle)
        drive(self._call("detach", (self.attached.handle,)))

    def _get(
        self,
        key: Hashable,
        limit: int | None,
        weight: int | None,
        fill: bool,
        timeout: float | None,
        max_staleness: int | None,
        hold: float | None,
        done: "list[Delivery] | tuple[()]" = (),
    ) -> Steps[Delivery]:
        acks = [(delivery.number, None) for delivery in done]
        while True:
            number = next(self._numbers)
            handle = self.attached.handle
            request = (key, number, limit, weight, fill, max_staleness, hold)
            reply = self._link.submit("get", (handle, acks, request, timeout))
            try:
                refused, answer = yield reply, timeout
            except BaseException:
                # Whoever called has gone: a batch that is on its way must not wait for an acknowledgement for ever.
                self._link.submit("cancel", (handle, number))
                raise
            if refused:
                if not isinstance(answer, Exception):
                    self._link.submit("cancel", (handle, number))
                raise _stale(self._link.name, refused)
            if isinstance(answer, UnknownMemberError):
                acks = []
                yield from self._reattach(handle)
                continue
            if isinstance(answer, Exception):
                raise answer
            hit("consumer.received")
            return (yield from self._unpack(handle, BatchRow(*answer)))

    def _unpack(self, handle: int, row: BatchRow) -> Steps[Delivery]:
        values = []
        try:
            for item in row.items:
                wire = item[-1]
                buffers = None
                if isinstance(wire, Segment) and not self._here:
                    buffers = yield self._link.submit("read", (wire,)), None
                values.append(self._unpacker.unpack(wire, buffers))
        except (UndecodableItemError, OSError):
            self._link.submit("nack", (handle, row.number))
            raise
        hit("consumer.unpacked")
        return Delivery(self, row, values)

    def _ack(self, deliveries: tuple[Delivery, ...]) -> Steps[None]:
        reply: Reply = self._link.submit("ack", (self.attached.handle, [(d.number, None) for d in deliveries]))
        refused = yield reply, None
        if refused:
            raise _stale(self._link.name, refused)

    def _reattach(self, handle: int) -> Steps[None]:
        """Attach anew after the lease had ended or the broker was restarted, unless another thread has done so."""
        if self.attached.handle != handle:
            return
        attached = yield from self._attach()
        if self._heart is not None:
            self._heart.remove(handle)
        self._accept(attached)

    def _attach(self) -> Steps[Attached]:
        attached: Attached = yield self._link.submit("attach_consumer", self._identity), None
        return attached

    def _accept(self, attached: Attached) -> None:
        self.attached = attached
        self._here = self._identity[2] == self._link.node
        self._unpacker = Unpacker(attached.directory)
        self._heart = self._heart or Heart(self._link, attached.config.lease_seconds)
        self._heart.add(attached.handle)

    def _call(self, operation: str, arguments: tuple[Any, ...]) -> Steps[Any]:
        answer = yield self._link.submit(operation, arguments), None
        return answer


def _stale(channel: str, refused: dict[int, str]) -> StaleDeliveryError:
    reasons = "; ".join(f"delivery {number}: {reason}" for number, reason in refused.items())
    return StaleDeliveryError(f"channel {channel!r} refused an acknowledgement: {reasons}")
