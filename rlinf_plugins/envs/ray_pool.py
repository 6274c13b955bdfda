"""The env-worker pool over a Ray cluster: the same calls as :class:`rlinf_plugins.envs.EnvPool`, actors behind them."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from rlinf_plugins.core.errors import PoolUsageError, RlinfError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.actions import ActionCheck
from rlinf_plugins.envs.auto_reset import NextInitial, auto_reset
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.desk import check_initial, choose_slots
from rlinf_plugins.envs.pool import as_factories
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.ray_actor import Reply, failed_result
from rlinf_plugins.envs.ray_hosts import Hosts
from rlinf_plugins.envs.ray_placement import Placement
from rlinf_plugins.envs.results import Batch, EpisodeRecord, StepResult, stack
from rlinf_plugins.envs.snapshots import open_snapshot


class RayEnvPool:
    """Environments in supervised processes on the nodes of a Ray cluster; Ray must be initialised.

    A slot stays with its actor for the life of the pool. An actor that dies is started again by Ray; the episodes it
    ran have failed, each with a record, and its slots go on with their next reset. Observations come through Ray's
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
        ConfigError: More actors than environments.
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
        self._config = config or PoolConfig()
        self._hosts = Hosts(self._factories, self._config, placement or Placement())
        self.spec: EnvSpec = self._hosts.spec
        self._check = ActionCheck(self.spec, self._config.max_chunk, self._config.out_of_range == "clip")
        self._next_initial = next_initial
        self._inflight: dict[int, tuple[int, Any]] = {}  # by slot: steps, reply
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
        chosen = self._choose(slots)
        if len(initial) != len(chosen):
            raise PoolUsageError(f"{len(chosen)} slots need as many initial states, got {len(initial)}")
        for start in initial:
            check_initial(self.spec, start)
        return self._collect([(slot, 0, self._reset(slot, at)) for slot, at in zip(chosen, initial, strict=True)])

    def step_chunk(self, actions: object, slots: Sequence[int] | None = None) -> Batch:
        """Execute a chunk in each of ``slots``. As :meth:`rlinf_plugins.envs.EnvPool.step_chunk`."""
        chosen = self._choose(slots)
        chunk = self._shape(actions, chosen)
        batch = self._collect([(s, len(steps), self._step(s, steps)) for s, steps in zip(chosen, chunk, strict=True)])
        if self._next_initial is not None:
            auto_reset(batch, batch.slots, self._next_initial, self.reset)
        return batch

    def send(self, actions: object, slots: Sequence[int]) -> None:
        """Start a chunk in each of ``slots`` without waiting; see :meth:`recv`."""
        chosen = self._choose(slots)
        for slot, steps in zip(chosen, self._shape(actions, chosen), strict=True):
            self._inflight[slot] = (len(steps), self._step(slot, steps))

    def send_reset(self, initial: Sequence[InitialState], slots: Sequence[int]) -> None:
        """Start an episode in each of ``slots`` without waiting; see :meth:`recv`."""
        for slot, start in zip(self._choose(slots), initial, strict=True):
            check_initial(self.spec, start)
            self._inflight[slot] = (0, self._reset(slot, start))

    def recv(self, at_least: int = 1) -> list[StepResult]:
        """Return the environments that are ready. As :meth:`rlinf_plugins.envs.EnvPool.recv`."""
        waiting = [reply for _, reply in self._inflight.values() if reply is not None]
        wanted = min(at_least, len(self._inflight)) - (len(self._inflight) - len(waiting))
        if wanted > 0:
            self._ray.wait(waiting, num_returns=wanted, fetch_local=False)
        ready = set(self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
        slots = [slot for slot, (_, reply) in self._inflight.items() if reply is None or reply in ready]
        return [self._get(slot, *self._inflight.pop(slot)) for slot in slots]

    async def async_reset(self, slot: int, initial: InitialState) -> StepResult:
        """Start an episode in one environment. Errors as in :meth:`reset`."""
        self._choose([slot])
        check_initial(self.spec, initial)
        if self._hosts.home(slot)[0] in self._hosts.down:
            await self._hosts.revived(self._hosts.home(slot)[0])
        return await self._await(slot, 0, self._reset(slot, initial))

    async def async_step(self, slot: int, actions: object) -> StepResult:
        """Execute a chunk in one environment: ``[steps, action_dim]`` or ``[action_dim]``."""
        array = np.asarray(actions)
        chunk = self._shape(array[None] if array.ndim == 2 else array[None, None], self._choose([slot]))[0]
        return await self._await(slot, len(chunk), self._step(slot, chunk))

    def save(self, slots: Sequence[int] | None = None) -> dict[int, bytes]:
        """Return a snapshot of each of ``slots``. As :meth:`rlinf_plugins.envs.EnvPool.save`."""
        homes = {slot: self._hosts.home(slot) for slot in self._choose(slots)}
        replies = {}
        for actor in {actor for actor, _ in homes.values()}:
            own = [local for home, local in homes.values() if home == actor]
            replies[actor] = self._hosts.actors[actor].save.remote(own)
        found = {actor: self._ray.get(reply) for actor, reply in replies.items()}
        return {slot: found[actor][local] for slot, (actor, local) in homes.items()}

    def load(self, snapshots: Mapping[int, bytes]) -> Batch:
        """Continue from snapshots. As :meth:`rlinf_plugins.envs.EnvPool.load`."""
        chosen = self._choose(list(snapshots))
        starts = {slot: open_snapshot(snapshots[slot], self.spec.name)[0] for slot in chosen}
        shares: dict[int, dict[int, bytes]] = {}
        for slot in chosen:
            actor, local = self._hosts.home(slot)
            shares.setdefault(actor, {})[local] = snapshots[slot]
            self._hosts.begin(slot, starts[slot])
        replies = {actor: self._hosts.actors[actor].load.remote(own) for actor, own in shares.items()}
        results = [one for actor, reply in replies.items() for one in self._take(actor, self._ray.get(reply))]
        return stack(sorted(results, key=lambda one: chosen.index(one.slot)))

    def offload(self) -> int:
        """Save every running episode in its actor, then end all environment processes.

        Returns:
            Bytes of the snapshots that the actors keep.

        Raises:
            SnapshotError: A running episode cannot be saved; the actors that had offloaded are brought back.
        """
        self._choose(None)
        kept, done, failed = 0, [], None
        for actor, reply in [(actor, actor.offload.remote()) for actor in self._hosts.actors]:
            try:
                kept += self._ray.get(reply)
                done.append(actor)
            except self._ray.exceptions.RayError as error:
                failed = error
        if failed is not None:
            self._ray.get([actor.onload.remote() for actor in done])
            raise failed
        self._parked = True
        return kept

    def onload(self) -> Batch | None:
        """Start the processes again and continue every saved episode. As the local pool's."""
        replies = [actor.onload.remote() for actor in self._hosts.actors]
        results = [one for actor, reply in enumerate(replies) for one in self._take(actor, self._ray.get(reply))]
        self._parked = False
        return stack(results) if results else None

    def drain_records(self) -> list[EpisodeRecord]:
        """Return the record of every episode that ended since the last call, each exactly once."""
        hosts = self._hosts
        asked = [] if self._closed else [actor for actor in range(len(hosts.actors)) if actor not in hosts.down]
        for actor, reply in [(actor, hosts.actors[actor].records.remote()) for actor in asked]:
            try:
                hosts.take_records(actor, self._ray.get(reply))
            except self._ray.exceptions.RayActorError as error:
                hosts.lost(actor, error)
        records = list(hosts.records)
        hosts.records.clear()
        return records

    def stats(self) -> dict[str, int]:
        """Return counters: episodes begun and closed; processes started and workers recycled in the living actors."""
        living = self._ray.get([actor.stats.remote() for actor in self._hosts.actors])
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

    def _reset(self, slot: int, initial: InitialState) -> Any:
        actor, local = self._hosts.home(slot)
        if actor in self._hosts.down:
            self._ray.get(self._hosts.revived(actor))
        self._hosts.begin(slot, initial)
        return self._hosts.actors[actor].reset.remote(local, initial)

    def _step(self, slot: int, steps: np.ndarray) -> Any:
        """Return the reference of a chunk's reply; None where the actor died with the episode."""
        if slot in self._hosts.failed:
            return None
        actor, local = self._hosts.home(slot)
        return self._hosts.actors[actor].step.remote(local, steps)

    def _collect(self, calls: list[tuple[int, int, Any]]) -> Batch:
        results, errors = [], []
        for slot, steps, reply in calls:  # all are taken in, so that no record is lost to another's error
            try:
                results.append(self._get(slot, steps, reply))
            except RlinfError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return stack(results)

    def _get(self, slot: int, steps: int, reply: Any) -> StepResult:
        try:
            return self._lost(slot, steps) if reply is None else self._answer(slot, steps, self._ray.get(reply))
        except self._ray.exceptions.RayActorError as error:
            return self._lost(slot, steps, error)

    async def _await(self, slot: int, steps: int, reply: Any) -> StepResult:
        try:
            return self._lost(slot, steps) if reply is None else self._answer(slot, steps, await reply)
        except self._ray.exceptions.RayActorError as error:
            return self._lost(slot, steps, error)

    def _answer(self, slot: int, steps: int, reply: Reply) -> StepResult:
        try:
            return self._take(self._hosts.home(slot)[0], reply)[0]
        except PoolUsageError:
            if not steps:
                self._hosts.withdraw(slot)
            raise

    def _take(self, actor: int, reply: Reply) -> list[StepResult]:
        answers = self._hosts.take(actor, reply)
        results = [one for one in answers if isinstance(one, StepResult)]
        self._last |= {one.slot: one for one in results}
        for one in answers:
            if not isinstance(one, StepResult):
                raise one
        return results

    def _lost(self, slot: int, steps: int, error: BaseException | None = None) -> StepResult:
        """Say that a slot's episode ended with its actor; an error that comes late tells nothing new."""
        if error is not None and slot not in self._hosts.failed:
            self._hosts.lost(self._hosts.home(slot)[0], error)
        return failed_result(self.spec, self._last.get(slot), slot, steps, self._hosts.failed[slot])
