"""One switch: choose who leaves, get the right to move, send them off, bring the one that is needed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from rlinf_plugins.core.clock import Clock
from rlinf_plugins.core.errors import ResidentStateError
from rlinf_plugins.core.spans import SpanRecorder
from rlinf_plugins.scheduler.lock import eviction
from rlinf_plugins.scheduler.lock.budget import Budget, MoveCosts
from rlinf_plugins.scheduler.lock.demand import Demands
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.manager import INF
from rlinf_plugins.scheduler.lock.mover import Mover
from rlinf_plugins.scheduler.lock.registry import Registry
from rlinf_plugins.scheduler.lock.types import Lease, Priority


class SwitcherLock(Protocol):
    """What the switcher asks of a lock; ``DeviceLock`` and ``LocalLock`` have it."""

    async def aacquire(
        self,
        devices: Iterable[str],
        *,
        owner: str = "",
        shared: bool = False,
        nbytes: int = 0,
        priority: Priority = ...,
        timeout_s: float = INF,
    ) -> Lease:
        """Acquire devices all at once."""
        ...

    async def arelease(self, lease: Lease) -> bool:
        """Leave a lease once."""
        ...

    def permit(self, lease: Lease) -> Permit:
        """Return what a fence asks to see."""
        ...

    def reprioritise(self, owner: str, priority: Priority) -> None:
        """Move a waiting request."""
        ...


class Swaps:
    """Moves residents for a switcher.

    Args:
        lock: The device lock.
        registry: The residents.
        demands: Who needs them.
        budget: The memory of the devices.
        costs: What moves cost.
        mover: Moves one resident.
        recorder: Takes the spans.
        clock: Source of monotonic time.
    """

    def __init__(
        self,
        lock: SwitcherLock,
        registry: Registry,
        demands: Demands,
        budget: Budget,
        costs: MoveCosts,
        mover: Mover,
        recorder: SpanRecorder,
        clock: Clock,
    ) -> None:
        self._lock = lock
        self._registry = registry
        self._demands = demands
        self._budget = budget
        self._costs = costs
        self._mover = mover
        self._recorder = recorder
        # Moves on overlapping devices follow each other; the same all-at-once rule keeps them from deadlock.
        self._moves = LocalLock(budget.capacity, clock=clock)
        self._tokens: dict[str, int] = {}

    def granted(self, lease: Lease) -> None:
        """Remember the newest token of each device."""
        self._tokens.update(dict.fromkeys(lease.devices, lease.token))

    def seconds(self, move: str, name: str) -> float:
        """Expected seconds of a move of ``name``."""
        return self._costs.seconds(move, name, self._registry.footprint(name))

    def fits_beside(self, name: str, others: Iterable[str]) -> bool:
        """Whether ``name`` and all of ``others``, with what they build on, can be there together."""
        kept = {*self._registry.with_bases(others), *self._registry.with_bases([name])}
        return all(
            sum(self._registry.footprint(other).get(device, 0) for other in kept) <= self._budget.capacity[device]
            for device in self._registry.footprint(name)
        )

    def displaced_by(self, names: Iterable[str], others: Iterable[str]) -> set[str]:
        """Which of ``others`` are on the devices and could not stay there beside ``names``."""
        names = list(names)
        return {
            other
            for other in others
            if other not in names
            and self._mover.is_on(other)
            and not all(self.fits_beside(name, [other, *names]) for name in names)
        }

    async def bring(
        self, name: str, reason: str, staying: Callable[[], Iterable[str]], *, urgent: bool = False
    ) -> None:
        """Bring ``name``, evicting who may leave; nothing happens if it is there.

        Args:
            name: Who comes.
            reason: For the span.
            staying: Gives the residents that must not leave, at the moment it is called.
            urgent: Somebody holds devices for it already: go before moves that are only made ahead.

        Raises:
            ExceedsCapacityError: Those who stay leave no room.
            NotFreedError, ResidentBytesError, StaleTokenError: A step of the switch failed.
        """
        needed = own = self._registry.devices([name])
        while not self._mover.is_on(name):
            ours = needed
            async with self._moving(ours, urgent):
                if self._mover.is_on(name):
                    return
                victims = self._victims(name, set(staying()))
                # Whoever leaves does so from all its devices; their moves must be ours too, all at once.
                needed = own | self._registry.devices(victims)
                if needed <= ours:
                    await self._switch(name, victims, reason)

    async def send_off(self, name: str, reason: str) -> None:
        """Take ``name`` and what builds on it off their devices.

        Raises:
            ResidentStateError: One of them is in use.
            NotFreedError, StaleTokenError: A step failed.
        """
        names = self._registry.with_dependents([name])
        async with self._moving(self._registry.devices(names), urgent=True):
            busy = self._demands.in_use & set(names)
            if busy:
                raise ResidentStateError(f"{name} cannot leave: {', '.join(sorted(busy))} in use")
            for leaving in names:
                await self._offload(leaving, reason)

    def close(self) -> None:
        """Refuse further moves."""
        self._moves.close()

    # --- internals ----------------------------------------------------------------------------------------------

    async def _switch(self, name: str, victims: Sequence[str], reason: str) -> None:
        footprint = self._registry.footprint(name)
        with self._recorder.span("switch", resident=name, reason=reason, waiters=len(self._demands.waiting)) as span:
            span["evicted"] = list(victims)
            span["bytes_in"] = sum(footprint.values())
            span["bytes_out"] = sum(sum(self._registry.footprint(victim).values()) for victim in victims)
            for victim in victims:
                if not await self._offload(victim, reason):
                    return  # somebody began to use it in the meantime: choose again
            async with self._authority(frozenset(footprint)) as permit:
                await self._mover.onload(self._registry.get(name), permit)

    async def _offload(self, name: str, reason: str) -> bool:
        """Take one resident off; False if it is in use."""
        resident = self._registry.get(name)
        if not any(self._budget.on(device).get(name) for device in resident.footprint):
            return True
        async with self._authority(frozenset(resident.footprint)) as permit:
            if name in self._demands.in_use:
                return False
            # No await between the check and the mover's mark that the resident is not ready for use any more.
            with self._recorder.span("evict", resident=name, reason=reason):
                await self._mover.offload(resident, permit)
        return True

    def _victims(self, name: str, staying: set[str]) -> tuple[str, ...]:
        """Who leaves so that ``name`` fits, dependents before their bases; none if it fits, or cannot."""
        footprint = self._registry.footprint(name)
        on = {device: self._budget.on(device) for device in footprint}
        own = {device: on[device].get(name, 0) for device in footprint}
        missing = self._budget.missing({device: nbytes - own[device] for device, nbytes in footprint.items()})
        if not missing:
            return ()
        kept = {name, *self._registry.with_bases([name, *staying])}
        leaving = {other for device in missing for other in on[device]} - kept
        room = {
            device: self._budget.left(device) + own[device] + sum(on[device].get(other, 0) for other in leaving)
            for device in footprint
        }
        sizes = {other: self._registry.footprint(other) for other in {name, *leaving}}
        future = [other for other in self._demands.future if other != name]
        chosen = eviction.choose(name, leaving, sizes, room, future, self.seconds) or ()
        ordered: list[str] = []
        for victim in chosen:
            ordered += [other for other in self._registry.with_dependents([victim]) if other not in ordered]
        return tuple(ordered)

    def _move_owner(self) -> str:
        return f"move {id(asyncio.current_task())}"

    @asynccontextmanager
    async def _moving(self, devices: frozenset[str], urgent: bool) -> AsyncIterator[None]:
        """Keep other moves off ``devices``."""
        priority = Priority(urgency=float(urgent))
        lease = await self._moves.aacquire(devices, owner=self._move_owner(), priority=priority)
        try:
            yield
        finally:
            await self._moves.arelease(lease)

    @asynccontextmanager
    async def _authority(self, devices: frozenset[str]) -> AsyncIterator[Callable[[], Permit]]:
        """Yield a source of permits for ``devices``.

        A device in use is covered by its user's lease, an idle one by the last token that was granted here: if
        somebody else got it since, its fence refuses. Only a device never leased here is locked for the occasion.
        """
        unknown = frozenset(device for device in devices if device not in self._tokens)
        async with contextlib.AsyncExitStack() as stack:
            if unknown:
                lease = await self._lock.aacquire(unknown, owner=self._move_owner(), timeout_s=0)
                stack.push_async_callback(self._lock.arelease, lease)
                self.granted(lease)
            yield lambda: self._permit(devices)

    def _permit(self, devices: frozenset[str]) -> Permit:
        leases = {lease.token: lease for device in devices if (lease := self._demands.lease_on(device)) is not None}
        permits = [self._lock.permit(lease) for lease in leases.values()]
        first = min(permits, key=lambda permit: permit.not_after, default=Permit({}, "switcher"))
        tokens = {device: self._tokens[device] for device in devices}
        return Permit(tokens, first.holder, first.not_after, first.host)
