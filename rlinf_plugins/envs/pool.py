"""The env-worker pool: one supervised process per environment, driven together or each on its own."""

from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

from rlinf_plugins.core.config import validate
from rlinf_plugins.core.errors import PoolUsageError, RestartStormError
from rlinf_plugins.envs.auto_reset import NextInitial, auto_reset
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.coroutines import Coroutines
from rlinf_plugins.envs.desk import Desk
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.results import Batch, EpisodeRecord, StepResult
from rlinf_plugins.envs.slot import Call
from rlinf_plugins.envs.snapshots import Snapshots


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
        ConfigError: An option has an impossible value.
        PoolUsageError: The number of environments is not positive or contradicts the factories.
    """

    def __init__(
        self,
        factory: EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        config: PoolConfig | None = None,
        next_initial: NextInitial | None = None,
    ) -> None:
        factories = as_factories(factory, num_envs)
        config = config or PoolConfig()
        validate(config, "config")
        self._desk = Desk(factories, config)
        self.spec: EnvSpec = self._desk.spec
        self._next_initial = next_initial
        self._inflight: dict[int, Call] = {}
        self._coroutines = Coroutines(self._desk.crew)
        self._snapshots = Snapshots(self._desk)

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
        chosen = self._choose(slots)
        self._desk.wait(self._desk.begin_resets(chosen, initial))
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
        chosen = self._choose(slots)
        chunk = self._desk.shape(actions, len(chosen))
        self._desk.wait(self._desk.begin_steps(chosen, chunk))
        batch = self._desk.batch(chosen, chunk.shape[1])
        if self._next_initial is not None:
            auto_reset(batch, self._desk.running(batch.slots), self._next_initial, self.reset)
        return batch

    def send(self, actions: object, slots: Sequence[int]) -> None:
        """Start a chunk in each of ``slots`` without waiting; see :meth:`recv`. Errors as in :meth:`step_chunk`."""
        chosen = self._choose(slots)
        for call in self._desk.begin_steps(chosen, self._desk.shape(actions, len(chosen))):
            self._inflight[call.slot] = call

    def send_reset(self, initial: Sequence[InitialState], slots: Sequence[int]) -> None:
        """Start an episode in each of ``slots`` without waiting; see :meth:`recv`. Errors as in :meth:`reset`."""
        chosen = self._choose(slots)
        for call in self._desk.begin_resets(chosen, initial):
            self._inflight[call.slot] = call

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
        chosen = self._choose([slot])
        call = await self._coroutines.run(lambda: self._desk.begin_resets(chosen, [initial])[0])
        self._refuse_storm(slot)
        return self._desk.result(call)

    async def async_step(self, slot: int, actions: object) -> StepResult:
        """Execute a chunk in one environment: ``[steps, action_dim]`` or ``[action_dim]``. Errors as in step_chunk."""
        chosen = self._choose([slot])
        array = np.asarray(actions)
        chunk = self._desk.shape(array[None] if array.ndim == 2 else array[None, None], 1)
        return self._desk.result(await self._coroutines.run(lambda: self._desk.begin_steps(chosen, chunk)[0]))

    # --- snapshots --------------------------------------------------------------------------------------------

    def save(self, slots: Sequence[int] | None = None) -> dict[int, bytes]:
        """Return a snapshot of each of ``slots``: simulator, controller, episode. They can go on afterwards.

        Raises:
            SnapshotError: The environment has no snapshots, or one could not be taken.
            PoolUsageError: A slot has no running episode.
        """
        return self._snapshots.save(self._choose(slots))

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
        return self._snapshots.load(snapshots)

    def offload(self) -> int:
        """Save every running episode, then end all processes, so that their memory is really free.

        Nothing is ended before every snapshot is in this process's memory; if one cannot be taken nothing changes.

        Returns:
            Bytes of the snapshots that are kept.

        Raises:
            SnapshotError: A running episode cannot be saved.
        """
        return self._snapshots.offload()

    def onload(self) -> Batch | None:
        """Start the processes again and continue every saved episode; the snapshots are kept until they are in.

        Returns:
            The observations of the continued slots, or None if none was running.

        Raises:
            EnvStartError: A process cannot be started again; call :meth:`onload` once more to retry.
        """
        return self._snapshots.onload()

    # --- records and end --------------------------------------------------------------------------------------

    def drain_records(self) -> list[EpisodeRecord]:
        """Return the record of every episode that ended since the last call, each exactly once.

        Up to 100,000 are kept for a caller that does not ask.
        """
        with self._desk.crew.lock:
            return self._desk.ledger.drain()

    def stats(self) -> dict[str, int]:
        """Return counters: episodes begun, closed and forgotten (see drain_records), processes started, recycled."""
        with self._desk.crew.lock:
            starts = sum(slot.starts for slot in self._desk.crew.slots)
            ledger = self._desk.ledger
            counts = {"episodes_begun": ledger.begun, "episodes_closed": ledger.closed}
            return {**counts, "records_forgotten": ledger.forgotten, "starts": starts, "recycled": self._desk.recycled}

    def close(self) -> None:
        """End all processes and close the open episodes as abandoned. May be called again."""
        self._coroutines.detach()
        with self._desk.crew.lock:
            self._desk.ledger.close_all()
        self._desk.crew.close()

    def _choose(self, slots: Sequence[int] | None) -> list[int]:
        chosen = self._desk.choose(slots)
        if self._inflight:
            busy = sorted(self._inflight.keys() & set(chosen))
            if busy:
                raise PoolUsageError(f"environments {busy} are busy: recv() their answers first")
        return chosen

    def _refuse_storm(self, slot: int) -> None:
        failure = self._desk.failures.get(slot)
        if failure is not None and failure.kind == "storm":
            raise RestartStormError(str(failure))


def as_factories(factory: EnvFactory | Sequence[EnvFactory], num_envs: int | None) -> list[EnvFactory]:
    """Return one factory per slot.

    Raises:
        PoolUsageError: The number of environments is not positive or contradicts the factories.
    """
    if isinstance(factory, Sequence):
        if num_envs not in (None, len(factory)):
            raise PoolUsageError(f"num_envs={num_envs} contradicts {len(factory)} factories")
        factories = list(factory)
    else:
        factories = [factory] * (num_envs or 0)
    if not factories:
        raise PoolUsageError("a pool needs at least one environment (num_envs >= 1)")
    return factories
