"""Snapshots of a pool's episodes, and what is built on them: the whole pool leaves memory and comes back."""

from collections.abc import Mapping

from rlinf_plugins.core.errors import PoolUsageError, SnapshotError
from rlinf_plugins.core.supervision import pack, unpack
from rlinf_plugins.envs.desk import Desk
from rlinf_plugins.envs.protocol import InitialState
from rlinf_plugins.envs.results import Batch


class Snapshots:
    """Saves and restores the episodes of a pool; :class:`rlinf_plugins.envs.EnvPool` documents the methods.

    Args:
        desk: The pool's book-keeping.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._parked: dict[int, bytes] = {}

    def save(self, chosen: list[int]) -> dict[int, bytes]:
        """Return a snapshot of each of ``chosen``."""
        desk = self._desk
        if desk.spec.snapshot_tolerance is None:
            raise SnapshotError(f"{desk.spec.name} cannot be snapshotted (snapshot_tolerance is None)")
        for slot in chosen:
            if not desk.ledger.is_open(slot):
                raise PoolUsageError(f"environment {slot} has no running episode to save")
        with desk.crew.lock:
            calls = [desk.begin_save(slot) for slot in chosen]
        desk.wait(calls)
        failed = [str(call.failure) for call in calls if call.failure is not None]
        if failed:
            raise SnapshotError(f"snapshots could not be taken: {'; '.join(failed)}")
        return {call.slot: pack((desk.spec.name, desk.ledger.initial(call.slot), call.answer)) for call in calls}

    def load(self, snapshots: Mapping[int, bytes]) -> Batch:
        """Continue from snapshots, each as a new episode in the records."""
        desk = self._desk
        chosen = desk.choose(list(snapshots))
        opened = {slot: open_snapshot(data, desk.spec.name) for slot, data in snapshots.items()}
        with desk.crew.lock:
            for slot in chosen:
                desk.crew.check(slot, "load")
            calls = [desk.begin_load(slot, opened[slot][1], opened[slot][0]) for slot in chosen]
        desk.wait(calls)
        return desk.batch(chosen, 0)

    def offload(self) -> int:
        """Save what runs, then end all processes; return the bytes that are kept."""
        running = [slot for slot in self._desk.everyone if self._desk.ledger.is_open(slot)]
        self._parked = self.save(running) if running else {}
        self._desk.crew.park()
        return sum(len(data) for data in self._parked.values())

    def onload(self) -> Batch | None:
        """Start the processes again and continue what was saved."""
        desk = self._desk
        desk.crew.unpark()
        desk.crew.wait_ready()
        if not self._parked:
            return None
        chosen = list(self._parked)
        with desk.crew.lock:
            calls = [desk.begin_load(slot, open_snapshot(self._parked[slot], desk.spec.name)[1]) for slot in chosen]
        desk.wait(calls)
        self._parked = {}
        return desk.batch(chosen, 0)


def open_snapshot(data: bytes, name: str) -> tuple[InitialState, bytes]:
    """Return where the saved episode started, and its state.

    Raises:
        SnapshotError: It is of another environment than ``name``.
    """
    saved, initial, state = unpack(data)
    if saved != name:
        raise SnapshotError(f"the snapshot is of {saved!r}, this pool runs {name!r}")
    return initial, state
