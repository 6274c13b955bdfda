"""Deadlines of the state machine: a heap whose cancelled entries are swept before they pile up."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any

_SWEEP = 256


class Alarm:
    """A call that is due at a time; ``call`` is ``None`` once it was made or cancelled."""

    __slots__ = ("argument", "call", "due")

    def __init__(self, due: float, call: Callable[[Any], None] | None, argument: Any) -> None:
        self.due = due
        self.call = call
        self.argument = argument


class Alarms:
    """Deadlines by due time. Cancelling is O(1); memory stays proportional to the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Alarm]] = []
        self._order = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def set(self, due: float, call: Callable[[Any], None], argument: Any) -> Alarm:
        """Have ``call(argument)`` made by :meth:`ring` once ``due`` has passed."""
        alarm = Alarm(due, call, argument)
        heapq.heappush(self._heap, (due, next(self._order), alarm))
        self._live += 1
        return alarm

    def cancel(self, alarm: Alarm | None) -> None:
        """Forget ``alarm``; nothing happens if it is ``None``, was made or cancelled."""
        if alarm is None or alarm.call is None:
            return
        alarm.call = alarm.argument = None
        self._live -= 1
        if len(self._heap) > _SWEEP and self._live * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].call is not None]
            heapq.heapify(self._heap)

    def due(self) -> float | None:
        """When the next call is due, ``None`` if there is none."""
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def ring(self, now: float) -> None:
        """Make all calls that are due, in order, those included that they set."""
        while self._heap and self._heap[0][0] <= now:
            alarm = heapq.heappop(self._heap)[2]
            if alarm.call is None:
                continue
            call, argument = alarm.call, alarm.argument
            alarm.call = alarm.argument = None
            self._live -= 1
            call(argument)
