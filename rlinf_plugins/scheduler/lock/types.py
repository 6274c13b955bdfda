"""The values the device lock speaks in: leases, tickets, priorities, events. All immutable, all serialisable."""

from typing import Literal

import msgspec

Mode = Literal["exclusive", "shared"]


class Priority(msgspec.Struct, frozen=True, kw_only=True):
    """Who goes first among those who wait for the same devices.

    Compared field by field in the order given, so that data dependency decides before placement. A request that has
    waited too long goes ahead of all of them (see ``LockManager``).

    Attributes:
        ready: The worker's inputs are there; one that would only wait for data goes last.
        urgency: How much waits behind the worker's output: seconds on the longest path to the end of the flow, or
            the number of stages it unblocks. Any scale, as long as the whole flow uses the same one.
        resident: The worker's bytes are on the devices already, so that no onload is needed.
    """

    ready: bool = True
    urgency: float = 0.0
    resident: bool = False

    def key(self) -> tuple[bool, float, bool]:
        """Sort key; the smallest goes first."""
        return (not self.ready, -self.urgency, not self.resident)


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to use a set of devices until it is released or its session misses its heartbeats.

    Attributes:
        token: Fencing token: larger than that of every lease granted before. It also names the lease.
        owner: Who holds it.
        session: Whose heartbeats keep it alive.
        devices: The devices, all of them or none.
        shared: Whether other shared leases may hold the same devices, as far as their memory allows.
        nbytes: Bytes claimed on each device of a shared lease; 0 for an exclusive one, which has all of them.
    """

    token: int
    owner: str
    session: str
    devices: frozenset[str]
    shared: bool
    nbytes: int


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """A request that waits; the grant or the refusal arrives as an event with the same number."""

    number: int
    owner: str


class Granted(msgspec.Struct, frozen=True, tag="granted"):
    """A waiting request got its devices."""

    ticket: int
    lease: Lease


class TimedOut(msgspec.Struct, frozen=True, tag="timed_out"):
    """A waiting request reached its time limit; ``reason`` says who was in the way."""

    ticket: int
    reason: str


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn"):
    """A waiting request was cancelled or its session died."""

    ticket: int
    reason: str


class Revoked(msgspec.Struct, frozen=True, tag="revoked"):
    """A lease ended without a release, because its session died."""

    lease: Lease
    reason: str


Event = Granted | TimedOut | Withdrawn | Revoked


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """One lease, as introspection shows it."""

    owner: str
    session: str
    token: int
    devices: tuple[str, ...]
    mode: Mode
    nbytes: int
    count: int
    held_s: float
    expires_in_s: float


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting request, as introspection shows it; ``why`` is written for people."""

    owner: str
    ticket: int
    devices: tuple[str, ...]
    mode: Mode
    nbytes: int
    waited_s: float
    bypassed: int
    starved: bool
    why: str


class LockState(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds what, who waits for what and why.

    Attributes:
        devices: Capacity in bytes of each device.
        free: Devices nobody holds.
        holders: Leases, oldest first.
        waiters: Requests in the order in which they would be served.
        recovering_s: Seconds for which a restarted lock still waits for earlier holders to come forward.
    """

    devices: dict[str, int]
    free: tuple[str, ...]
    holders: tuple[Holder, ...]
    waiters: tuple[Waiter, ...]
    recovering_s: float = 0.0
