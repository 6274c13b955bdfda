"""Moves one resident on or off its devices as a checked chain, and keeps the books while bytes are on the way."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

from rlinf_plugins.core.clock import Clock
from rlinf_plugins.core.errors import NotFreedError, ResidentBytesError
from rlinf_plugins.core.spans import SpanRecorder
from rlinf_plugins.scheduler.lock.budget import Budget, MoveCosts
from rlinf_plugins.scheduler.lock.fence import Permit
from rlinf_plugins.scheduler.lock.resident import Resident

Place = Literal["off", "on"]
PermitSource = Callable[[], Permit]
"""Makes a fresh permit right before each move: an old one may have run out while the last step took its time."""

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.25


class Mover:
    """Onloads and offloads residents within a budget.

    Bytes are booked before an onload begins and unbooked when an offload is confirmed, so that what is booked bounds
    what is there at every moment.

    Args:
        budget: The memory of the devices.
        costs: Learns from every move.
        recorder: Takes a span for each step.
        clock: Source of monotonic time.
        used_bytes: Measures all bytes in use on a device, whoever's they are; None if it cannot be measured. With it,
            bytes of strangers (a killed job's leftovers, a suspended process) are found before an onload.
        patience_s: How long to wait for a resident to drain, and then for its bytes to be gone.
        slack: Bytes that may stay behind on a device after an offload, and that an onload may take beyond the
            declared footprint (allocator blocks, contexts).
    """

    def __init__(
        self,
        budget: Budget,
        costs: MoveCosts,
        recorder: SpanRecorder,
        clock: Clock,
        used_bytes: Callable[[str], int] | None = None,
        patience_s: float = 60.0,
        slack: int = 0,
    ) -> None:
        self._budget = budget
        self._costs = costs
        self._recorder = recorder
        self._clock = clock
        self._used_bytes = used_bytes
        self._patience = patience_s
        self._slack = slack
        self._places: dict[str, Place] = {}

    def is_on(self, name: str) -> bool:
        """Whether a resident is on its devices, ready for use."""
        return self._places.get(name) == "on"

    async def adopt(self, resident: Resident) -> None:
        """Take a resident into the books as it is found.

        Raises:
            ExceedsCapacityError: It is on devices that are full already.
        """
        there = await resident.resident_bytes()
        on = any(there.get(device, 0) > self._slack for device in resident.footprint)
        self._budget.book(resident.name, resident.footprint if on else {})
        self._places[resident.name] = "on" if on else "off"

    async def offload(self, resident: Resident, permit: PermitSource) -> None:
        """Drain, offload, and wait until the bytes are gone.

        Raises:
            NotFreedError: It did not drain, or its bytes are still there; it stays booked.
            StaleTokenError: The permit was refused; nothing was moved.
        """
        name, start = resident.name, self._clock()
        self._places[name] = "off"  # from here on it must be brought back before it can be used
        with self._recorder.span("drain", resident=name):
            await self._drain(resident)
        with self._recorder.span("offload", resident=name, bytes=sum(resident.footprint.values())):
            await resident.offload(permit())
        with self._recorder.span("confirm", resident=name):
            await self._confirm_gone(resident)
        self._budget.book(name, dict.fromkeys(resident.footprint, 0))
        self._costs.measured("offload", name, self._clock() - start)

    async def onload(self, resident: Resident, permit: PermitSource) -> None:
        """Book the bytes, check that they are free in fact, onload, measure, resume.

        Raises:
            ExceedsCapacityError: It does not fit beside what is booked.
            NotFreedError: The books say it fits, but the device's memory is taken by somebody unknown to them.
            ResidentBytesError: It takes other than it declared; it was sent off again.
            StaleTokenError: The permit was refused; nothing was moved.
        """
        name, footprint, start = resident.name, resident.footprint, self._clock()
        self._check_really_free(name, footprint)
        self._budget.book(name, footprint)
        try:
            with self._recorder.span("onload", resident=name, bytes=sum(footprint.values())):
                await resident.onload(permit())
            await self._check_size(resident)
        except BaseException:
            await self._undo(resident, permit)
            raise
        self._places[name] = "on"
        with self._recorder.span("resume", resident=name):
            await resident.resume()
        self._costs.measured("onload", name, self._clock() - start)

    async def _drain(self, resident: Resident) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await resident.drain()
        except TimeoutError as error:
            self._places[resident.name] = "on"  # nothing was moved: it goes on working where it is
            await resident.resume()
            raise NotFreedError(f"{resident.name} did not drain within {self._patience:g} s") from error

    async def _confirm_gone(self, resident: Resident) -> None:
        give_up, pause = self._clock() + self._patience, _FIRST_PAUSE_S
        while left := await self._left_behind(resident):
            if self._clock() >= give_up:
                raise NotFreedError(
                    f"{resident.name} reported that it left, but {left} bytes are still there after "
                    f"{self._patience:g} s (up to {self._slack} would be tolerated)"
                )
            await asyncio.sleep(pause)  # memory that is freed behind our back gives no signal
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _left_behind(self, resident: Resident) -> dict[str, int]:
        there = await resident.resident_bytes()
        return {device: nbytes for device, nbytes in there.items() if nbytes > self._slack}

    def _check_really_free(self, name: str, footprint: Mapping[str, int]) -> None:
        if self._used_bytes is None:
            return
        for device, nbytes in footprint.items():
            used = self._used_bytes(device) - self._budget.on(device).get(name, 0)
            if used + nbytes > self._budget.capacity[device]:
                raise NotFreedError(
                    f"{name} needs {nbytes} bytes on {device}: {used} of {self._budget.capacity[device]} are in use, "
                    f"but only {self._budget.used(device)} by residents; somebody else is on the device"
                )

    async def _check_size(self, resident: Resident) -> None:
        there = await resident.resident_bytes()
        for device, declared in resident.footprint.items():
            found = there.get(device, 0)
            if found > declared + self._slack or (declared > self._slack and found == 0):
                raise ResidentBytesError(
                    f"{resident.name} declared {declared} bytes on {device} and has {found} there after its onload"
                )

    async def _undo(self, resident: Resident, permit: PermitSource) -> None:
        """Take a half-done onload back. What is still there afterwards stays booked: nobody is put on top."""
        if not await self._left_behind(resident):
            self._budget.book(resident.name, dict.fromkeys(resident.footprint, 0))
            return
        await resident.offload(permit())
        await self._confirm_gone(resident)
        self._budget.book(resident.name, dict.fromkeys(resident.footprint, 0))
