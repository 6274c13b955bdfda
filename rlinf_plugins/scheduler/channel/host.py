"""Hosts one channel on an asyncio loop: requests in, answers out, a timer for what is due."""

import asyncio
import itertools
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from typing import Any

from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import ChannelClosedError, ItemLostError, UnknownMemberError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.channel import segments, wire
from rlinf_plugins.scheduler.channel.config import ChannelConfig, Granularity
from rlinf_plugins.scheduler.channel.core import ChannelCore
from rlinf_plugins.scheduler.channel.errands import Errands
from rlinf_plugins.scheduler.channel.failpoints import hit
from rlinf_plugins.scheduler.channel.files import Files
from rlinf_plugins.scheduler.channel.journal import Journal
from rlinf_plugins.scheduler.channel.model import Entry, Request
from rlinf_plugins.scheduler.channel.outlet import Batch
from rlinf_plugins.scheduler.channel.payload import Relayed, Rows, Segment, Shelved, held_of
from rlinf_plugins.scheduler.channel.recovery import held_items

logger = logging.getLogger(__name__)

Operation = Callable[..., Any]

_TRACED = 100_000
"""Calls remembered between two looks at the spans; the oldest are forgotten first."""


class Host:
    """Runs a :class:`~.core.ChannelCore`; all methods belong to one event loop.

    Args:
        name: Name of the channel.
        config: Options.
    """

    def __init__(self, name: str, config: ChannelConfig) -> None:
        self.name = name
        self.config = config
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._journal = None if config.journal is None else Journal(config.journal)
        log = None if self._journal is None else self._journal.append
        incarnation = 0 if self._journal is None else self._journal.incarnation
        self._core = ChannelCore(name, config, monotonic, log, incarnation)
        self._directory = segments.make_directory(name) if self._journal is None else self._journal.segments
        self._files = Files(self._directory, config)
        self._errands = Errands()
        if self._journal is not None:
            self._journal.recover(self._core)
            self._files.adopt(item.payload for item in held_items(self._core))
        self._trace: deque[tuple[str, float, float, int | None]] = deque(maxlen=_TRACED)
        self._operations: dict[str, Operation] = {
            "attach_producer": self._attach_producer,
            "attach_consumer": self._attach_consumer,
            "beat": self._core.beat,
            "detach": self._detach,
            "finish": self._core.finish,
            "close": self._core.close,
            "ack": self._core.ack,
            "nack": self._core.nack,
            "set_aside": self._set_aside,
            "errand_done": self._errands.done,
            "cancel": self._core.cancel,
            "set_version": self._core.set_version,
            "set_granularity": self._set_granularity,
            "peek": self._peek,
            "size": self._core.size,
            "stats": self._stats,
            "diagnose": self._core.diagnose,
            "reports": self._core.reports,
            "dead_letters": self._dead_letters,
            "read": self._read,
            "directory": lambda: self._directory,
            "spans": self._spans,
        }

    async def call(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        """Do one request; an error is returned, not raised, so that it crosses processes as it is."""
        hit("broker.received")
        if not self.config.trace:
            return await self._call(operation, arguments)
        start = monotonic()
        answer = await self._call(operation, arguments)
        self._trace.append((operation, start, monotonic(), _items(operation, arguments, answer)))
        return answer

    async def _call(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        if operation == "put":
            return await self._put(*arguments)
        if operation == "get":
            return await self._get(*arguments)
        if operation == "errands":
            return await self._collect(*arguments)
        if operation == "fetch":
            return await self._fetch(*arguments)
        try:
            answer = self._operations[operation](*arguments)
        except Exception as error:  # the boundary: whatever went wrong is the caller's answer
            answer = error
        self._settle()
        return answer

    def shut_down(self) -> None:
        """Answer whoever waits and remove the channel's files; a journal and its segments stay."""
        for future in self._waiting.values():
            if not future.done():
                future.set_result(ChannelClosedError(f"channel {self.name!r} was destroyed"))
        self._waiting.clear()
        self._errands.keep_only(())
        if self._timer is not None:
            self._timer.cancel()
        if self._journal is None:
            shutil.rmtree(self._directory, ignore_errors=True)
        else:
            self._journal.close()

    async def _put(self, handle: int, base: int, rows: list[wire.Row], timeout: float | None) -> Any:
        entries = [Entry(*row) for row in rows]
        if any(type(entry.payload) is not bytes for entry in entries):
            entries = self._files.land(entries)
        ticket, future = self._expect()
        self._core.put(ticket, handle, base, entries, None if timeout is None else monotonic() + timeout)
        self._settle()
        return await future

    async def _get(
        self, handle: int, acks: list[tuple[int, list[int] | None]], request: tuple[Any, ...], timeout: float | None
    ) -> Any:
        refused = self._core.ack(handle, acks) if acks else {}
        ticket, future = self._expect()
        self._core.get(ticket, handle, Request(*request), None if timeout is None else monotonic() + timeout)
        self._settle()
        return refused, await future

    async def _collect(self, handle: int) -> Any:
        if handle not in self._core.state.producers:
            return UnknownMemberError(f"channel {self.name!r} knows no producer with handle {handle}")
        return await self._errands.collect(handle)

    async def _fetch(self, owner: int, tensor: int, way: str, place: tuple[Any, ...]) -> Any:
        """Have a producer hand a tensor over, for as long as it lives."""
        number, answer = self._errands.ask(owner, tensor, way, place)
        try:
            while not answer.done():
                if self._is_gone(owner):
                    return ItemLostError(
                        f"channel {self.name!r}: the producer that held a tensor of this item is gone; "
                        "the item was set aside"
                    )
                await asyncio.wait([answer], timeout=self.config.lease_seconds / 4)
            return answer.result()
        finally:
            self._errands.give_up(number)

    def _is_gone(self, producer: int) -> bool:
        member = self._core.state.producers.get(producer)
        return member is None or member.lapsed

    def _set_aside(self, handle: int, number: int) -> None:
        self._core.set_aside(
            handle, number, lambda item: any(self._is_gone(held.owner) for held in held_of(item.payload))
        )

    def _expect(self) -> tuple[int, "asyncio.Future[Any]"]:
        ticket = next(self._tickets)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        return ticket, future

    def _settle(self) -> None:
        """Carry out what the state machine asked for: journal first, then answers, then files."""
        state = self._core.state
        hit("broker.applied")
        if self._journal is not None:
            self._journal.commit(self._core)
        hit("broker.journalled")
        if state.replies:
            replies, state.replies = state.replies, []
            for ticket, answer in replies:
                future = self._waiting.pop(ticket, None)
                if future is not None and not future.done():
                    future.set_result(wire.pack_batch(answer) if type(answer) is Batch else answer)
        hit("broker.replied")
        if state.released:
            released, state.released = state.released, []
            for payload in released:
                if type(payload) is not bytes:
                    self._files.release(payload)
                    for held in held_of(payload):
                        self._errands.drop(held.owner, held.number)
        self._name_stuck()
        self._set_timer()

    def _set_timer(self) -> None:
        due = self._core.next_deadline()
        if due == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, due - monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self._core.tick()
        self._settle()

    def _name_stuck(self) -> None:
        unlogged = self._core.state.unlogged
        while unlogged:
            report = unlogged.popleft()
            logger.warning("channel %r, %s: %s", self.name, report.kind, report.text)

    def _attach_producer(self, name: str, node: str, resume: int | None) -> wire.Attached:
        producer = self._core.attach_producer(name, node, resume)
        self._errands.keep_only(self._core.state.producers)
        return self._attached(producer.handle, producer.epoch, producer.claimed)

    def _attach_consumer(self, name: str, group: str, node: str, share: float) -> wire.Attached:
        consumer = self._core.attach_consumer(name, group, node, share)
        return self._attached(consumer.handle, consumer.epoch, 0)

    def _attached(self, handle: int, epoch: int, claimed: int) -> wire.Attached:
        return wire.Attached(handle, epoch, claimed, self._directory, self.config)

    def _detach(self, handle: int) -> None:
        self._core.detach(handle)
        self._errands.keep_only(self._core.state.producers)

    def _set_granularity(self, options: dict[str, Any]) -> None:
        granularity = Granularity(**options)
        granularity.validate("granularity")
        self._core.set_granularity(granularity)

    def _peek(self, key: Any, limit: int) -> list[wire.ItemRow]:
        return [wire.item_row(item) for item in self._core.peek(key, limit)]

    def _spans(self) -> list[Span]:
        """The calls since last asked; made into spans only here, which keeps tracing cheap."""
        actor, calls = f"channel/{self.name}", list(self._trace)
        self._trace.clear()
        return [
            Span(name=name, actor=actor, start=start, end=end, attributes={} if items is None else {"items": items})
            for name, start, end, items in calls
        ]

    def _stats(self) -> dict[str, Any]:
        times = os.times()
        return {**self._core.stats(), "cpu_seconds": times.user + times.system, "pid": os.getpid()}

    def _dead_letters(self) -> list[wire.ItemRow]:
        rows = [wire.item_row(item) for item in self._core.dead_letters()]
        return [row._replace(payload=self._lift(row.payload)) for row in rows]

    def _read(self, segment: Segment) -> list[bytes]:
        path = os.path.join(self._directory, segment.name)
        return [bytes(buffer) for buffer in segments.read(path, segment.layout)]

    def _lift(self, payload: Any) -> Any:
        """A payload that no longer needs its file, which is about to be removed."""
        if isinstance(payload, Rows):
            return payload._replace(batch=self._lift(payload.batch))
        if isinstance(payload, Shelved):
            return payload._replace(rest=self._lift(payload.rest))
        if not isinstance(payload, Segment):
            return payload
        buffers = self._read(payload)
        head = buffers.pop() if payload.head is None else payload.head
        return Relayed(head, tuple(buffers))


def _items(operation: str, arguments: tuple[Any, ...], answer: Any) -> int | None:
    """Items a call moved; ``None`` for calls that move none."""
    if operation == "put":
        return len(arguments[2])
    if operation == "get":
        return len(answer[1][1]) if type(answer[1]) is tuple else 0
    return None
