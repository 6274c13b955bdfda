"""Who holds, who waits, and why, in words."""

from collections.abc import Mapping

from rlinf_plugins.scheduler.lock.records import Claim
from rlinf_plugins.scheduler.lock.table import LeaseTable
from rlinf_plugins.scheduler.lock.types import Holder, LockState, Waiter

_SHOWN = 8
"""Devices named in one reason; a wait for hundreds of devices must stay readable."""


def describe(table: LeaseTable, deadlines: Mapping[str, float], now: float, recovering_s: float) -> LockState:
    """Return the whole state of a lock at ``now``."""
    devices, fairness = table.devices, table.fairness
    return LockState(
        devices=dict(devices.capacity),
        free=tuple(name for name in devices.capacity if not devices.mask_of(frozenset((name,))) & devices.busy),
        holders=tuple(
            Holder(
                owner=h.lease.owner,
                session=h.lease.session,
                token=h.lease.token,
                devices=tuple(devices.names(h.mask)),
                mode="shared" if h.lease.shared else "exclusive",
                nbytes=h.lease.nbytes,
                count=h.count,
                held_s=now - h.since,
                expires_in_s=deadlines[h.lease.session] - now,
            )
            for h in table.tokens.values()
        ),
        waiters=tuple(
            Waiter(
                owner=w.owner,
                ticket=w.arrival,
                devices=tuple(devices.names(w.mask)),
                mode="shared" if w.shared else "exclusive",
                nbytes=w.nbytes,
                waited_s=now - w.since,
                bypassed=w.bypassed,
                starved=fairness.starved(w, now),
                why=why(w, table, now) if not recovering_s else "the lock is recovering",
            )
            for w in fairness.order(table.waits.values(), now)
        ),
        recovering_s=recovering_s,
    )


def why(wait: Claim, table: LeaseTable, now: float) -> str:
    """Say what keeps ``wait`` from its devices."""
    devices, holders = table.devices, list(table.tokens.values())
    kept = {w: w.mask for w in table.waits.values() if w is not wait and table.fairness.starved(w, now)}
    reasons = []
    for name in devices.names(wait.mask):
        bit = devices.mask_of(frozenset((name,)))
        on_it = [h for h in holders if h.mask & bit]
        blocks = on_it and not (
            wait.shared and all(h.lease.shared for h in on_it) and devices.left(name) >= wait.nbytes
        )
        if blocks and wait.shared and all(h.lease.shared for h in on_it):
            reasons.append(
                f"{name} has {devices.left(name)} bytes left of {devices.capacity[name]}, {wait.nbytes} needed"
            )
        elif blocks:
            by = ", ".join(f"{h.lease.owner} (token {h.lease.token}, {now - h.since:.3g} s)" for h in on_it)
            reasons.append(f"{name} held by {by}")
        else:
            reasons += [
                f"{name} kept for {other.owner}, which has waited {now - other.since:.3g} s"
                for other, mask in kept.items()
                if mask & bit
            ]
    shown = "; ".join(reasons[:_SHOWN]) or "nothing in the way"
    return shown if len(reasons) <= _SHOWN else f"{shown}; and {len(reasons) - _SHOWN} more"
