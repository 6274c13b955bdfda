"""Devices made of numbers, and residents for them: what the switcher is tested and simulated with."""

import asyncio
from collections.abc import Mapping

from rlinf_plugins.core.errors import ExceedsCapacityError
from rlinf_plugins.scheduler.lock.fence import Fence, Permit


class VirtualDevices:
    """Memory that is only counted. Like a real device it refuses to hold more than it has.

    Args:
        capacity: Bytes of each device, by name.

    Attributes:
        peak: Most bytes each device ever held.
    """

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.capacity = dict(capacity)
        self._held: dict[str, dict[str, int]] = {device: {} for device in capacity}
        self.peak = dict.fromkeys(capacity, 0)

    def allocate(self, device: str, owner: str, nbytes: int) -> None:
        """Take bytes.

        Raises:
            ExceedsCapacityError: The device is out of memory.
        """
        used = self.used_bytes(device)
        if used + nbytes > self.capacity[device]:
            raise ExceedsCapacityError(
                f"{device} is out of memory: {owner} wants {nbytes} bytes, {used} of {self.capacity[device]} are in use"
            )
        self._held[device][owner] = self.held(device, owner) + nbytes
        self.peak[device] = max(self.peak[device], used + nbytes)

    def free(self, device: str, owner: str) -> None:
        """Give all bytes of ``owner`` back."""
        self._held[device].pop(owner, None)

    def held(self, device: str, owner: str) -> int:
        """Bytes of ``owner`` on ``device``."""
        return self._held[device].get(owner, 0)

    def used_bytes(self, device: str) -> int:
        """All bytes in use on ``device``."""
        return sum(self._held[device].values())


class VirtualResident:
    """A resident of virtual devices: its moves take the seconds a copy of its bytes would.

    Args:
        name: Its name.
        footprint: Bytes on each device.
        devices: Where it lives.
        fence: Guards them.
        bytes_per_s: Bandwidth of its moves.
        drain_s: Seconds until its accepted work is done.
    """

    def __init__(
        self,
        name: str,
        footprint: Mapping[str, int],
        devices: VirtualDevices,
        fence: Fence,
        *,
        bytes_per_s: float = 1e9,
        drain_s: float = 0.0,
    ) -> None:
        self.name = name
        self.footprint: Mapping[str, int] = dict(footprint)
        self.devices = devices
        self.fence = fence
        self.move_s = max(footprint.values(), default=0) / bytes_per_s
        self.drain_s = drain_s

    async def drain(self) -> None:
        """Wait for the accepted work."""
        await asyncio.sleep(self.drain_s)

    async def offload(self, permit: Permit) -> None:
        """Copy the bytes away and free them."""
        with self.fence.admit(permit, self.footprint):
            await asyncio.sleep(self.move_s)
            for device in self.footprint:
                self.devices.free(device, self.name)

    async def onload(self, permit: Permit) -> None:
        """Take the bytes and fill them."""
        with self.fence.admit(permit, self.footprint):
            for device, nbytes in self.footprint.items():
                self.devices.allocate(device, self.name, nbytes)
            await asyncio.sleep(self.move_s)

    async def resident_bytes(self) -> Mapping[str, int]:
        """Bytes it holds on each device."""
        return {device: self.devices.held(device, self.name) for device in self.footprint}

    async def resume(self) -> None:
        """Nothing to do: it has no work of its own."""
