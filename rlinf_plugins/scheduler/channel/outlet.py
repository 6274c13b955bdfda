"""The consumers' side: who gets which batch, leases, acknowledgements and what comes back."""

from collections.abc import Callable
from typing import Any, NamedTuple

from rlinf_plugins.core.errors import (
    BatchTooLargeError,
    ChannelTimeoutError,
    EndOfStreamError,
    UnknownMemberError,
    WrongGroupError,
)
from rlinf_plugins.scheduler.channel.config import Granularity
from rlinf_plugins.scheduler.channel.leases import Leases
from rlinf_plugins.scheduler.channel.model import Consumer, Group, Item, Request, Unit, Waiter
from rlinf_plugins.scheduler.channel.queue import KeyQueue
from rlinf_plugins.scheduler.channel.state import State


class Batch(NamedTuple):
    """Answer to a get.

    Attributes:
        number: Delivery number, the epoch an acknowledgement must carry.
        units: What was delivered.
        step: Optimiser step the items count towards; ``None`` without a step size.
        ends_step: No further item of this step is to come.
        stale: Items that were passed over because their weights were too old.
    """

    number: int
    units: list[Unit]
    step: int | None
    ends_step: bool
    stale: list[Item]


class Outlet:
    """Forms batches and leases them to consumers.

    Args:
        state: Shared data.
        describe: Says why a waiter waits.
    """

    def __init__(self, state: State, describe: Callable[[Waiter], str]) -> None:
        self._state = state
        self._describe = describe
        self._names: dict[str, Consumer] = {}
        self.leases = Leases(state, self.serve)
        self.starved: Callable[[], bool] = lambda: False
        """Whether producers wait for room; set by whoever wires the parts."""

    def attach(self, name: str, group: str, node: str, share: float) -> Consumer:
        """Attach a consumer; one of the same name is replaced, and what it held is delivered anew.

        Raises:
            WrongGroupError: The channel serves another group.
        """
        state = self._state
        if group != state.config.group:
            raise WrongGroupError(
                f"consumer {name!r} belongs to group {group!r}; channel {state.name!r} serves {state.config.group!r}"
            )
        before = self._names.get(name)
        consumer = Consumer(state.number(), name, 0 if before is None else before.epoch + 1, node, share)
        # A newcomer starts level with the others, or it would be given everything until it had caught up.
        consumer.load = min((other.load for other in state.consumers.values() if not other.lapsed), default=0.0)
        if before is not None:
            self.drop(before, f"consumer {name!r} was replaced by a newer one of that name")
        self._names[name] = state.consumers[consumer.handle] = consumer
        return consumer

    def get(self, ticket: int, handle: int, request: Request, deadline: float | None) -> None:
        """Answer with the next batch, now or when there is one; with an error once ``deadline`` has passed."""
        state = self._state
        consumer = state.consumers.get(handle)
        if consumer is None:
            state.reply(ticket, UnknownMemberError(f"channel {state.name!r} knows no consumer with handle {handle}"))
            return
        if request.number in consumer.cancelled:  # the transport may change the order of calls
            state.reply(ticket, ChannelTimeoutError("the get was cancelled"))
            return
        if request.limit is not None and request.fill and request.limit > state.config.max_items:
            state.reply(ticket, BatchTooLargeError(_never_fills(state, request.limit)))
            return
        now = state.clock()
        queue = state.queue(request.key)
        waiter = Waiter(ticket, consumer, queue, request, now, deadline)
        queue.waiters[ticket] = waiter
        consumer.waiting += not request.ahead
        self.serve(queue)
        if ticket in queue.waiters:
            self._arm(waiter)

    def serve(self, queue: KeyQueue) -> bool:
        """Give batches to those who wait at ``queue``; tell whether anybody got one."""
        state = self._state
        served = False
        while queue.waiters:
            self.adopt(queue)
            waiter = self._next_waiter(queue)
            units = self._form(queue, waiter)
            if units is None:
                if waiter.ticket in queue.waiters:
                    break
                continue
            self._deliver(queue, waiter, units)
            served = True
        if state.closed and queue.waiters and not queue.ready:
            self._end(queue)
        state.reclaim(queue)
        return served

    def adopt(self, queue: KeyQueue) -> None:
        """Let ``queue`` follow the channel's granularity, unless it is within an optimiser step."""
        granularity = self._state.granularity
        if queue.granularity is granularity or queue.taken:
            return
        if queue.granularity.whole_groups and not granularity.whole_groups:
            for unit in queue.ready:
                if isinstance(unit, Group):
                    self._state.forget_failures(unit)
        queue.regroup(granularity)

    def flush(self) -> bool:
        """Give short batches to whoever waits; tell whether anybody got one."""
        return any([self.serve(queue) for queue in list(self._state.queues.values()) if queue.waiters])

    def stalled(self) -> bool:
        """Whether somebody waits and all who hold items wait too, so that no room will come from them."""
        consumers = self._state.consumers.values()
        return any(c.waiting for c in consumers) and all(c.waiting for c in consumers if c.deliveries)

    def cancel(self, handle: int, request: int) -> None:
        """Take back a get whose caller has gone, also if it was answered meanwhile."""
        consumer = self._state.consumers.get(handle)
        if consumer is None:
            return
        consumer.cancelled.append(request)
        for queue in list(self._state.queues.values()):
            for waiter in [w for w in queue.waiters.values() if w.consumer is consumer and w.request.number == request]:
                self._give_up(waiter, ChannelTimeoutError("the get was cancelled"))
        for delivery in [d for d in consumer.deliveries.values() if d.request == request]:
            self.leases.hand_back(delivery)

    def drop(self, consumer: Consumer, reason: str) -> int:
        """A consumer is gone: what it holds goes back, what it waits for is refused; return the deliveries it held."""
        self._state.consumers.pop(consumer.handle, None)
        held, touched = len(consumer.deliveries), {}
        for queue in self._state.queues.values():
            for waiter in [w for w in queue.waiters.values() if w.consumer is consumer]:
                self._dismiss(waiter, UnknownMemberError(reason))
                touched[id(queue)] = queue
        touched |= {id(queue): queue for queue in self.leases.take_all(consumer)}
        # Served only now: nothing may go to who is gone, and the stream has not ended while something comes back.
        for queue in touched.values():
            self.serve(queue)
        return held

    def _arm(self, waiter: Waiter) -> None:
        """Set the alarm for the next thing that happens to a waiter: being named, or its time running out."""
        due = None if waiter.named else waiter.since + self._state.config.stuck_seconds
        if waiter.deadline is not None and (due is None or waiter.deadline < due):
            due = waiter.deadline
        if due is not None:
            waiter.alarm = self._state.alarms.set(due, self._alarm, waiter)

    def _alarm(self, waiter: Waiter) -> None:
        if waiter.deadline is not None and self._state.clock() >= waiter.deadline:
            self._give_up(waiter, ChannelTimeoutError(self._describe(waiter)))
            return
        waiter.named = True
        self._state.report("stuck", self._describe(waiter))
        self._arm(waiter)

    def _give_up(self, waiter: Waiter, error: Exception) -> None:
        """A waiter gets nothing; those it was ahead of may."""
        self._dismiss(waiter, error)
        self.serve(waiter.queue)

    def _dismiss(self, waiter: Waiter, answer: Any) -> None:
        queue = waiter.queue
        del queue.waiters[waiter.ticket]
        waiter.consumer.waiting -= not waiter.request.ahead
        self._state.alarms.cancel(waiter.alarm)
        self._state.reply(waiter.ticket, answer)

    def _next_waiter(self, queue: KeyQueue) -> Waiter:
        """The waiter whose consumer has had the least; it is served first even if others ask for less.

        Nobody overtakes, so that a large batch is not starved by small ones.
        """
        if len(queue.waiters) == 1:
            return next(iter(queue.waiters.values()))
        return min(queue.waiters.values(), key=lambda w: (w.consumer.load, w.ticket))

    def _form(self, queue: KeyQueue, waiter: Waiter) -> list[Unit] | None:
        request, granularity = waiter.request, queue.granularity
        if request.limit is not None or request.weight is not None:
            granularity = Granularity(
                count=request.limit,
                weight=request.weight,
                fill=request.fill,
                whole_groups=granularity.whole_groups,
                step=granularity.step,
            )
        stuck = not self._state.closed and self.starved() and self.stalled()
        if stuck and granularity.exact and queue.ready and granularity.count is not None:
            if queue.count < granularity.count:
                self._dismiss(waiter, BatchTooLargeError(_never_fills(self._state, granularity.count)))
                return None
            stuck = False
        flush = stuck or bool(self._state.closed)
        if flush or queue.may_fill(granularity):
            self._pass_over(queue, waiter)
        return queue.take(granularity, flush)

    def _pass_over(self, queue: KeyQueue, waiter: Waiter) -> None:
        """Commit the units whose weights are too old for this waiter, as stale."""
        state = self._state
        bound = waiter.request.max_staleness
        bound = state.config.max_staleness if bound is None else bound
        if bound is None or state.version is None:
            return
        oldest = state.version - bound
        for unit in queue.discard(lambda unit: unit.version is not None and unit.version < oldest):
            for item in unit.items:
                waiter.stale.append(item)
                state.report("stale", f"weights of version {item.version}, oldest allowed {oldest}", item)
                state.forget(item)

    def _deliver(self, queue: KeyQueue, waiter: Waiter, units: list[Unit]) -> None:
        delivery = self.leases.grant(queue, waiter, units)
        step = None if queue.granularity.step is None else units[0].step
        ends = step is not None and step < queue.step and not (queue.ready and queue.ready[0].step == step)
        self._dismiss(waiter, Batch(delivery.number, units, step, ends, waiter.stale))

    def _end(self, queue: KeyQueue) -> None:
        """Tell those who wait that nothing will come, unless somebody who works may still give something back."""
        holders = [c for c in self._state.consumers.values() if any(d.queue is queue for d in c.deliveries.values())]
        if all(holder.waiting for holder in holders):
            text = f"channel {self._state.name!r}, key {queue.key!r}: {self._state.closed}; everything was delivered"
            for waiter in list(queue.waiters.values()):
                self._dismiss(waiter, EndOfStreamError(text))


def _never_fills(state: State, count: int) -> str:
    config = state.config
    return (
        f"a batch of {count} items can never fill in channel {state.name!r}, which holds {state.items} of max_items="
        f"{config.max_items} and {state.bytes} of max_bytes={config.max_bytes}: raise the bounds or ask for less"
    )
