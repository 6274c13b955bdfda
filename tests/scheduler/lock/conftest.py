"""A switcher on simulated time with residents that misbehave on request."""

import asyncio
from types import SimpleNamespace

import pytest

from rlinf_plugins.scheduler.lock.fence import MemoryFence
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident

GB = 10**9


class Wayward(VirtualResident):
    """A virtual resident with the faults real ones have."""

    lag_until_synchronised = False
    """Its bytes are free only once somebody synchronises the device."""
    early_ok_s = 0.0
    """It reports that it left this many seconds before its bytes are gone."""
    never_leaves = False
    takes_bytes: int | None = None
    """Bytes it takes instead of those it declared; 0: reports success and takes none."""
    fails_onload = False
    drains_for_ever = False
    left = False

    async def drain(self):
        if self.drains_for_ever:
            await asyncio.sleep(float("inf"))
        await super().drain()

    async def offload(self, permit):
        with self.fence.admit(permit, self.footprint):
            await asyncio.sleep(self.move_s)
        self.left = True
        if self.never_leaves or self.lag_until_synchronised:
            return
        if self.early_ok_s:
            asyncio.get_running_loop().call_later(self.early_ok_s, self.free)
        else:
            self.free()

    def free(self):
        for device in self.footprint:
            self.devices.free(device, self.name)

    async def onload(self, permit):
        with self.fence.admit(permit, self.footprint):
            for device, nbytes in self.footprint.items():
                self.devices.allocate(device, self.name, nbytes if self.takes_bytes is None else self.takes_bytes)
            self.left = False
            await asyncio.sleep(self.move_s)
            if self.fails_onload:
                raise RuntimeError("CUDA error")

    async def resident_bytes(self):
        if self.lag_until_synchronised and self.left:
            self.free()
        return await super().resident_bytes()


class Rig(SimpleNamespace):
    """Devices, fence, lock and switcher that belong together."""

    def resident(self, name, nbytes, devices=("d0",), **faults):
        footprint = nbytes if isinstance(nbytes, dict) else dict.fromkeys(devices, nbytes)
        resident = Wayward(name, footprint, self.devices, self.fence)
        for fault, value in faults.items():
            setattr(resident, fault, value)
        return resident

    async def add(self, name, nbytes, devices=("d0",), after=(), **faults):
        resident = self.resident(name, nbytes, devices, **faults)
        await self.switcher.add(resident, after=after)
        return resident

    def spans(self, name):
        return [span for span in self.switcher.recorder.drain() if span.name == name]


@pytest.fixture
def make_rig():
    """Build a rig inside a running virtual-time loop."""

    def build(capacity=None, **options):
        capacity = capacity or {"d0": 10 * GB, "d1": 10 * GB}
        clock = asyncio.get_running_loop().time
        devices = VirtualDevices(capacity)
        lock = LocalLock(capacity, clock=clock)
        options = {"bytes_per_s": 1e9, "used_bytes": devices.used_bytes, **options}
        switcher = Switcher(lock, capacity, clock=clock, **options)
        return Rig(devices=devices, fence=MemoryFence(clock), lock=lock, switcher=switcher, clock=clock)

    return build
