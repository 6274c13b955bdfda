"""What consumers hold: granted on lease, then committed, handed back or set aside."""

from collections.abc import Callable, Iterable
from typing import Any

from rlinf_plugins.scheduler.channel.model import Consumer, Delivery, Group, Item, Unit, Waiter
from rlinf_plugins.scheduler.channel.queue import KeyQueue
from rlinf_plugins.scheduler.channel.state import State


class Leases:
    """Keeps the deliveries of all consumers.

    Args:
        state: Shared data.
        serve: Called with a queue to which something came back, or that may have ended.
    """

    def __init__(self, state: State, serve: Callable[[KeyQueue], Any]) -> None:
        self._state = state
        self._serve = serve

    def grant(self, queue: KeyQueue, waiter: Waiter, units: list[Unit]) -> Delivery:
        """Lease units to the waiter's consumer."""
        state, consumer = self._state, waiter.consumer
        for unit in units:
            for item in unit.items:
                item.attempts += 1
                state.counts["redelivered"] += item.attempts > 1
                state.leased += 1
        delivery = Delivery(state.number(), consumer, queue, waiter.request.number, list(units))
        consumer.deliveries[delivery.number] = delivery
        consumer.load += sum(max(unit.weight, 1) for unit in units) / consumer.share
        queue.leased += 1
        state.counts["delivered"] += 1
        if waiter.request.hold is not None:
            delivery.alarm = state.alarms.set(state.clock() + waiter.request.hold, self._hold_over, delivery)
        return delivery

    def commit(self, handle: int, number: int, parts: Iterable[int] | None) -> str:
        """Commit a delivery or the numbered units of it; return why not, or an empty string."""
        state = self._state
        delivery = self.find(handle, number)
        if delivery is None:
            if number in state.committed:  # the answer to the first acknowledgement was lost
                return ""
            return "its lease ended and its items were given to another consumer"
        for index in range(len(delivery.units)) if parts is None else parts:
            unit = delivery.units[index]
            if unit is not None:
                delivery.units[index] = None
                self._commit_unit(unit)
        if not any(unit is not None for unit in delivery.units):
            state.remember(number)
            self._forget(delivery)
            if state.closed:
                self._serve(delivery.queue)
        state.reclaim(delivery.queue)
        return ""

    def find(self, handle: int, number: int) -> Delivery | None:
        """The delivery of this number if this consumer holds it."""
        consumer = self._state.consumers.get(handle)
        return None if consumer is None else consumer.deliveries.get(number)

    def hand_back(self, delivery: Delivery) -> None:
        """Return a delivery to its queue and serve those who wait there."""
        self._take_back(delivery)
        self._serve(delivery.queue)

    def set_aside(self, delivery: Delivery, lost: Callable[[Item], bool]) -> None:
        """Move the units with a lost item to the dead letters and hand the others back."""
        for index, unit in enumerate(delivery.units):
            if unit is not None and any(lost(item) for item in unit.items):
                delivery.units[index] = None
                self._state.leased -= len(unit.items)
                self._set_aside(unit, "its tensors are gone with its producer")
        self.hand_back(delivery)

    def take_all(self, consumer: Consumer) -> list[KeyQueue]:
        """Return to their queues all deliveries of a consumer that is gone; the queues, which nobody served yet."""
        held = list(consumer.deliveries.values())
        self._state.counts["expired"] += len(held)
        for delivery in held:
            self._take_back(delivery)
        return [delivery.queue for delivery in held]

    def _hold_over(self, delivery: Delivery) -> None:
        self._state.counts["expired"] += 1
        self.hand_back(delivery)

    def _commit_unit(self, unit: Unit) -> None:
        for item in unit.items:
            self._state.leased -= 1
            self._state.counts["committed"] += 1
            self._state.forget(item)
        if isinstance(unit, Group):
            self._state.forget_failures(unit)

    def _forget(self, delivery: Delivery) -> None:
        del delivery.consumer.deliveries[delivery.number]
        delivery.queue.leased -= 1
        self._state.alarms.cancel(delivery.alarm)

    def _take_back(self, delivery: Delivery) -> None:
        state, queue = self._state, delivery.queue
        self._forget(delivery)
        back = [unit for unit in delivery.units if unit is not None]
        for unit in back:
            state.leased -= len(unit.items)
        limit = state.config.max_deliveries
        keep = [u for u in back if limit is None or all(item.attempts < limit for item in u.items)]
        for unit in back:
            if unit not in keep:
                self._set_aside(unit, f"came back {limit} times")
        queue.give_back(keep)

    def _set_aside(self, unit: Unit, reason: str) -> None:
        for item in unit.items:
            self._state.dead_letters.append(item)
            self._state.report("dead-letter", f"{reason} and is set aside", item)
