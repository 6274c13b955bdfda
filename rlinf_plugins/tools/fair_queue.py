"""A bounded queue shared fairly by weighted tenants, without time or I/O of its own."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Start-time fair queueing over tenants: each backlogged tenant is served in proportion to its weight.

    When the queue is full, a tenant that holds less than its share may displace the newest item of the tenant that
    is most above its own; otherwise the new item is refused. So a burst of one tenant cannot lock out another.

    Args:
        capacity: Items held at most, over all tenants.
        weights: Relative weight per tenant; a tenant not listed weighs 1.
    """

    def __init__(self, capacity: int, weights: Mapping[str, float] | None = None) -> None:
        self._capacity = capacity
        self._weights = dict(weights or {})
        self._lanes: dict[str, deque[T]] = {}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def backlog(self, tenant: str) -> int:
        """Items of ``tenant`` that wait."""
        return len(self._lanes.get(tenant, ()))

    def push(self, tenant: str, item: T) -> tuple[bool, T | None]:
        """Add ``item``.

        Returns:
            Whether it was admitted, and the item it displaced, if any.
        """
        displaced: T | None = None
        if self._size >= self._capacity:
            victim = self._over_share(tenant)
            if victim is None:
                return False, None
            displaced = self._lanes[victim].pop()
            self._size -= 1
            self._drop_if_empty(victim)
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = deque()
            # A tenant that returns after idling starts now: it earned nothing while it had nothing to do.
            self._finish[tenant] = max(self._finish.get(tenant, 0.0), self._virtual)
        lane.append(item)
        self._size += 1
        return True, displaced

    def pop(self, count: int, alive: Callable[[T], bool]) -> list[T]:
        """Remove and return up to ``count`` items in fair order; those not ``alive`` are dropped, uncharged."""
        taken: list[T] = []
        while len(taken) < count and self._lanes:
            if len(self._lanes) == 1:
                tenant = next(iter(self._lanes))
            else:
                tenant = min(self._lanes, key=self._finish.__getitem__)
            item = self._lanes[tenant].popleft()
            self._size -= 1
            if alive(item):
                self._virtual = self._finish[tenant]
                self._finish[tenant] += 1.0 / self._weights.get(tenant, 1.0)
                taken.append(item)
            self._drop_if_empty(tenant)
        if not self._lanes:  # nobody waits: forget the past, so that names do not pile up
            self._finish.clear()
            self._virtual = 0.0
        return taken

    def drain(self) -> list[T]:
        """Remove and return everything."""
        items = [item for lane in self._lanes.values() for item in lane]
        self._lanes.clear()
        self._finish.clear()
        self._size = 0
        return items

    def _over_share(self, newcomer: str) -> str | None:
        tenants = set(self._lanes) | {newcomer}
        total = sum(self._weights.get(tenant, 1.0) for tenant in tenants)

        def excess(tenant: str) -> float:
            return self.backlog(tenant) - self._capacity * self._weights.get(tenant, 1.0) / total

        if excess(newcomer) + 1.0 > 0.0:
            return None
        victim = max(self._lanes, key=excess)
        return victim if excess(victim) > 0 else None

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._lanes[tenant]:
            del self._lanes[tenant]
