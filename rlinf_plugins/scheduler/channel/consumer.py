"""The consumer's client: batches on lease, acknowledged when they have been dealt with."""

import itertools
import threading
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator
from typing import Any

from rlinf_plugins.core.errors import EndOfStreamError, ItemLostError, StaleDeliveryError, UnknownMemberError
from rlinf_plugins.scheduler.channel.ahead import Asked, iterate
from rlinf_plugins.scheduler.channel.delivery import Delivery, Place
from rlinf_plugins.scheduler.channel.failpoints import hit
from rlinf_plugins.scheduler.channel.fetch import Fetcher
from rlinf_plugins.scheduler.channel.heart import Heart
from rlinf_plugins.scheduler.channel.link import Link, Reply, Steps, drive, drive_async
from rlinf_plugins.scheduler.channel.model import Request
from rlinf_plugins.scheduler.channel.payload import Rows, Unpacker, Wire, held_of, segment_of
from rlinf_plugins.scheduler.channel.wire import DEFAULT_KEY, Attached, BatchRow


class Consumer:
    """Gets batches from a channel; safe to use from several threads. Obtained from :meth:`Channel.consumer`."""

    def __init__(self, link: Link, name: str, group: str, node: str, share: float) -> None:
        self.name = name
        self._link = link
        self._identity = (name, group, node, share)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._fetcher = Fetcher(link, node)
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
            ItemLostError: An item's producer is gone with its tensors; it was set aside, the others handed back.
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

    def ack_part(self, delivery: Delivery, count: int) -> None:
        """Commit the first ``count`` units of a delivery and hand the others back at once.

        Raises:
            StaleDeliveryError: Its lease had ended.
        """
        parts = list(range(min(count, delivery.units)))
        refused = drive(self._call("ack", (self.attached.handle, [(delivery.number, parts)])))
        if refused:
            raise _stale(self._link.name, refused)
        self.nack(delivery)

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

    def stream(
        self, ahead: int = 64, *, key: Hashable = DEFAULT_KEY, max_staleness: int | None = None
    ) -> Iterator[Any]:
        """Values one by one until the end of the stream, fetched ahead in batches while the caller works.

        A value is acknowledged, with others, after the next was asked for. When the loop is left early, what was not
        looked at goes back.

        Args:
            ahead: Items per request at most; up to twice as many are held.
            key: Queue to take from.
            max_staleness: As in :meth:`get_batch`.
        """
        return iterate(self, ahead, key, max_staleness)

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
        sent = self.ask(Request(key, 0, limit, weight, fill, max_staleness, hold), timeout, done)
        while True:
            try:
                answer = yield sent.reply, timeout
            except BaseException:
                self.withdraw(sent)
                raise
            delivery = yield from self.receive(sent, answer)
            if delivery is not None:
                return delivery
            sent = self.ask(sent.request, timeout)

    def ask(self, request: Request, timeout: float | None, done: Iterable[Delivery] = ()) -> Asked:
        """Send a get without waiting, with acknowledgements on the way."""
        handle = self.attached.handle
        request = request._replace(number=next(self._numbers))
        acks = [(delivery.number, None) for delivery in done]
        return Asked(handle, request, self._link.submit("get", (handle, acks, tuple(request), timeout)))

    def withdraw(self, asked: Asked) -> None:
        """Take a get back: a batch that is on its way must not wait for an acknowledgement for ever."""
        self._link.submit("cancel", (asked.handle, asked.request.number))

    def receive(self, asked: Asked, answer: Any) -> Steps[Delivery | None]:
        """Make a delivery of the answer to a get; ``None`` if it must be asked for again."""
        refused, found = answer
        if refused:
            self.withdraw(asked)
            raise _stale(self._link.name, refused)
        if isinstance(found, UnknownMemberError):
            yield from self._reattach(asked.handle)
            return None
        if isinstance(found, Exception):
            raise found
        hit("consumer.received")
        return (yield from self._unpack(asked.handle, BatchRow(*found)))

    def _unpack(self, handle: int, row: BatchRow) -> Steps[Delivery]:
        parts: list[Any] = []
        batches: dict[Any, Any] = {}
        try:
            for item in row.items:
                wire = item[-1]
                if not isinstance(wire, Rows):
                    parts.append((yield from self._value(wire)))
                    continue
                identity = segment_of(wire) or id(wire.batch)
                if identity not in batches:
                    batches[identity] = yield from self._value(wire)
                parts.append(Place(identity, wire.row, batches[identity]))
        except ItemLostError:
            self._link.submit("set_aside", (handle, row.number))
            raise
        except BaseException:
            self._link.submit("nack", (handle, row.number))
            raise
        hit("consumer.unpacked")
        return Delivery(self, row, parts)

    def _value(self, wire: Wire) -> Steps[Any]:
        buffers, held = None, []
        for tensor in held_of(wire):
            held.append((yield from self._fetcher.fetch(tensor)))
        if not self._here and segment_of(wire) is not None:
            buffers = yield self._link.submit("read", (segment_of(wire),)), None
        return self._unpacker.unpack(wire, buffers, held)

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
