"""Three residents take turns on a device that cannot hold all of them; runs anywhere, in about a second.

python examples/lock.py
"""

import asyncio

from rlinf_plugins.scheduler.lock.fence import MemoryFence
from rlinf_plugins.scheduler.lock.local import LocalLock
from rlinf_plugins.scheduler.lock.switcher import Switcher
from rlinf_plugins.scheduler.lock.virtual import VirtualDevices, VirtualResident

MB = 10**6


async def main() -> None:
    capacity = {"gpu:0": 100 * MB}
    devices, fence = VirtualDevices(capacity), MemoryFence()
    switcher = Switcher(LocalLock(capacity), capacity, used_bytes=devices.used_bytes)
    for name, size in (("rollout", 80), ("actor", 60), ("critic", 30)):
        await switcher.add(VirtualResident(name, {"gpu:0": size * MB}, devices, fence, bytes_per_s=1e9))
    switcher.check_plan({"generate": ["rollout"], "update": ["actor", "critic"]})

    for _ in range(2):
        switcher.expect(["rollout", "actor", "critic"])
        for name in ("rollout", "actor", "critic"):
            async with switcher.use(name) as lease:
                print(f"{name:8} works with token {lease.token}; {devices.used_bytes('gpu:0') // MB} MB on the device")
                await asyncio.sleep(0.05)

    for span in switcher.recorder.drain():
        if span.name == "switch":
            gone = ", ".join(span.attributes["evicted"]) or "nobody"
            print(
                f"{span.seconds:.3f} s: {span.attributes['resident']} came, {gone} left ({span.attributes['reason']})"
            )
    await switcher.close()


if __name__ == "__main__":
    asyncio.run(main())
