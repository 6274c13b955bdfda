"""The env-worker pool over a Ray cluster: the same calls as :class:`rlinf_plugins.envs.EnvPool`, actors behind them."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.config import validate
from rlinf_plugins.core.errors import PoolUsageError, RlinfError, SnapshotError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.actions import ActionCheck
from rlinf_plugins.envs.auto_reset import NextInitial, auto_reset
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.desk import check_initial, choose_slots
from rlinf_plugins.envs.pool import as_factories
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.ray_actor import Reply, failed_result
from rlinf_plugins.envs.ray_hosts import Flight, Hosts
from rlinf_plugins.envs.ray_placement import Placement
from rlinf_plugins.envs.results import Batch, EpisodeRecord, StepResult, stack
from rlinf_plugins.envs.snapshots import open_snapshot


class RayEnvPool:
    """Environments in supervised processes on the nodes of a Ray cluster; Ray must be initialised.

    A slot stays with its actor for the life of the pool. An actor that dies, or does not answer a minute after its
    workers' deadline, is started again by Ray; the episodes it ran have failed, each with a record, and its slots go on
    with their next reset. Observations come through Ray's
    object store.

    Args:
        factory: Makes one environment, or a sequence with one factory per slot.
        num_envs: Number of environments; left out where ``factory`` is a sequence.
        config: Options; those of the local pool.
        placement: Where the actors run.
        next_initial: As in :class:`rlinf_plugins.envs.EnvPool`.

    Attributes:
        spec: What the environments take and give.

    Raises:
        ConfigError: More actors than environments, or an option has an impossible value.
        EnvStartError: An environment cannot be made, or the cluster has not the resources.
    """

    def __init__(
        self,
        factory: EnvFactory | Sequence[EnvFactory],
        num_envs: int | None = None,
        config: PoolConfig | None = None,
        placement: Placement | None = None,
        next_initial: NextInitial | None = None,
    ) -> None:
        self._ray = require("ray", "ray")
        self._factories = as_factories(factory, num_envs)
        config = config or PoolConfig()
        validate(config, "config")
        self._hosts = Hosts(self._factories, config, placement or Placement())
        self._deadlines, self._everyone = config.deadlines, dict.fromkeys(range(len(self._hosts.actors)), ())
        self.spec: EnvSpec = self._hosts.spec
        self._check = ActionCheck(self.spec, config.max_chunk, config.out_of_range == "clip")
        self._next_initial = next_initial
        self._inflight: dict[int, Flight] = {}
        self._last: dict[int, StepResult] = {}
        self._parked = self._closed = False

    def __len__(self) -> int:
        return len(self._factories)

    def __enter__(self) -> "RayEnvPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reset(self, initial: Sequence[InitialState], slots: Sequence[int] | None = None) -> Batch:
        """Start an episode in each of ``slots``. As :meth:`rlinf_plugins.envs.EnvPool.reset`."""
        return stack(self._collect(self._begin(initial, self._choose(slots))))

    def step_chunk(self, actions: object, slots: Sequence[int] | None = None) -> Batch:
        """Execute a chunk in each of ``slots``. As :meth:`rlinf_plugins.envs.EnvPool.step_chunk`."""
        chosen = self._choose(slots)
        chunk = self._shape(actions, chosen)
        batch = stack(self._collect([self._hosts.step(s, steps) for s, steps in zip(chosen, chunk, strict=True)]))
        if self._next_initial is not None:
            auto_reset(batch, batch.slots, self._next_initial, self.reset)
        return batch

    def send(self, actions: object, slots: Sequence[int]) -> None:
        """Start a chunk in each of ``slots`` without waiting; see :meth:`recv`."""
        chosen = self._choose(slots)
        for slot, steps in zip(chosen, self._shape(actions, chosen), strict=True):
            self._inflight[slot] = self._hosts.step(slot, steps)

    def send_reset(self, initial: Sequence[InitialState], slots: Sequence[int]) -> None:
        """Start an episode in each of ``slots`` without waiting; see :meth:`recv`."""
        for flight in self._begin(initial, self._choose(slots)):
            self._inflight[flight.slot] = flight

    def recv(self, at_least: int = 1) -> list[StepResult]:
        """Return the environments that are ready. As :meth:`rlinf_plugins.envs.EnvPool.recv`."""
        under_way = list(self._inflight.values())
        ready = self._hosts.arrived(under_way, min(at_least, len(under_way)))
        for flight in ready:
            del self._inflight[flight.slot]
        return self._collect(ready)

    async def async_reset(self, slot: int, initial: InitialState) -> StepResult:
        """Start an episode in one environment. Errors as in :meth:`reset`."""
        return await self._await(self._begin([initial], self._choose([slot]))[0])

    async def async_step(self, slot: int, actions: object) -> StepResult:
        """Execute a chunk in one environment: ``[steps, action_dim]`` or ``[action_dim]``."""
        array = np.asarray(actions)
        chunk = self._shape(array[None] if array.ndim == 2 else array[None, None], self._choose([slot]))[0]
        return await self._await(self._hosts.step(slot, chunk))

    def save(self, slots: Sequence[int] | None = None) -> dict[int, bytes]:
        """Return a snapshot of each of ``slots``. As :meth:`rlinf_plugins.envs.EnvPool.save`."""
        chosen = self._choose(slots)
        shares: dict[int, list[int]] = {}
        for actor, local in map(self._hosts.home, chosen):
            shares.setdefault(actor, []).append(local)
        found, errors = self._hosts.ask("save", {a: (own,) for a, own in shares.items()}, self._deadlines.snapshot)
        _refuse(errors)
        return {slot: found[actor][local] for slot in chosen for actor, local in [self._hosts.home(slot)]}

    def load(self, snapshots: Mapping[int, bytes]) -> Batch:
        """Continue from snapshots. As :meth:`rlinf_plugins.envs.EnvPool.load`."""
        chosen = self._choose(list(snapshots))
        starts = {slot: open_snapshot(snapshots[slot], self.spec.name)[0] for slot in chosen}
        shares: dict[int, tuple[dict[int, bytes], dict[int, int]]] = {}
        for slot in chosen:
            actor, local = self._hosts.home(slot)
            states, numbers = shares.setdefault(actor, ({}, {}))
            states[local], numbers[local] = snapshots[slot], self._hosts.begin(slot, starts[slot])
        replies, errors = self._hosts.ask("load", shares, self._deadlines.start + self._deadlines.snapshot)
        results = {one.slot: one for actor, reply in replies.items() for one in self._take(actor, reply)}
        _refuse({actor: error for actor, error in errors.items() if actor not in self._hosts.down})
        return stack([results.get(slot) or self._failed(slot, 0) for slot in chosen])

    def offload(self) -> int:
        """Save every running episode in its actor, then end all environment processes.

        Returns:
            Bytes of the snapshots that the actors keep.

        Raises:
            SnapshotError: A running episode cannot be saved, or an actor died; the others are brought back.
        """
        self._choose(None)
        kept, errors = self._hosts.ask("offload", self._everyone, self._deadlines.snapshot + self._deadlines.close)
        if errors:
            back = self._hosts.ask("onload", dict.fromkeys(kept, ()), self._deadlines.start)[0]
            for actor, reply in back.items():
                self._take(actor, reply)
            _refuse(errors)
        self._parked = True
        return sum(kept.values())

    def onload(self) -> Batch | None:
        """Start the processes again and continue every saved episode. As the local pool's."""
        seconds = self._deadlines.start + self._deadlines.snapshot
        replies, errors = self._hosts.ask("onload", self._everyone, seconds)
        results = [one for actor, reply in replies.items() for one in self._take(actor, reply)]
        _refuse({actor: error for actor, error in errors.items() if actor not in self._hosts.down})
        self._parked = False
        return stack(results) if results else None

    def drain_records(self) -> list[EpisodeRecord]:
        """Return the record of every episode that ended since the last call, each exactly once."""
        hosts = self._hosts
        living = {} if self._closed else {a: () for a in self._everyone if a not in hosts.down}
        for actor, records in hosts.ask("records", living)[0].items():
            hosts.take_records(actor, records)
        records = list(hosts.records)
        hosts.records.clear()
        return records

    def stats(self) -> dict[str, int]:
        """Return counters: episodes begun and closed; processes started and workers recycled in the living actors."""
        living = self._hosts.ask("stats", self._everyone)[0].values()
        sums = {name: sum(one[name] for one in living) for name in ("starts", "recycled")}
        return {"episodes_begun": self._hosts.begun, "episodes_closed": self._hosts.closed, **sums}

    def close(self) -> None:
        """End all actors and close the open episodes as abandoned. May be called again."""
        if not self._closed:
            self._closed = True
            self._hosts.close()

    def _choose(self, slots: Sequence[int] | None) -> list[int]:
        chosen = choose_slots(slots, len(self))
        busy = sorted(self._inflight.keys() & set(chosen))
        if busy or self._parked or self._closed:
            why = (
                f"environments {busy} are busy: recv() their answers first" if busy else "the pool is parked or closed"
            )
            raise PoolUsageError(why)
        return chosen

    def _shape(self, actions: object, chosen: list[int]) -> np.ndarray:
        chunk = self._check.shape(actions, len(chosen))
        for slot in chosen:
            if slot not in self._last and slot not in self._hosts.failed:
                raise PoolUsageError(f"environment {slot} was never reset")
        return chunk

    def _begin(self, initial: Sequence[InitialState], chosen: list[int]) -> list[Flight]:
        if len(initial) != len(chosen):
            raise PoolUsageError(f"{len(chosen)} slots need as many initial states, got {len(initial)}")
        for start in initial:
            check_initial(self.spec, start)
        return [self._hosts.reset(slot, start) for slot, start in zip(chosen, initial, strict=True)]

    def _collect(self, flights: list[Flight]) -> list[StepResult]:
        """Take the replies in, those of actors that are gone last: what one said before it died counts."""
        self._hosts.arrived(flights, len(flights))
        results: dict[int, StepResult] = {}
        errors, losses = [], []
        for flight in flights:
            try:
                if flight.reply is not None:
                    reply = self._ray.get(flight.reply, timeout=max(1.0, flight.deadline - monotonic()))
                    results[flight.slot] = self._answer(flight, reply)
            except self._hosts.lost_errors as error:
                losses.append((flight, error))
            except RlinfError as error:
                errors.append(error)
        for flight, loss in losses:
            self._lose(flight, loss)
        if errors:
            raise errors[0]
        return [results.get(flight.slot) or self._failed(flight.slot, flight.steps) for flight in flights]

    async def _await(self, flight: Flight) -> StepResult:
        if flight.reply is not None:
            try:
                return self._answer(flight, await asyncio.wait_for(flight.reply, flight.deadline - monotonic()))
            except self._hosts.lost_errors as error:
                self._lose(flight, error)
        return self._failed(flight.slot, flight.steps)

    def _answer(self, flight: Flight, reply: Reply) -> StepResult:
        try:
            return self._take(self._hosts.home(flight.slot)[0], reply)[0]
        except PoolUsageError:
            if not flight.steps:
                self._hosts.withdraw(flight.slot, flight.number)
            raise

    def _take(self, actor: int, reply: Reply) -> list[StepResult]:
        answers = self._hosts.take(actor, reply)
        results = [one for one in answers if isinstance(one, StepResult)]
        self._last |= {one.slot: one for one in results}
        for one in answers:
            if not isinstance(one, StepResult):
                raise one
        return results

    def _lose(self, flight: Flight, error: BaseException) -> None:
        if flight.slot not in self._hosts.failed:  # an error that comes late tells nothing new
            self._hosts.lost(self._hosts.home(flight.slot)[0], error)

    def _failed(self, slot: int, steps: int) -> StepResult:
        """Say that a slot's episode ended with its actor."""
        return failed_result(self.spec, self._last.get(slot), slot, steps, self._hosts.failed[slot])


def _refuse(errors: Mapping[int, Exception]) -> None:
    """Raise the first error of the actors."""
    for actor, error in errors.items():
        if isinstance(error, RlinfError):
            raise error
        raise SnapshotError(f"actor {actor} was lost with its environments: {error}") from error
