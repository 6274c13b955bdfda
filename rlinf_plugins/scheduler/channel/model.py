"""The nouns of the channel's state machine."""

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.queue import KeyQueue

Payload = Any
"""What the transport put in: bytes for inline items, a descriptor otherwise. The state machine never looks inside."""


class Entry(NamedTuple):
    """One item as a producer hands it in. ``failure`` set: the member of ``group`` that will never come, and why."""

    key: Hashable
    payload: Payload
    weight: int = 1
    nbytes: int = 0
    version: int | None = None
    group: tuple[str, int] | None = None
    failure: str | None = None


class Item:
    """An admitted item; also the unit of delivery where groups are not kept whole.

    Attributes:
        order: Position in the channel's order of admission; unique.
        step: Optimiser step it was first delivered in, ``None`` before.
        attempts: Deliveries so far.
    """

    __slots__ = (
        "attempts",
        "group",
        "key",
        "nbytes",
        "order",
        "payload",
        "producer",
        "seq",
        "step",
        "version",
        "weight",
    )
    count = 1

    def __init__(self, order: int, producer: "Producer", seq: int, entry: Entry, group: "Group | None") -> None:
        self.order = order
        self.producer = producer
        self.seq = seq
        self.key, self.payload, self.weight, self.nbytes, self.version = entry[:5]
        self.group = group
        self.attempts = 0
        self.step: int | None = None

    @property
    def items(self) -> "list[Item]":
        """The unit's items: itself."""
        return [self]

    @property
    def identity(self) -> tuple[str, int, int]:
        """What effectively-once commit is counted by: producer, its epoch, sequence number."""
        return self.producer.name, self.producer.epoch, self.seq


class Failure(NamedTuple):
    """A member of a group that will never come."""

    order: int
    producer: "Producer"
    seq: int
    reason: str


class Group:
    """Items that belong together; a unit of delivery once it is complete or was given up as short.

    Attributes:
        size: Members announced, failed ones included.
        arrived: Members that came or failed.
        items: Members at hand, where groups are kept whole.
        failed: Members that failed.
        contributors: Producers of its members.
        order: Position among the units, set when it becomes one.
        short: Why it was delivered without all members; empty otherwise.
    """

    __slots__ = (
        "arrived",
        "contributors",
        "failed",
        "items",
        "key",
        "name",
        "order",
        "short",
        "since",
        "size",
        "step",
    )

    def __init__(self, name: str, size: int, key: Hashable, since: float) -> None:
        self.name = name
        self.size = size
        self.key = key
        self.since = since
        self.arrived = 0
        self.items: list[Item] = []
        self.failed: list[Failure] = []
        self.contributors: set[Producer] = set()
        self.order = -1
        self.short = ""
        self.step: int | None = None

    @property
    def count(self) -> int:
        """Announced size: what it counts for in a batch or step, whatever became of its members."""
        return self.size

    @property
    def weight(self) -> int:
        """Sum of the members' weights."""
        return sum(item.weight for item in self.items)

    @property
    def version(self) -> int | None:
        """The oldest weight version among the members."""
        return min((item.version for item in self.items if item.version is not None), default=None)


Unit = Item | Group


class Member:
    """A producer or consumer that is attached.

    Attributes:
        handle: Number the member is addressed by; changes with each attachment.
        epoch: How often this name attached before.
        alive_until: Time at which its lease ends if it is not heard of.
        lapsed: Its lease ended; it may come back, what it held may not.
    """

    __slots__ = ("alive_until", "epoch", "handle", "lapsed", "name", "node")

    def __init__(self, handle: int, name: str, epoch: int, node: str) -> None:
        self.handle = handle
        self.name = name
        self.epoch = epoch
        self.node = node
        self.alive_until = 0.0
        self.lapsed = False


class Producer(Member):
    """An attached producer.

    Attributes:
        claimed: Next sequence number expected; what is below was admitted, refused or is in ``pending``.
        refused: Ranges of sequence numbers that were claimed but never admitted, the latest few.
        pending: Requests that wait for room, oldest first.
        early: Requests that overtook earlier ones on the way, by their first sequence number.
    """

    __slots__ = ("claimed", "early", "finished", "pending", "refused")

    def __init__(self, handle: int, name: str, epoch: int, node: str) -> None:
        super().__init__(handle, name, epoch, node)
        self.claimed = 0
        self.refused: deque[tuple[int, int]] = deque(maxlen=8)
        self.pending: deque[PendingPut] = deque()
        self.early: dict[int, EarlyPut] = {}
        self.finished = False


class Consumer(Member):
    """An attached consumer.

    Attributes:
        deliveries: What it holds, by delivery number.
        load: Weight it was given so far, relative to its share.
        waiting: Requests of its own that wait.
        cancelled: Gets that were cancelled before they arrived, the latest few.
    """

    __slots__ = ("cancelled", "deliveries", "load", "share", "waiting")

    def __init__(self, handle: int, name: str, epoch: int, node: str, share: float) -> None:
        super().__init__(handle, name, epoch, node)
        self.share = share
        self.load = 0.0
        self.deliveries: dict[int, Delivery] = {}
        self.waiting = 0
        self.cancelled: deque[int] = deque(maxlen=64)


class PendingPut:
    """A put that waits for room: entries from ``at`` on are not admitted yet."""

    __slots__ = ("alarm", "at", "base", "deadline", "entries", "producer", "since", "tickets")

    def __init__(
        self,
        tickets: list[int],
        producer: Producer,
        base: int,
        entries: list[Entry],
        deadline: float | None,
        since: float,
    ) -> None:
        self.tickets = tickets
        self.producer = producer
        self.base = base
        self.entries = entries
        self.at = 0
        self.deadline = deadline
        self.since = since
        self.alarm: Any = None


class EarlyPut(NamedTuple):
    """A put that arrived before those it follows."""

    ticket: int
    base: int
    entries: list[Entry]
    deadline: float | None
    alarm: Any


class Waiter:
    """A get that waits for a batch."""

    __slots__ = ("alarm", "consumer", "deadline", "named", "queue", "request", "since", "stale", "ticket")

    def __init__(
        self,
        ticket: int,
        consumer: Consumer,
        queue: "KeyQueue",
        request: "Request",
        since: float,
        deadline: float | None,
    ) -> None:
        self.ticket = ticket
        self.consumer = consumer
        self.queue = queue
        self.request = request
        self.since = since
        self.deadline = deadline
        self.named = False
        self.stale: list[Item] = []
        self.alarm: Any = None


class Request(NamedTuple):
    """What a get asks for. ``limit`` and ``weight`` both ``None``: as the channel's granularity says.

    Attributes:
        key: Queue to take from.
        number: The consumer's number for this get, by which it can be cancelled.
        limit: Items at most.
        weight: Weight at most.
        fill: Wait for a full batch.
        max_staleness: Oldest weight version allowed, counted back from the current one; ``None``: as configured.
        hold: Seconds after which the delivery is taken back although the consumer lives; ``None``: never.
        ahead: The consumer has work and asks for more in advance; it does not count as idle.
    """

    key: Hashable
    number: int = 0
    limit: int | None = None
    weight: int | None = None
    fill: bool = True
    max_staleness: int | None = None
    hold: float | None = None
    ahead: bool = False


class Delivery:
    """Units on lease to a consumer; a unit that was committed leaves ``None`` in its place."""

    __slots__ = ("alarm", "consumer", "number", "queue", "request", "units")

    def __init__(
        self, number: int, consumer: Consumer, queue: "KeyQueue", request: int, units: list[Unit | None]
    ) -> None:
        self.number = number
        self.consumer = consumer
        self.queue = queue
        self.request = request
        self.units = units
        self.alarm: Any = None
