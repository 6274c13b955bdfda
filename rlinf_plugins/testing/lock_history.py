"""Oracles over the history of a device lock: what any run, however wild, must satisfy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """One interval in which an owner believed it held devices.

    Attributes:
        token: Fencing token of the lease.
        owner: Who held it.
        devices: What it held.
        start: When the grant was seen, in seconds.
        end: When it was given up or its session was over, in seconds.
        shared: Whether others could hold the same devices.
        nbytes: Bytes claimed on each device, if shared.
    """

    token: int
    owner: str
    devices: frozenset[str]
    start: float
    end: float
    shared: bool = False
    nbytes: int = 0


def check_holds(holds: Iterable[Hold], capacity: Mapping[str, int]) -> None:
    """Check mutual exclusion, the memory of shared holders, and that tokens grow with the grants of each device.

    O(n log n) in the number of holds.

    Raises:
        AssertionError: With the offending pair.
    """
    by_device: dict[str, list[Hold]] = {name: [] for name in capacity}
    tokens: dict[int, Hold] = {}
    for hold in holds:
        assert hold.start <= hold.end, f"a hold ends before it starts: {hold}"
        assert hold.token not in tokens, f"token {hold.token} granted twice: {tokens[hold.token]} and {hold}"
        tokens[hold.token] = hold
        for name in hold.devices:
            by_device[name].append(hold)
    for name, on_it in by_device.items():
        on_it.sort(key=lambda hold: (hold.start, hold.token))
        _check_device(name, on_it, capacity[name])


def _check_device(name: str, holds: list[Hold], capacity: int) -> None:
    active: list[Hold] = []
    newest: Hold | None = None
    for hold in holds:
        for over in (other for other in active if other.end <= hold.start):
            newest = over if newest is None or over.token > newest.token else newest
        assert newest is None or hold.token > newest.token, f"{name}: token went back from {newest} to {hold}"
        active = [other for other in active if other.end > hold.start]
        for other in active:
            both_shared = hold.shared and other.shared
            assert both_shared, f"{name}: held twice at once by {other} and {hold}"
        active.append(hold)
        if hold.shared:
            used = sum(other.nbytes for other in active)
            assert used <= capacity, f"{name}: {used} of {capacity} bytes claimed at {hold.start} by {active}"
