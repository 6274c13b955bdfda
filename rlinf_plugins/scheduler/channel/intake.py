"""The producers' side: sequence numbers, bounds, and puts that wait for room."""

from collections import deque
from collections.abc import Callable, Iterator

from rlinf_plugins.core.errors import (
    ChannelClosedError,
    ChannelTimeoutError,
    ItemTooLargeError,
    SequenceGapError,
    StaleProducerError,
    UnknownMemberError,
)
from rlinf_plugins.scheduler.channel.model import EarlyPut, Entry, Failure, Item, PendingPut, Producer
from rlinf_plugins.scheduler.channel.outlet import Outlet
from rlinf_plugins.scheduler.channel.queue import KeyQueue
from rlinf_plugins.scheduler.channel.state import State


class Intake:
    """Admits entries within the bounds, first come first served, each sequence number once.

    Args:
        state: Shared data.
        outlet: The consumers' side, served with what was admitted.
    """

    def __init__(self, state: State, outlet: Outlet) -> None:
        self._state = state
        self._outlet = outlet
        self.blocked: deque[PendingPut] = deque()
        self._names: dict[str, Producer] = {}

    def attach(self, name: str, node: str, resume: int | None) -> Producer:
        """Attach a producer; one of the same name is replaced, and what it had waiting is refused.

        Args:
            name: Name of the producer.
            node: Where it runs.
            resume: Epoch to continue after the broker was restarted from its journal; a new epoch otherwise.
        """
        before = self._names.get(name)
        epoch = 0 if before is None else before.epoch + 1
        producer = Producer(self._state.number(), name, epoch, node)
        if before is not None:
            if resume == before.epoch:
                producer.epoch, producer.claimed = before.epoch, before.claimed
            self._state.producers.pop(before.handle, None)
            self._refuse_pending(before, lambda left: StaleProducerError(_replaced(name, left)))
        self._names[name] = self._state.producers[producer.handle] = producer
        if self._state.log is not None:
            self._state.log(("producer", name, producer.epoch, producer.claimed))
        return producer

    def put(self, ticket: int, handle: int, base: int, entries: list[Entry], deadline: float | None) -> None:
        """Admit ``entries``, numbered from ``base``; what does not fit waits until ``deadline``."""
        state = self._state
        producer = state.producers.get(handle)
        if producer is None:
            state.reply(ticket, UnknownMemberError(f"channel {state.name!r} knows no producer with handle {handle}"))
            return
        if base > producer.claimed:
            self._hold_early(producer, ticket, base, entries, deadline)
            return
        self._put_in_order(producer, ticket, base, entries, deadline)
        while producer.claimed in producer.early:
            early = producer.early.pop(producer.claimed)
            state.alarms.cancel(early.alarm)
            self._put_in_order(producer, *early[:4])

    def _put_in_order(
        self, producer: Producer, ticket: int, base: int, entries: list[Entry], deadline: float | None
    ) -> None:
        state = self._state
        if base < producer.claimed:
            known = min(producer.claimed - base, len(entries))
            if self._answer_repeat(ticket, producer, base, known):
                return
            state.counts["duplicates"] += known
            base, entries = producer.claimed, entries[known:]
            if not entries:
                state.reply(ticket, 0)
                return
        producer.claimed = base + len(entries)
        refusal = self._refusal(entries)
        if refusal is not None:
            state.released.extend(entry.payload for entry in entries)
            producer.refused.append((base, producer.claimed))
            state.reply(ticket, refusal)
            return
        pending = PendingPut([ticket], producer, base, entries, deadline, state.clock())
        producer.pending.append(pending)
        self.blocked.append(pending)
        if len(self.blocked) == 1 or self._outlet.stalled():
            self.admit()
        if pending.at < len(entries) and deadline is not None:
            pending.alarm = state.alarms.set(deadline, self._expire, pending)

    def admit(self) -> None:
        """Admit what fits and serve it; where that leaves everybody waiting for everybody, break the circle."""
        while self.blocked:
            if self._admit_fitting():
                continue
            if not self._outlet.stalled():
                return
            # Nobody can make room: hand out short batches, and if there are none, what would complete a group.
            if not self._outlet.flush() and not self._admit_beyond_bounds():
                return

    def close(self, reason: str) -> None:
        """Refuse everything that still waits for room."""
        for producer in list(self._state.producers.values()):
            self._refuse_pending(producer, lambda left: ChannelClosedError(f"{reason}; {left} items were not admitted"))

    def restore(self, name: str, epoch: int, claimed: int) -> Producer:
        """Take in a producer from the journal; it stays unattached until it comes back."""
        producer = self._names[name] = self.former(name, epoch)
        producer.claimed = claimed
        return producer

    def former(self, name: str, epoch: int) -> Producer:
        """A producer's earlier life, for the items it left."""
        return Producer(0, name, epoch, "")

    @property
    def known(self) -> dict[str, Producer]:
        """The latest producer of each name."""
        return self._names

    def _admit_fitting(self) -> bool:
        """Admit from the head of the line while there is room; tell whether anything was admitted."""
        state, config = self._state, self._state.config
        touched: dict[int, KeyQueue] = {}
        while self.blocked:
            pending = self.blocked[0]
            entries, at = pending.entries, pending.at
            while at < len(entries):
                entry = entries[at]
                if entry.failure is None and (
                    state.items >= config.max_items or state.bytes + entry.nbytes > config.max_bytes
                ):
                    break
                queue = self._take_in(pending.producer, pending.base + at, entry)
                touched[id(queue)] = queue
                at += 1
            pending.at = at
            if at < len(entries):
                break
            self.blocked.popleft()
            self._done(pending)
        for queue in touched.values():
            self._outlet.serve(queue)
        return bool(touched)

    def _admit_beyond_bounds(self) -> bool:
        """Admit one entry although there is no room: consumers wait for groups that only it can complete."""
        chosen = next((p for p in self._heads() if self._continues_group(p.entries[p.at])), None)
        if chosen is None:
            chosen = next((p for p in self._heads() if p.entries[p.at].group is not None), None)
        if chosen is None or not any(queue.groups and queue.waiters for queue in self._state.queues.values()):
            return False
        queue = self._take_in(chosen.producer, chosen.base + chosen.at, chosen.entries[chosen.at])
        self._state.counts["beyond_bounds"] += 1
        chosen.at += 1
        if chosen.at == len(chosen.entries):
            self.blocked.remove(chosen)
            self._done(chosen)
        self._outlet.serve(queue)
        return True

    def _heads(self) -> Iterator[PendingPut]:
        seen: set[int] = set()
        for pending in self.blocked:
            if pending.producer.handle not in seen:
                seen.add(pending.producer.handle)
                yield pending

    def _continues_group(self, entry: Entry) -> bool:
        queue = self._state.queues.get(entry.key)
        return queue is not None and entry.group is not None and entry.group[0] in queue.groups

    def _take_in(self, producer: Producer, seq: int, entry: Entry) -> KeyQueue:
        state = self._state
        queue = state.queue(entry.key)
        order = state.order()
        if state.log is not None:
            state.log(("put", order, producer.name, producer.epoch, seq, tuple(entry)))
        self.insert(queue, producer, seq, order, entry)
        state.counts["put"] += 1
        return queue

    def insert(self, queue: KeyQueue, producer: Producer, seq: int, order: int, entry: Entry) -> None:
        """Put an admitted entry where it belongs; used by admission and by recovery."""
        state = self._state
        group = None
        if entry.group is not None:
            group = queue.group(*entry.group, state.clock())
        if entry.failure is None:
            state.items += 1
            state.bytes += entry.nbytes
            queue.offer(Item(order, producer, seq, entry, group))
        elif group is not None:
            queue.fail(group, Failure(order, producer, seq, entry.failure))
            state.report("member-failed", f"a member of group {group.name!r} failed: {entry.failure}")
        if group is not None and group.arrived >= group.size and not queue.granularity.whole_groups:
            state.forget_failures(group)

    def _refusal(self, entries: list[Entry]) -> Exception | None:
        state, config = self._state, self._state.config
        if state.closed:
            return ChannelClosedError(
                f"channel {state.name!r} is closed ({state.closed}); {len(entries)} items refused"
            )
        for entry in entries:
            if entry.nbytes > config.max_bytes:
                return ItemTooLargeError(
                    f"an item of {entry.nbytes} bytes can never fit channel {state.name!r} of max_bytes="
                    f"{config.max_bytes}; {len(entries)} items refused: raise the bound or split the item"
                )
        return None

    def _hold_early(
        self, producer: Producer, ticket: int, base: int, entries: list[Entry], deadline: float | None
    ) -> None:
        """Keep a request until those it overtook are here; the transport may change the order of calls."""
        state = self._state
        due = state.clock() + state.config.lease_seconds
        alarm = state.alarms.set(due, self._gap_stays, (producer, base))
        producer.early[base] = EarlyPut(ticket, base, entries, deadline, alarm)

    def _gap_stays(self, argument: tuple[Producer, int]) -> None:
        producer, base = argument
        early = producer.early.pop(base)
        self._state.reply(early.ticket, SequenceGapError(_gap(self._state.name, producer, base)))

    def _answer_repeat(self, ticket: int, producer: Producer, base: int, known: int) -> bool:
        """Answer a repeated request whose first copy still waits or was refused; ``False`` if it was admitted."""
        for pending in producer.pending:
            if pending.base < base + known and base < pending.base + len(pending.entries):
                pending.tickets.append(ticket)
                return True
        for low, high in producer.refused:
            if low < base + known and base < high:
                text = f"items {low}..{high - 1} of producer {producer.name!r} were refused before; put them anew"
                self._state.reply(ticket, ChannelTimeoutError(text))
                return True
        return False

    def _done(self, pending: PendingPut) -> None:
        pending.producer.pending.remove(pending)
        self._state.alarms.cancel(pending.alarm)
        for ticket in pending.tickets:
            self._state.reply(ticket, len(pending.entries))

    def _expire(self, pending: PendingPut) -> None:
        state, config = self._state, self._state.config
        left = len(pending.entries) - pending.at
        self._refuse(
            pending,
            ChannelTimeoutError(
                f"put to channel {state.name!r} by {pending.producer.name!r}: {left} of {len(pending.entries)} items "
                f"found no room in time ({state.items} of {config.max_items} items, {state.bytes} of "
                f"{config.max_bytes} bytes held, {state.leased} items on lease)"
            ),
        )
        self.admit()

    def _refuse_pending(self, producer: Producer, error: Callable[[int], Exception]) -> None:
        for pending in list(producer.pending):
            self._refuse(pending, error(len(pending.entries) - pending.at))

    def _refuse(self, pending: PendingPut, error: Exception) -> None:
        producer = pending.producer
        self.blocked.remove(pending)
        producer.pending.remove(pending)
        producer.refused.append((pending.base + pending.at, pending.base + len(pending.entries)))
        self._state.alarms.cancel(pending.alarm)
        self._state.released.extend(entry.payload for entry in pending.entries[pending.at :])
        self._state.counts["refused"] += len(pending.entries) - pending.at
        for ticket in pending.tickets:
            self._state.reply(ticket, error)


def _replaced(name: str, left: int) -> str:
    return f"producer {name!r} was replaced by a newer one of that name; {left} items were not admitted"


def _gap(channel: str, producer: Producer, base: int) -> str:
    return (
        f"channel {channel!r} expected item {producer.claimed} of producer {producer.name!r}, got {base}: "
        "what comes between did not arrive; nothing was admitted"
    )
