"""Brings the next resident while the current one works, where memory allows."""

import asyncio
import contextlib

from rlinf_plugins.core.errors import RlinfError
from rlinf_plugins.scheduler.lock.demand import Demand, Demands
from rlinf_plugins.scheduler.lock.mover import Mover
from rlinf_plugins.scheduler.lock.registry import Registry
from rlinf_plugins.scheduler.lock.swaps import Swaps, SwitcherLock


class Prefetcher:
    """Looks at who waits and who is expected, and starts what fits beside all who are needed before.

    Args:
        lock: The device lock; a request whose resident has arrived moves up in its queue.
        registry: The residents.
        demands: Who needs them.
        mover: Knows where they are.
        swaps: Brings them.
        enabled: Whether to do anything.
    """

    def __init__(
        self, lock: SwitcherLock, registry: Registry, demands: Demands, mover: Mover, swaps: Swaps, enabled: bool
    ) -> None:
        self._lock = lock
        self._registry = registry
        self._demands = demands
        self._mover = mover
        self._swaps = swaps
        self._enabled = enabled
        self._running: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Start what can be started now. Called whenever something changed."""
        if not self._enabled:
            return
        staying = set(self._demands.in_use)
        for demand in self._demands.waiting:
            if not any(self._demands.lease_on(device) for device in demand.devices):
                # About to be granted: it brings what it needs itself, and nothing should be in its way. Whoever comes
                # after it is looked at when it has begun.
                return
            for name in demand.names:
                self._consider(name, staying, demand)
        for name in self._demands.expected:
            self._consider(name, staying, None)

    async def close(self) -> None:
        """Stop what is under way."""
        self._enabled = False
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def onload_s(self, demand: Demand) -> float:
        """Seconds to bring what ``demand`` needs and is not there."""
        return sum(self._swaps.seconds("onload", name) for name in demand.names if not self._mover.is_on(name))

    def _consider(self, name: str, staying: set[str], demand: Demand | None) -> None:
        if name in staying:
            return  # someone nearer needs it and was looked at
        ahead = set(staying)
        staying.add(name)
        if self._mover.is_on(name) or name in self._running or not self._swaps.fits_beside(name, ahead):
            return
        if not all(self._mover.is_on(base) for base in self._registry.base(name)):
            return
        task = asyncio.ensure_future(self._run(name, ahead, demand))
        self._running[name] = task
        task.add_done_callback(lambda _: self._running.pop(name, None))

    async def _run(self, name: str, ahead: set[str], demand: Demand | None) -> None:
        reason = f"prefetched for {demand.owner}" if demand is not None else "expected next"
        # A failure leaves the resident off; whoever uses it brings it then, and gets the error if it persists.
        with contextlib.suppress(RlinfError):
            await self._swaps.bring(name, reason, lambda: ahead | self._demands.in_use)
            if demand is not None and demand.lease is None:
                self._lock.reprioritise(demand.owner, demand.priority(self.onload_s(demand)))
            self.look()
