"""Bytes per device: what is booked, what is left, what can never fit; and what a move costs in seconds."""

from collections.abc import Collection, Mapping

from rlinf_plugins.core.errors import ExceedsCapacityError, UnknownDeviceError

DEFAULT_BYTES_PER_S = 10e9
"""Assumed for a move until one was measured; the order of a pinned copy over PCIe 4."""

_NEWEST = 0.5
"""Weight of the newest measurement in the running mean."""


class Budget:
    """The memory of each device and who has it booked. Bookings never exceed a device's capacity.

    Args:
        capacity: Bytes of each device that residents may occupy, by name.
    """

    def __init__(self, capacity: Mapping[str, int]) -> None:
        self.capacity = dict(capacity)
        self._booked: dict[str, dict[str, int]] = {name: {} for name in capacity}

    def used(self, device: str) -> int:
        """Bytes booked on ``device``."""
        return sum(self._booked[device].values())

    def left(self, device: str) -> int:
        """Bytes of ``device`` that are not booked."""
        return self.capacity[device] - self.used(device)

    def on(self, device: str) -> dict[str, int]:
        """Bytes booked on ``device``, by resident."""
        return dict(self._booked[device])

    def missing(self, footprint: Mapping[str, int]) -> dict[str, int]:
        """Bytes that must become free on each device before ``footprint`` fits; empty if it fits now."""
        short = {device: nbytes - self.left(device) for device, nbytes in footprint.items()}
        return {device: nbytes for device, nbytes in short.items() if nbytes > 0}

    def book(self, resident: str, footprint: Mapping[str, int]) -> None:
        """Book ``footprint`` for ``resident``, in place of what it had booked.

        Raises:
            ExceedsCapacityError: It does not fit beside the others; nothing is changed.
        """
        for device, nbytes in footprint.items():
            others = self.used(device) - self._booked[device].get(resident, 0)
            if nbytes and others + nbytes > self.capacity[device]:
                raise ExceedsCapacityError(
                    f"{resident} needs {nbytes} bytes on {device}, {self.capacity[device] - others} of "
                    f"{self.capacity[device]} are left beside {_listing(self.on(device), resident)}"
                )
        for device, nbytes in footprint.items():
            if nbytes:
                self._booked[device][resident] = nbytes
            else:
                self._booked[device].pop(resident, None)

    def check_fits(self, what: str, footprints: Mapping[str, Mapping[str, int]]) -> None:
        """Refuse residents that can never be on their devices together.

        Args:
            what: Who needs them together, for the message.
            footprints: Bytes on each device, by resident.

        Raises:
            UnknownDeviceError: A device is not in the budget.
            ExceedsCapacityError: With the numbers.
        """
        for device in sorted({device for footprint in footprints.values() for device in footprint}):
            if device not in self.capacity:
                raise UnknownDeviceError(f"{what} needs device {device!r}; the budget has {', '.join(self.capacity)}")
            shares = {name: footprint[device] for name, footprint in footprints.items() if footprint.get(device)}
            if sum(shares.values()) > self.capacity[device]:
                raise ExceedsCapacityError(
                    f"{what} can never run: it needs {sum(shares.values())} bytes on {device} "
                    f"({_listing(shares)}), which has {self.capacity[device]}"
                )


class MoveCosts:
    """Seconds a resident's onload and offload take: measured where they were, by bandwidth before."""

    def __init__(self, bytes_per_s: float = DEFAULT_BYTES_PER_S) -> None:
        self._bytes_per_s = bytes_per_s
        self._seconds: dict[tuple[str, str], float] = {}
        self._settled: set[str] = set()

    def settle(self, resident: str, seconds: float) -> None:
        """Take ``seconds`` for every move of ``resident`` from now on, whatever is measured."""
        self._settled.add(resident)
        self._seconds |= dict.fromkeys([("onload", resident), ("offload", resident)], seconds)

    def seconds(self, move: str, resident: str, footprint: Mapping[str, int]) -> float:
        """Expected seconds of ``move`` (``"onload"`` or ``"offload"``); devices move at the same time."""
        measured = self._seconds.get((move, resident))
        return max(footprint.values(), default=0) / self._bytes_per_s if measured is None else measured

    def measured(self, move: str, resident: str, seconds: float) -> None:
        """Learn from a move that took ``seconds``."""
        if resident in self._settled:
            return
        before = self._seconds.get((move, resident), seconds)
        self._seconds[(move, resident)] = _NEWEST * seconds + (1 - _NEWEST) * before


def _listing(shares: Mapping[str, int], without: str = "") -> str:
    others: Collection[str] = [f"{name} {nbytes}" for name, nbytes in shares.items() if name != without]
    return ", ".join(others) or "nothing"
