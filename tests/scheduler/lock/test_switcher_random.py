"""Random flows with cancelled waits and faulty residents: nothing overlaps, nothing overflows, everything ends."""

import asyncio
import contextlib
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_plugins.core.errors import LockTimeoutError, RlinfError
from rlinf_plugins.scheduler.lock.virtual_time import run
from rlinf_plugins.testing.lock_history import Hold, check_holds

CAPACITY = {"d0": 100, "d1": 100, "d2": 100}


class Soak:
    """One random run: residents, users, and what is checked while they work."""

    def __init__(self, rig, rng: random.Random, faults: bool) -> None:
        self.rig = rig
        self.rng = rng
        self.faults = faults
        self.in_use: dict[str, int] = {}
        self.holds: list[Hold] = []
        self.finished = 0
        self.granted: dict[int, float] = {}
        acquire = rig.lock.aacquire

        async def noting(*args, **options):
            lease = await acquire(*args, **options)
            self.granted[lease.token] = rig.clock()
            return lease

        rig.lock.aacquire = noting

    async def populate(self) -> None:
        for index in range(self.rng.randint(2, 6)):
            devices = self.rng.sample(sorted(CAPACITY), self.rng.randint(1, 3))
            footprint = {device: self.rng.randint(10, 60) for device in devices}
            resident = self.guarded(self.rig.resident(f"r{index}", footprint))
            if self.faults and self.rng.random() < 0.3:
                setattr(resident, *self.rng.choice([("early_ok_s", 3.0), ("lag_until_synchronised", True)]))
            earlier = [r for r in self.names() if set(self.rig.switcher._registry.footprint(r)) <= set(footprint)]
            after = [self.rng.choice(earlier)] if earlier and self.rng.random() < 0.3 else []
            with contextlib.suppress(RlinfError):  # together with what it builds on it may be too large
                await self.rig.switcher.add(resident, after=after)

    def names(self) -> list[str]:
        return list(self.rig.switcher._registry._residents)

    def guarded(self, resident):
        offload = resident.offload

        async def checked(permit):
            assert not self.in_use.get(resident.name), f"{resident.name} was taken off while it was used"
            await offload(permit)

        resident.offload = checked
        return resident

    async def user(self, delay: float) -> None:
        await asyncio.sleep(delay)
        name, shared = self.rng.choice(self.names()), self.rng.random() < 0.3
        needed = self.rig.switcher._registry.with_bases([name])
        with contextlib.suppress(LockTimeoutError):
            async with self.rig.switcher.use(
                name,
                shared=shared,
                urgency=self.rng.random() * 50,
                ready=self.rng.random() < 0.8,
                timeout_s=self.rng.choice([float("inf"), 30.0]),
            ) as lease:
                for other in needed:
                    self.in_use[other] = self.in_use.get(other, 0) + 1
                try:
                    assert all(self.rig.switcher.is_on(other) for other in needed)
                    await asyncio.sleep(self.rng.random() * 20)
                    assert all(self.rig.switcher.is_on(other) for other in needed)
                    for other in needed:
                        for device, nbytes in self.rig.switcher._registry.footprint(other).items():
                            assert self.rig.devices.held(device, other) == nbytes
                finally:
                    for other in needed:
                        self.in_use[other] -= 1
                    self.holds.append(self.hold(lease))
        self.finished += 1

    def hold(self, lease) -> Hold:
        return Hold(
            token=lease.token,
            owner=lease.owner,
            devices=lease.devices,
            start=self.granted[lease.token],
            end=self.rig.clock(),
            shared=lease.shared,
            nbytes=lease.nbytes,
        )

    async def run(self) -> None:
        await self.populate()
        if self.rng.random() < 0.5:
            self.rig.switcher.expect(self.rng.choices(self.names(), k=6))
        users = [asyncio.ensure_future(self.user(self.rng.random() * 100)) for _ in range(25)]
        for user in users:
            if self.rng.random() < 0.15:
                asyncio.get_running_loop().call_later(self.rng.random() * 200, user.cancel)
        for result in await asyncio.gather(*users, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        await self.rig.switcher.close()


def soak(make_rig, seed: int, faults: bool, prefetch: bool = True) -> Soak:
    async def main():
        rig = make_rig(CAPACITY, bytes_per_s=20.0, prefetch=prefetch)
        test = Soak(rig, random.Random(seed), faults)
        for device in CAPACITY:
            assert rig.devices.used_bytes(device) == 0
        await test.run()
        state = await rig.lock.astate()
        assert state.holders == ()
        assert state.waiters == ()
        return test

    test, _ = run(main())
    check_holds(test.holds, CAPACITY)
    assert all(peak <= CAPACITY[device] for device, peak in test.rig.devices.peak.items())
    assert test.finished > 5
    return test


@settings(max_examples=40, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), faults=st.booleans(), prefetch=st.booleans())
def test_random_flows(seed, faults, prefetch, make_rig):
    soak(make_rig, seed, faults, prefetch)
