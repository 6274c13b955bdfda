"""A call's ends of the channels: batches in, items out, a span for each piece of work, the devices in between."""

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from rlinf_plugins.core.errors import ChannelTimeoutError, EndOfStreamError, FlowError
from rlinf_plugins.core.spans import SpanRecorder
from rlinf_plugins.scheduler.channel.channel import Channel
from rlinf_plugins.scheduler.channel.consumer import Consumer
from rlinf_plugins.scheduler.channel.delivery import Delivery
from rlinf_plugins.scheduler.channel.producer import Producer
from rlinf_plugins.scheduler.macro.turn import Turn

_BATCHES_A_TURN = 32
"""Batches a worker takes without giving others a chance at its devices, where they are there already."""


class Ports:
    """Connects a worker for the length of one call.

    Args:
        stage: The stage's name.
        member: Name under which it attaches to channels.
        reads: Channels the call reads, by the flow's name.
        writes: Channels it writes.
        turn: The worker's turn on its devices.
    """

    def __init__(
        self, stage: str, member: str, reads: Mapping[str, Channel], writes: Mapping[str, Channel], turn: Turn
    ) -> None:
        self.turn = turn
        self.recorder = SpanRecorder(member)
        self._stage = stage
        self._member = member
        self._channels: dict[str, dict[str, Channel]] = {"reads": dict(reads), "writes": dict(writes)}
        self._consumers: dict[str, Consumer] = {}
        self._producers: dict[str, Producer] = {
            name: channel.producer(member) for name, channel in self._channels["writes"].items()
        }
        self._written: list[set[str]] = []
        self._in_a_row = 0

    def recv(self, channel: str | None, key: Hashable) -> Iterator[list[Any]]:
        """See :meth:`Worker.recv`."""
        name = self._name("reads", channel)
        consumer = self._consumer(name)
        try:
            while (delivery := self._next(consumer, key)) is not None:
                with self.turn.work(), self._working(reads=(name,), items=len(delivery)):
                    yield list(delivery.values)
                consumer.ack(delivery)
        finally:
            self.turn.settle()

    def recv_all(self, channel: str | None, key: Hashable) -> list[Any]:
        """See :meth:`Worker.recv_all`. The devices are not held while it gathers, but from its end on."""
        name = self._name("reads", channel)
        consumer = self._consumer(name)
        self.turn.give()
        found: list[Any] = []
        with contextlib.suppress(EndOfStreamError):
            while True:
                delivery = consumer.get_batch(key=key)
                found += delivery.values
                consumer.ack(delivery)
        self.turn.take()
        with self._working(reads=(name,), barriers=(name,), items=len(found)):
            pass
        return found

    def send(self, value: Any, channel: str | None, **options: Any) -> None:
        """See :meth:`Worker.send`. Where there is no room, others may have the devices while it waits."""
        name = self._name("writes", channel)
        for written in self._written:
            written.add(name)
        producer = self._producers[name]
        if not self._written:
            with self._working(items=1):
                self._written[-1].add(name)
        try:
            producer.put(value, timeout=0.0 if self.turn.held else None, **options)
        except ChannelTimeoutError:
            self.turn.give()
            producer.put(value, **options)
            self.turn.settle()

    def close(self, *, failed: bool) -> None:
        """End the call: hand back what was not acknowledged, say that nothing more will come, give the devices back."""
        self.turn.give()
        for consumer in self._consumers.values():
            consumer.detach()
        for producer in self._producers.values():
            if not failed:
                producer.detach()

    def _next(self, consumer: Consumer, key: Hashable) -> Delivery | None:
        """The next batch; None at the end. The devices are given back for a wait, and now and then without one."""
        self._in_a_row += 1
        try:
            if self.turn.held and self._in_a_row < _BATCHES_A_TURN:
                with contextlib.suppress(ChannelTimeoutError):
                    return consumer.get_batch(key=key, timeout=0.0)
            self.turn.give()
            self._in_a_row = 0
            return consumer.get_batch(key=key)
        except EndOfStreamError:
            return None

    @contextlib.contextmanager
    def _working(self, **attributes: Any) -> Iterator[None]:
        """Record a stage call; what is sent meanwhile is what it writes."""
        self._written.append(set())
        with self.recorder.span(self._stage, stage=self._stage, **attributes) as span:
            try:
                yield
            finally:
                span["writes"] = tuple(sorted(self._written.pop()))

    def _consumer(self, name: str) -> Consumer:
        if name not in self._consumers:
            self._consumers[name] = self._channels["reads"][name].consumer(self._member)
        return self._consumers[name]

    def _name(self, direction: str, channel: str | None) -> str:
        known = self._channels[direction]
        if channel is None and len(known) == 1:
            return next(iter(known))
        if channel is not None and channel in known:
            return channel
        asked = "a channel without saying which" if channel is None else repr(channel)
        raise FlowError(f"{self._member} asks for {asked}; its call {direction} {', '.join(known) or 'none'}")
