"""The channel as a state machine: no threads, no sockets, no clock of its own.

Whoever hosts it calls a method per request, then sends ``state.replies``, frees ``state.released`` and calls
:meth:`ChannelCore.tick` at :meth:`ChannelCore.next_deadline`.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from rlinf_plugins.core.clock import Clock
from rlinf_plugins.core.errors import BatchTooLargeError
from rlinf_plugins.scheduler.channel.config import ChannelConfig, Granularity
from rlinf_plugins.scheduler.channel.diagnosis import explain_put, explain_waiter
from rlinf_plugins.scheduler.channel.intake import Intake
from rlinf_plugins.scheduler.channel.members import Members, give_up
from rlinf_plugins.scheduler.channel.model import Consumer, Entry, Item, Producer, Request
from rlinf_plugins.scheduler.channel.outlet import Outlet
from rlinf_plugins.scheduler.channel.state import Log, Report, State


class ChannelCore:
    """One channel.

    Promise: at-least-once delivery; each (producer, epoch, sequence number) is committed at most once; first in,
    first out per producer and key; bounded; nothing is lost while the state lives.

    Args:
        name: Used in messages.
        config: Options.
        clock: Source of time.
        log: Takes the journal's records; ``None`` for none.
        incarnation: Differs between the lives of a restarted broker.
    """

    def __init__(
        self, name: str, config: ChannelConfig, clock: Clock, log: Log | None = None, incarnation: int = 0
    ) -> None:
        self.state = State(name, config, clock, log, incarnation)
        self._outlet = Outlet(self.state, lambda waiter: explain_waiter(self.state, self._intake.blocked, waiter))
        self._intake = Intake(self.state, self._outlet)
        self._outlet.starved = lambda: bool(self._intake.blocked)
        self._members = Members(self.state, self._intake, self._outlet)

    # --- members ------------------------------------------------------------------------------------------------

    def attach_producer(self, name: str, node: str = "", resume: int | None = None) -> Producer:
        """Attach a producer. An earlier one of the same name can put no more."""
        self._members.wake()
        producer = self._intake.attach(name, node, resume)
        self._members.watch(producer)
        self._intake.admit()  # what the earlier one had waiting no longer blocks the line
        return producer

    def attach_consumer(self, name: str, group: str = "default", node: str = "", share: float = 1.0) -> Consumer:
        """Attach a consumer. What an earlier one of the same name held is delivered anew.

        Args:
            name: Name of the consumer.
            group: Group it belongs to.
            node: Where it runs.
            share: How much of the weight it should get relative to others who wait at the same time.

        Raises:
            WrongGroupError: The channel serves another group.
        """
        self._members.wake()
        consumer = self._outlet.attach(name, group, node, share)
        self._members.watch(consumer)
        return consumer

    def beat(self, handles: Iterable[int]) -> list[int]:
        """Prolong the leases of these members; return the handles that are not known (any more)."""
        self._members.wake()
        unknown = []
        for handle in handles:
            member = self._members.find(handle)
            if member is None:
                unknown.append(handle)
            else:
                self._members.prolong(member)
        return unknown

    def detach(self, handle: int) -> None:
        """A member leaves in order: a producer has finished, a consumer's deliveries go to others at once."""
        self._members.wake()
        consumer = self.state.consumers.get(handle)
        if consumer is not None:
            self._outlet.drop(consumer, f"consumer {consumer.name!r} has left")
            self._intake.admit()
        producer = self.state.producers.pop(handle, None)
        if producer is not None:
            self._finish(producer)

    # --- producers ----------------------------------------------------------------------------------------------

    def put(self, ticket: int, handle: int, base: int, entries: list[Entry], deadline: float | None = None) -> None:
        """Admit entries with sequence numbers from ``base``; see :class:`~.intake.Intake`.

        Answer: the number of entries admitted by this request (0 if all were there before), or the error. Errors:
        ChannelClosedError, ItemTooLargeError, ChannelTimeoutError, SequenceGapError, UnknownMemberError.
        """
        self._members.wake()
        producer = self.state.producers.get(handle)
        if producer is not None and producer.lapsed:
            self._members.prolong(producer)
        self._intake.put(ticket, handle, base, entries, deadline)

    def finish(self, handle: int) -> None:
        """A producer has nothing more to put; the stream ends when as many have finished as the config says."""
        self._members.wake()
        producer = self.state.producers.get(handle)
        if producer is not None:
            self._finish(producer)

    def close(self, reason: str = "closed") -> None:
        """Refuse further items, hand out short tails and then end the stream; waiting puts are refused."""
        self._members.wake()
        state = self.state
        if state.closed:
            return
        state.closed = reason
        if state.log is not None:
            state.log(("close", reason))
        self._intake.close(f"channel {state.name!r} was closed ({reason})")
        for queue in list(state.queues.values()):
            for group in list(queue.groups.values()):
                came = f"{group.arrived} of {group.size} members"
                give_up(state, queue, group.name, f"the channel was closed at {came}")
            self._outlet.serve(queue)

    # --- consumers ----------------------------------------------------------------------------------------------

    def get(self, ticket: int, handle: int, request: Request, deadline: float | None = None) -> None:
        """Answer with a :class:`~.outlet.Batch`, or the error.

        Errors: ChannelTimeoutError, EndOfStreamError, BatchTooLargeError, UnknownMemberError.
        """
        self._members.wake()
        consumer = self.state.consumers.get(handle)
        if consumer is not None:
            self._members.prolong(consumer)
        self._outlet.get(ticket, handle, request, deadline)
        self._intake.admit()

    def ack(self, handle: int, deliveries: Iterable[tuple[int, list[int] | None]]) -> dict[int, str]:
        """Commit deliveries, whole or by numbered units; return those that were refused, with the reason."""
        self._members.wake()
        refused = {}
        for number, parts in deliveries:
            reason = self._outlet.leases.commit(handle, number, parts)
            if reason:
                refused[number] = reason
                self.state.counts["stale_acks"] += 1
        self._intake.admit()
        return refused

    def nack(self, handle: int, number: int) -> bool:
        """Hand a delivery back at once; ``False`` if it is not on lease to this consumer."""
        self._members.wake()
        delivery = self._outlet.leases.find(handle, number)
        if delivery is None:
            return False
        self._outlet.leases.hand_back(delivery)
        self._intake.admit()
        return True

    def set_aside(self, handle: int, number: int, lost: Callable[[Item], bool]) -> None:
        """Take the units with a lost item out of a delivery, to the dead letters, and hand the others back."""
        self._members.wake()
        delivery = self._outlet.leases.find(handle, number)
        if delivery is not None:
            self._outlet.leases.set_aside(delivery, lost)
            self._intake.admit()

    def cancel(self, handle: int, number: int) -> None:
        """Take back get number ``number`` of a consumer whose caller has gone."""
        self._members.wake()
        self._outlet.cancel(handle, number)
        self._intake.admit()

    def set_version(self, version: int) -> None:
        """Announce the current weight version; it never goes back."""
        self._members.wake()
        self.state.version = version if self.state.version is None else max(version, self.state.version)
        if self.state.log is not None:
            self.state.log(("version", self.state.version))
        self._outlet.flush()
        self._intake.admit()

    def set_granularity(self, granularity: Granularity) -> None:
        """Form batches differently from now on; within an optimiser step, from its end on.

        Raises:
            BatchTooLargeError: Such a batch can never fill within ``max_items``.
        """
        self._members.wake()
        state = self.state
        if granularity.fill and granularity.count is not None and granularity.count > state.config.max_items:
            raise BatchTooLargeError(
                f"a batch of {granularity.count} items can never fill channel {state.name!r} of max_items="
                f"{state.config.max_items}"
            )
        state.granularity = granularity
        for queue in list(state.queues.values()):
            self._outlet.adopt(queue)
            state.reclaim(queue)
        self._outlet.flush()
        self._intake.admit()

    # --- looking in ---------------------------------------------------------------------------------------------

    def peek(self, key: Hashable, limit: int) -> list[Item]:
        """The next items of ``key`` without taking them."""
        queue = self.state.queues.get(key)
        units = [] if queue is None else list(queue.ready)[:limit]
        return [item for unit in units for item in unit.items][:limit]

    def size(self, key: Hashable) -> int:
        """Items of ``key`` that are ready."""
        queue = self.state.queues.get(key)
        return 0 if queue is None else sum(len(unit.items) for unit in queue.ready)

    def stats(self) -> dict[str, Any]:
        """Totals since the start, and what is held now."""
        state = self.state
        return {
            **state.counts,
            "items": state.items,
            "bytes": state.bytes,
            "leased": state.leased,
            "keys": len(state.queues),
            "producers": len(state.producers),
            "consumers": len(state.consumers),
            "blocked_puts": len(self._intake.blocked),
            "waiting_gets": sum(len(queue.waiters) for queue in state.queues.values()),
            "version": state.version,
            "closed": state.closed,
            "loads": {consumer.name: consumer.load for consumer in state.consumers.values()},
        }

    def diagnose(self) -> list[str]:
        """One line per request that waits: who, where, for how long and why."""
        state = self.state
        lines = [
            explain_waiter(state, self._intake.blocked, waiter)
            for queue in state.queues.values()
            for waiter in queue.waiters.values()
        ]
        return lines + [explain_put(state, pending) for pending in self._intake.blocked]

    def reports(self) -> list[Report]:
        """What users should know, oldest first; each report is returned once."""
        found = list(self.state.reports)
        self.state.reports.clear()
        return found

    def dead_letters(self) -> list[Item]:
        """Items that were set aside; they leave the channel."""
        items = list(self.state.dead_letters)
        self.state.dead_letters.clear()
        for item in items:
            self.state.forget(item)
        self._intake.admit()
        return items

    # --- time ---------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return self.state.alarms.due()

    def tick(self) -> None:
        """Do what is due: time-outs, leases that ended, waiters to be named."""
        self._members.wake()
        self.state.alarms.ring(self.state.clock())

    @property
    def intake(self) -> Intake:
        """The producers' side, for recovery."""
        return self._intake

    def _finish(self, producer: Producer) -> None:
        producer.finished = True
        expected = self.state.config.producers
        if expected is not None and sum(p.finished for p in self._intake.known.values()) >= expected:
            self.close(f"all {expected} producers have finished")
