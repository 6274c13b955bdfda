"""Which devices are taken, and by how many bytes: the arithmetic under the lock. Sets of devices are bit masks."""

from collections.abc import Collection, Iterator, Mapping

from rlinf_plugins.core.errors import ConfigError, DeviceSetError, ExceedsCapacityError, UnknownDeviceError
from rlinf_plugins.scheduler.lock.records import Claim

_CACHED_SETS = 4096


class Occupancy:
    """Exclusive and shared claims on a fixed list of devices.

    Args:
        capacity: Bytes of memory of each device, by name.

    Raises:
        ConfigError: There is no device, or a capacity is negative.
    """

    __slots__ = ("_bits", "_masks", "_used", "busy", "capacity", "shared", "sharers")

    def __init__(self, capacity: Mapping[str, int]) -> None:
        if not capacity:
            raise ConfigError("a lock needs at least one device; capacity is empty")
        for name, nbytes in capacity.items():
            if nbytes < 0:
                raise ConfigError(f"capacity of device {name!r} must not be negative, got {nbytes} bytes")
        self.capacity = dict(capacity)
        self.busy = 0
        self.shared = 0
        self.sharers = dict.fromkeys(capacity, 0)
        self._bits = {name: 1 << index for index, name in enumerate(capacity)}
        self._masks: dict[frozenset[str], int] = {}
        self._used = dict.fromkeys(capacity, 0)

    def mask_of(self, devices: frozenset[str]) -> int:
        """Return the bit mask of ``devices``; sets seen before cost one lookup.

        Raises:
            DeviceSetError: The set is empty.
            UnknownDeviceError: It is larger than the cluster or names a device that is not there.
        """
        mask = self._masks.get(devices)
        if mask is None:
            self._check(devices)
            mask = sum(self._bits[name] for name in devices)
            if len(self._masks) >= _CACHED_SETS:
                self._masks.clear()
            self._masks[devices] = mask
        return mask

    def _check(self, devices: Collection[str]) -> None:
        if not devices:
            raise DeviceSetError("an empty set of devices was asked for; name at least one")
        unknown = sorted(name for name in devices if name not in self._bits)
        if len(devices) > len(self._bits):
            raise UnknownDeviceError(f"{len(devices)} devices were asked for, the cluster has {len(self._bits)}")
        if unknown:
            raise UnknownDeviceError(f"unknown devices {', '.join(unknown)}; the cluster has {', '.join(self._bits)}")

    def check_share(self, devices: frozenset[str], nbytes: int) -> None:
        """Refuse a share that could never be granted.

        Raises:
            DeviceSetError: The share claims no bytes, so that nothing would bound how many may enter.
            ExceedsCapacityError: It is larger than one of the devices.
        """
        if nbytes <= 0:
            raise DeviceSetError(f"a shared claim needs the bytes it takes on each device, got {nbytes}")
        for name in sorted(devices):
            if nbytes > self.capacity[name]:
                raise ExceedsCapacityError(
                    f"a share of {nbytes} bytes can never fit on device {name!r}, which has {self.capacity[name]}"
                )

    def fits(self, claim: Claim) -> bool:
        """Say whether a claim could be taken now."""
        if not claim.mask & self.busy:
            return True
        if not claim.shared or claim.mask & (self.busy & ~self.shared):
            return False
        return all(self._used[name] + claim.nbytes <= self.capacity[name] for name in claim.devices)

    def take(self, claim: Claim) -> None:
        """Record a claim that fits."""
        self.busy |= claim.mask
        if claim.shared:
            self.shared |= claim.mask
            for name in claim.devices:
                self.sharers[name] += 1
                self._used[name] += claim.nbytes

    def give(self, claim: Claim) -> None:
        """Take a claim back."""
        if not claim.shared:
            self.busy &= ~claim.mask
            return
        for name in claim.devices:
            self.sharers[name] -= 1
            self._used[name] -= claim.nbytes
            if not self.sharers[name]:
                self.busy &= ~self._bits[name]
                self.shared &= ~self._bits[name]

    def left(self, name: str) -> int:
        """Bytes of ``name`` that shared claims have not taken."""
        return self.capacity[name] - self._used[name]

    def names(self, mask: int) -> Iterator[str]:
        """Yield the devices in ``mask``, in the cluster's order."""
        return (name for name, bit in self._bits.items() if bit & mask)
