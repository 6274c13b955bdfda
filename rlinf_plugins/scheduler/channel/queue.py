"""The items of one key: order, groups, and which of them make the next batch."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from heapq import merge
from operator import attrgetter

from rlinf_plugins.scheduler.channel.config import Granularity
from rlinf_plugins.scheduler.channel.model import Failure, Group, Item, Unit, Waiter

_BY_ORDER = attrgetter("order")


class KeyQueue:
    """Units that are ready, in order, and groups that are not complete yet.

    Attributes:
        ready: Units that can be delivered, oldest first.
        count: Sum of their counts.
        weight: Sum of their weights.
        groups: Incomplete groups by name.
        waiters: Gets that wait here, by ticket.
        leased: Units on lease.
        step: Optimiser step whose items are being delivered.
        taken: Items of that step delivered so far.
    """

    __slots__ = ("count", "granularity", "groups", "key", "leased", "ready", "step", "taken", "waiters", "weight")

    def __init__(self, key: Hashable, granularity: Granularity) -> None:
        self.key = key
        self.granularity = granularity
        self.ready: deque[Unit] = deque()
        self.count = 0
        self.weight = 0
        self.groups: dict[str, Group] = {}
        self.waiters: dict[int, Waiter] = {}
        self.leased = 0
        self.step = 0
        self.taken = 0

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost by forgetting this queue."""
        return not (self.ready or self.groups or self.waiters or self.leased or self.step or self.taken)

    def group(self, name: str, size: int, now: float) -> Group:
        """The incomplete group of this name, opened if there is none."""
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = Group(name, size, self.key, now)
        return found

    def offer(self, item: Item) -> None:
        """Take in an admitted item; its group, if any, must be open here."""
        group = item.group
        if group is None:
            self._push(item)
            return
        group.arrived += 1
        group.contributors.add(item.producer)
        if self.granularity.whole_groups:
            group.items.append(item)
            group.order = item.order
        else:
            self._push(item)
        self._settle(group)

    def fail(self, group: Group, failure: Failure) -> None:
        """Count a member of ``group`` that will never come."""
        group.arrived += 1
        group.contributors.add(failure.producer)
        group.failed.append(failure)
        group.order = failure.order
        self._settle(group)

    def give_up(self, group: Group, reason: str) -> None:
        """Make an incomplete group a unit as it is."""
        group.short = reason
        del self.groups[group.name]
        if self.granularity.whole_groups:
            self.give_back([group])  # to its place: units that came after its last member may be ready

    def take(self, granularity: Granularity, flush: bool) -> list[Unit] | None:
        """Remove and return the next batch, or ``None`` if it is not full yet.

        Args:
            granularity: Limits of the batch.
            flush: Whether a short batch will do.
        """
        if not self.ready:
            return None
        if not flush and not self.may_fill(granularity):
            return None
        room = None if granularity.step is None else granularity.step - self.taken
        size, full = self._next_batch(granularity, room)
        if not full and granularity.fill and not flush:
            return None
        units = [self._pop() for _ in range(size)]
        if granularity.step is not None:
            self._count_step(units, granularity.step)
        return units

    def may_fill(self, granularity: Granularity) -> bool:
        """Whether a batch might be full; cheap, and spares the scan while it cannot be."""
        if not self.ready or not granularity.fill:
            return bool(self.ready)
        step, count, weight = granularity.step, granularity.count, granularity.weight
        return (
            (count is not None and self.count >= count)
            or (weight is not None and self.weight >= weight)
            or (step is not None and (self.count >= step - self.taken or self.ready[0].step is not None))
        )

    def give_back(self, units: Iterable[Unit]) -> None:
        """Return units to their places in the order."""
        back = sorted(units, key=_BY_ORDER)
        for unit in back:
            self.count += unit.count
            self.weight += unit.weight
        if not self.ready or (back and back[-1].order < self.ready[0].order):
            self.ready.extendleft(reversed(back))
        else:
            self.ready = deque(merge(back, self.ready, key=_BY_ORDER))

    def discard(self, unwanted: Callable[[Unit], bool]) -> list[Unit]:
        """Remove and return the ready units that are unwanted."""
        removed = [unit for unit in self.ready if unwanted(unit)]
        if removed:
            self.ready = deque(unit for unit in self.ready if not unwanted(unit))
            self.count -= sum(unit.count for unit in removed)
            self.weight -= sum(unit.weight for unit in removed)
        return removed

    def regroup(self, granularity: Granularity) -> None:
        """Adopt another granularity; groups are taken apart or put together as it asks."""
        before, self.granularity = self.granularity, granularity
        if before.whole_groups == granularity.whole_groups:
            return
        units = list(self.ready)
        self.ready.clear()
        self.count = self.weight = 0
        units = self._put_together(units) if granularity.whole_groups else self._take_apart(units)
        for unit in sorted(units, key=_BY_ORDER):
            self._push(unit)

    def _put_together(self, units: list[Unit]) -> list[Unit]:
        together: dict[int, Unit] = {}
        for unit in units:
            group = unit.group if isinstance(unit, Item) else None
            if group is None or not isinstance(unit, Item):
                together[id(unit)] = unit
                continue
            group.items.append(unit)
            group.order = max(group.order, unit.order)
            group.step = unit.step if group.step is None else group.step
            if self.groups.get(group.name) is not group:
                together[id(group)] = group
        for group in [*self.groups.values(), *(unit for unit in together.values() if isinstance(unit, Group))]:
            if len(group.items) + len(group.failed) < group.arrived:
                group.short = "members were delivered one by one before groups were kept whole"
        return list(together.values())

    def _take_apart(self, units: list[Unit]) -> list[Unit]:
        apart: list[Unit] = []
        for unit in [*units, *self.groups.values()]:
            apart.extend(unit.items)
            if isinstance(unit, Group):
                for item in unit.items:
                    item.step = unit.step
                unit.items = []
        return apart

    def _settle(self, group: Group) -> None:
        if group.arrived < group.size:
            return
        del self.groups[group.name]
        if self.granularity.whole_groups:
            self._push(group)

    def _push(self, unit: Unit) -> None:
        self.ready.append(unit)
        self.count += unit.count
        self.weight += unit.weight

    def _pop(self) -> Unit:
        unit = self.ready.popleft()
        self.count -= unit.count
        self.weight -= unit.weight
        return unit

    def _next_batch(self, granularity: Granularity, room: int | None) -> tuple[int, bool]:
        """Number of units of the next batch, at least one, and whether a further one would not fit."""
        count = weight = fresh = size = 0
        first_step = self.ready[0].step
        for unit in self.ready:
            count += unit.count
            weight += unit.weight
            fresh += unit.count if unit.step is None else 0
            over = (
                (granularity.count is not None and count > granularity.count)
                or (granularity.weight is not None and weight > granularity.weight)
                or (room is not None and (fresh > room or unit.step != first_step))
            )
            if over and size:
                return size, True
            size += 1
            if count == granularity.count or weight == granularity.weight or (room is not None and fresh == room):
                return size, True
        exhausted = room is not None and first_step is not None
        return size, exhausted or bool(
            (granularity.count is not None and count >= granularity.count)
            or (granularity.weight is not None and weight >= granularity.weight)
        )

    def _count_step(self, units: list[Unit], step_size: int) -> None:
        for unit in units:
            if unit.step is None:
                unit.step = self.step
                self.taken += unit.count
        if self.taken >= step_size:
            self.step += 1
            self.taken = 0
