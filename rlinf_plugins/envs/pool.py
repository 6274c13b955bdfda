"""The env-worker pool: one supervised process per environment, driven together or each on its own."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from rlinf_plugins.core.errors import PoolUsageError, RestartStormError, SnapshotError
from rlinf_plugins.core.supervision import pack, unpack
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.desk import Desk
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.results import Batch, EpisodeRecord, StepResult
from rlinf_plugins.envs.slot import Call, Status

NextInitial: TypeAlias = Callable[[int], InitialState]


class EnvPool:
    """Environments in supervised processes on this machine.

    Two ways to drive it, not both at the same moment: the batched methods ``reset``, ``step_chunk``, ``send`` and
    ``recv``, or the coroutines ``async_reset`` and ``async_step``, with which each environment has its own pace.

    A failed episode is a result: its ``failure`` says what happened, the other environments go on, and the slot is
    usable again after its next reset (which waits for the new process).

    Args:
        factory: Makes one environment, or a sequence with one factory per slot.
        num_envs: Number of environments; left out where ``factory`` is a sequence.
        config: Options.
        next_initial: Given a slot, returns where its next episode starts; with it, ``step_chunk`` resets finished
            environments at once, and ``final_observation`` of its batch holds what they last saw.

    Attributes:
        spec: What the environments take and give.

    Raises:
        EnvStartError: An environment cannot be made.
        PoolUsageError: The number of environments is not positive or contradicts the factories.
    """

    def __init__(
        self,
        factory: EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        config: PoolConfig | None = None,
        next_initial: NextInitial | None = None,
    ) -> None:
        factories = _factories(factory, num_envs)
        self._desk = Desk(factories, config or PoolConfig())
        self.spec: EnvSpec = self._desk.spec
        self._next_initial = next_initial
        self._inflight: dict[int, Call] = {}
        self._reader: asyncio.AbstractEventLoop | None = None
        self._parked: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._desk.everyone)

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- batched ----------------------------------------------------------------------------------------------

    def reset(self, initial: Sequence[InitialState], slots: Sequence[int] | None = None) -> Batch:
        """Start an episode in each of ``slots``; the others are not touched.

        Args:
            initial: Where each episode starts, one per slot.
            slots: Which environments; all if left out.

        Returns:
            Their first observations. A slot that cannot be reset has an entry in ``failures``.

        Raises:
            PoolUsageError: Unknown, repeated or busy slots, or other than one initial state per slot.
            RestartStormError: A slot was given up after too many failures in a row.
        """
        chosen = self._desk.choose(slots)
        if len(initial) != len(chosen):
            raise PoolUsageError(f"{len(chosen)} slots need as many initial states, got {len(initial)}")
        with self._desk.crew.lock:
            calls = [self._desk.begin_reset(slot, start) for slot, start in zip(chosen, initial, strict=True)]
        self._desk.wait(calls)
        for slot in chosen:
            self._refuse_storm(slot)
        return self._desk.batch(chosen, 0)

    def step_chunk(self, actions: object, slots: Sequence[int] | None = None) -> Batch:
        """Execute a chunk of actions in each of ``slots`` and wait for all of them.

        Within an environment the chunk ends with its episode (``valid`` says where). An environment whose episode is
        over takes no step.

        Args:
            actions: ``[slots, steps, action_dim]``, or ``[slots, action_dim]`` for one step.
            slots: Which environments; all if left out.

        Raises:
            ActionError: The array as a whole has the wrong shape or type. A NaN, an infinity or a value out of range
                fails only its own environment.
            PoolUsageError: Unknown, repeated or busy slots, or one that was never reset.
        """
        chosen = self._desk.choose(slots)
        chunk = self._desk.shape(actions, len(chosen))
        self._desk.wait(self._desk.begin_steps(chosen, chunk))
        batch = self._desk.batch(chosen, chunk.shape[1])
        if self._next_initial is not None:
            self._auto_reset(batch, self._next_initial)
        return batch

    def send(self, actions: object, slots: Sequence[int]) -> None:
        """Start a chunk in each of ``slots`` without waiting; see :meth:`recv`. Errors as in :meth:`step_chunk`."""
        chosen = self._desk.choose(slots)
        chunk = self._desk.shape(actions, len(chosen))
        for slot, call in zip(chosen, self._desk.begin_steps(chosen, chunk), strict=True):
            self._inflight[slot] = call

    def send_reset(self, initial: Sequence[InitialState], slots: Sequence[int]) -> None:
        """Start an episode in each of ``slots`` without waiting; see :meth:`recv`. Errors as in :meth:`reset`."""
        chosen = self._desk.choose(slots)
        with self._desk.crew.lock:
            for slot, start in zip(chosen, initial, strict=True):
                self._inflight[slot] = self._desk.begin_reset(slot, start)

    def recv(self, at_least: int = 1) -> list[StepResult]:
        """Return the environments that are ready, waiting until there are ``at_least`` that many.

        Args:
            at_least: How many to wait for; all that are under way, if fewer are.

        Returns:
            One result per ready environment, in the order in which they were sent.
        """
        wanted = min(at_least, len(self._inflight))
        while sum(call.done for call in self._inflight.values()) < wanted:
            self._desk.crew.pump()
        if wanted:
            self._desk.crew.pump(0)
        ready = [slot for slot, call in self._inflight.items() if call.done]
        return [self._desk.result(self._inflight.pop(slot)) for slot in ready]

    # --- each at its own pace ---------------------------------------------------------------------------------

    async def async_reset(self, slot: int, initial: InitialState) -> StepResult:
        """Start an episode in one environment. Errors as in :meth:`reset`."""
        self._desk.choose([slot])
        result = await self._call(slot, lambda: self._desk.begin_reset(slot, initial))
        self._refuse_storm(slot)
        return result

    async def async_step(self, slot: int, actions: object) -> StepResult:
        """Execute a chunk in one environment: ``[steps, action_dim]`` or ``[action_dim]``. Errors as in step_chunk."""
        chosen = self._desk.choose([slot])
        array = np.asarray(actions)
        chunk = self._desk.shape(array[None] if array.ndim == 2 else array[None, None], 1)
        return await self._call(slot, lambda: self._desk.begin_steps(chosen, chunk)[0])

    async def _call(self, slot: int, begin: Any) -> StepResult:
        loop = asyncio.get_running_loop()
        self._attach(loop)
        future: asyncio.Future[None] = loop.create_future()
        thread = threading.get_ident()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake(_: Call) -> None:
            if threading.get_ident() == thread:
                settle()
            else:
                loop.call_soon_threadsafe(settle)

        with self._desk.crew.lock:
            call: Call = begin()
            if not call.done:
                call.callback = wake
        if not call.done:
            try:
                await future
            except asyncio.CancelledError:
                with self._desk.crew.lock:
                    call.callback, call.abandoned = None, True
                raise
        return self._desk.result(call)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._reader is loop:
            return
        if self._reader is not None and not self._reader.is_closed():
            self._reader.remove_reader(self._desk.crew.fileno())
        loop.add_reader(self._desk.crew.fileno(), self._desk.crew.pump, 0)
        self._reader = loop

    # --- snapshots --------------------------------------------------------------------------------------------

    def save(self, slots: Sequence[int] | None = None) -> dict[int, bytes]:
        """Return a snapshot of each of ``slots``: simulator, controller, episode. They can go on afterwards.

        Raises:
            SnapshotError: The environment has no snapshots, or one could not be taken.
            PoolUsageError: A slot has no running episode.
        """
        chosen = self._desk.choose(slots)
        if self.spec.snapshot_tolerance is None:
            raise SnapshotError(f"{self.spec.name} cannot be snapshotted (snapshot_tolerance is None)")
        for slot in chosen:
            if not self._desk.ledger.is_open(slot):
                raise PoolUsageError(f"environment {slot} has no running episode to save")
        with self._desk.crew.lock:
            calls = [self._desk.begin_save(slot) for slot in chosen]
        self._desk.wait(calls)
        failed = [str(call.failure) for call in calls if call.failure is not None]
        if failed:
            raise SnapshotError(f"snapshots could not be taken: {'; '.join(failed)}")
        return {call.slot: pack((self.spec.name, self._desk.ledger.initial(call.slot), call.answer)) for call in calls}

    def load(self, snapshots: Mapping[int, bytes]) -> Batch:
        """Continue from snapshots, in any slot of any pool of the same environment.

        Each restored slot has a new episode in the records that counts its steps from the saved one's beginning.

        Args:
            snapshots: From :meth:`save`, by the slot that shall continue.

        Returns:
            The observations of the restored slots; one that could not be restored has an entry in ``failures``.

        Raises:
            SnapshotError: A snapshot is of another environment.
        """
        chosen = self._desk.choose(list(snapshots))
        opened = {slot: _open_snapshot(data, self.spec.name) for slot, data in snapshots.items()}
        with self._desk.crew.lock:
            for slot in chosen:
                self._desk.crew.check(slot, "load")
            for slot in chosen:
                self._desk.ledger.begin(slot, opened[slot][0])
            calls = [self._desk.begin_load(slot, opened[slot][1]) for slot in chosen]
        self._desk.wait(calls)
        return self._desk.batch(chosen, 0)

    def offload(self) -> int:
        """Save every running episode, then end all processes, so that their memory is really free.

        Nothing is ended before every snapshot is in this process's memory; if one cannot be taken nothing changes.

        Returns:
            Bytes of the snapshots that are kept.

        Raises:
            SnapshotError: A running episode cannot be saved.
        """
        running = [slot for slot in self._desk.everyone if self._desk.ledger.is_open(slot)]
        self._parked = self.save(running) if running else {}
        self._desk.crew.park()
        return sum(len(data) for data in self._parked.values())

    def onload(self) -> Batch | None:
        """Start the processes again and continue every saved episode; the snapshots are kept until they are in.

        Returns:
            The observations of the continued slots, or None if none was running.

        Raises:
            EnvStartError: A process cannot be started again; call :meth:`onload` once more to retry.
        """
        self._desk.crew.unpark()
        self._desk.crew.wait_ready()
        if not self._parked:
            return None
        chosen = list(self._parked)
        with self._desk.crew.lock:
            calls = [
                self._desk.begin_load(slot, _open_snapshot(self._parked[slot], self.spec.name)[1]) for slot in chosen
            ]
        self._desk.wait(calls)
        self._parked = {}
        return self._desk.batch(chosen, 0)

    # --- records and end --------------------------------------------------------------------------------------

    def drain_records(self) -> list[EpisodeRecord]:
        """Return the record of every episode that ended since the last call, each exactly once."""
        with self._desk.crew.lock:
            return self._desk.ledger.drain()

    def stats(self) -> dict[str, int]:
        """Return counters: episodes begun and closed, processes started, workers recycled."""
        with self._desk.crew.lock:
            starts = sum(slot.starts for slot in self._desk.crew.slots)
            counts = {"episodes_begun": self._desk.ledger.begun, "episodes_closed": self._desk.ledger.closed}
            return {**counts, "starts": starts, "recycled": self._desk.recycled}

    def close(self) -> None:
        """End all processes and close the open episodes as abandoned. May be called again."""
        if self._reader is not None and not self._reader.is_closed():
            self._reader.remove_reader(self._desk.crew.fileno())
        self._reader = None
        with self._desk.crew.lock:
            self._desk.ledger.close_all()
        self._desk.crew.close()

    # --- inside -----------------------------------------------------------------------------------------------

    def _auto_reset(self, batch: Batch, next_initial: NextInitial) -> None:
        """Start the next episode of the rows that are done and put its first observation into the batch.

        A row whose process is still being replaced stays frozen, so that it does not hold up the others; it is reset
        by the first call that finds it running.
        """
        slots_up = {slot.index for slot in self._desk.crew.slots if slot.status is Status.IDLE}
        rows = [row for row, slot in enumerate(batch.slots) if batch.done[row] and slot in slots_up]
        slots = [batch.slots[row] for row in rows]
        if not slots:
            return
        for row, slot in zip(rows, slots, strict=True):
            batch.final_observation[slot] = {name: array[row].copy() for name, array in batch.observation.items()}
        first = self.reset([next_initial(slot) for slot in slots], slots)
        for position, row in enumerate(rows):
            for name, array in batch.observation.items():
                array[row] = first.observation[name][position]
            batch.task_descriptions[row] = first.task_descriptions[position]

    def _refuse_storm(self, slot: int) -> None:
        failure = self._desk.failures.get(slot)
        if failure is not None and failure.kind == "storm":
            raise RestartStormError(str(failure))


def _factories(factory: EnvFactory | Sequence[EnvFactory], num_envs: int | None) -> list[EnvFactory]:
    if isinstance(factory, Sequence):
        if num_envs not in (None, len(factory)):
            raise PoolUsageError(f"num_envs={num_envs} contradicts {len(factory)} factories")
        factories = list(factory)
    else:
        factories = [factory] * (num_envs or 0)
    if not factories:
        raise PoolUsageError("a pool needs at least one environment (num_envs >= 1)")
    return factories


def _open_snapshot(data: bytes, name: str) -> tuple[InitialState, bytes]:
    saved, initial, state = unpack(data)
    if saved != name:
        raise SnapshotError(f"the snapshot is of {saved!r}, this pool runs {name!r}")
    return initial, state
