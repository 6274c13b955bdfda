"""What the parts of the state machine share: queues, totals, replies and other effects."""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from rlinf_plugins.core.clock import Clock
from rlinf_plugins.scheduler.channel.alarms import Alarms
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.model import Consumer, Group, Item, Payload, Producer
from rlinf_plugins.scheduler.channel.queue import KeyQueue

Log = Callable[[tuple[Any, ...]], None]
"""Takes one record of the journal."""

_REPORTS = 10_000
_REMEMBERED = 4096
_LOGGED = ("stuck", "consumer-lost", "producer-lost", "group-short", "dead-letter")


class Report(NamedTuple):
    """Something a user should know although no call failed.

    Attributes:
        kind: ``stale``, ``dead-letter``, ``member-failed``, ``group-short``, ``consumer-lost``, ``producer-lost``
            or ``stuck``.
        text: What happened, to whom and why.
        identity: Producer, epoch and sequence number of the item it is about, if it is about one.
    """

    kind: str
    text: str
    identity: tuple[str, int, int] | None = None


class State:
    """The channel's data, without behaviour of its own beyond bookkeeping.

    Attributes:
        items: Items held: admitted and not committed.
        bytes: Bytes they take.
        leased: Items on lease.
        replies: Effects: answers to requests, by ticket; an exception is an answer.
        released: Effects: payloads nobody needs any more.
        reports: Effects: what users should know.
        unlogged: Effects: those of them that deserve a line in the log.
        version: Current weight version.
        closed: Why nothing more can be put; empty while the channel is open.
        committed: Deliveries that were committed, the latest few.
        counts: Totals since the start.
    """

    def __init__(self, name: str, config: ChannelConfig, clock: Clock, log: Log | None, incarnation: int) -> None:
        self.name = name
        self.config = config
        self.clock = clock
        self.log = log
        self.granularity = config.granularity
        self.alarms = Alarms()
        self.queues: dict[Hashable, KeyQueue] = {}
        self.producers: dict[int, Producer] = {}
        self.consumers: dict[int, Consumer] = {}
        self.items = 0
        self.bytes = 0
        self.leased = 0
        self.version: int | None = None
        self.closed = ""
        self.replies: list[tuple[int, Any]] = []
        self.released: list[Payload] = []
        self.reports: deque[Report] = deque(maxlen=_REPORTS)
        self.unlogged: deque[Report] = deque(maxlen=_REPORTS)
        self.dead_letters: deque[Item] = deque()
        self.committed: dict[int, None] = {}
        self.counts: Counter[str] = Counter()
        # Numbers of a broker's earlier life must not mean anything in the present one.
        self._last_number = incarnation << 40
        self._last_order = 0

    def number(self) -> int:
        """A number for a member or delivery that no earlier one had, restarts included."""
        self._last_number += 1
        return self._last_number

    def order(self, at_least: int = 0) -> int:
        """The next position in the order of admission."""
        self._last_order = max(self._last_order + 1, at_least)
        return self._last_order

    def queue(self, key: Hashable) -> KeyQueue:
        """The queue of ``key``, made if there is none."""
        found = self.queues.get(key)
        if found is None:
            found = self.queues[key] = KeyQueue(key, self.granularity)
        return found

    def reclaim(self, queue: KeyQueue) -> None:
        """Forget ``queue`` if it holds nothing."""
        if queue.idle and self.queues.get(queue.key) is queue:
            del self.queues[queue.key]

    def reply(self, ticket: int, answer: Any) -> None:
        """Answer the request with this ticket."""
        self.replies.append((ticket, answer))

    def report(self, kind: str, text: str, item: Item | None = None) -> None:
        """Record something users should know."""
        self.counts[kind] += 1
        found = Report(kind, text, None if item is None else item.identity)
        self.reports.append(found)
        if kind in _LOGGED:
            self.unlogged.append(found)

    def remember(self, delivery: int) -> None:
        """A delivery was committed; repeated acknowledgements of the latest few are no mistake."""
        self.committed[delivery] = None
        if self.log is not None:
            self.log(("acked", delivery))
        if len(self.committed) > _REMEMBERED:
            del self.committed[next(iter(self.committed))]

    def forget(self, item: Item) -> None:
        """An item is committed: its payload is released and the journal told."""
        self.items -= 1
        self.bytes -= item.nbytes
        self.released.append(item.payload)
        if self.log is not None:
            self.log(("gone", item.order))

    def forget_failures(self, group: Group) -> None:
        """A group is done with: so are the members that never came."""
        if self.log is not None:
            for failure in group.failed:
                self.log(("gone", failure.order))
