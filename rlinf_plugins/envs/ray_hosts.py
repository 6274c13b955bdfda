"""The actors of a distributed pool as the driver sees them: slots are translated, the dead are accounted for."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlinf_plugins.core.errors import EnvStartError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.ray_actor import Answer, EnvActor, Reply
from rlinf_plugins.envs.ray_placement import Placement
from rlinf_plugins.envs.results import EpisodeRecord, StepResult

_CLOSE_S = 30.0


class Hosts:
    """Starts the actors, finds the one of a slot, and keeps the records of all.

    Args:
        factories: One per slot.
        config: Options of the pool.
        placement: Where the actors run.

    Attributes:
        spec: What the environments take and give.
        records: Episodes that ended and were not drained yet.
        begun: Episodes that began.
        closed: Episodes that ended.
        failed: Slots whose actor died since their last reset, with the failure.
        down: Actors that died and were not asked since.
    """

    def __init__(self, factories: Sequence[EnvFactory], config: PoolConfig, placement: Placement) -> None:
        self._ray = ray = require("ray", "ray")
        self._shares = placement.shares(len(factories))
        self._home = {slot: (actor, at) for actor, share in enumerate(self._shares) for at, slot in enumerate(share)}
        make = ray.remote(EnvActor)
        self.actors = [
            make.options(**placement.options(len(share))).remote([factories[slot] for slot in share], config)
            for share in self._shares
        ]
        self.records: deque[EpisodeRecord] = deque()
        self.begun = self.closed = 0
        self.failed: dict[int, Failure] = {}
        self.down: set[int] = set()
        self._open: dict[int, deque[tuple[int, InitialState]]] = {slot: deque() for slot in self._home}
        self.spec: EnvSpec = self._start(placement)

    def _start(self, placement: Placement) -> EnvSpec:
        waiting = [actor.spec.remote() for actor in self.actors]
        try:
            specs: list[EnvSpec] = self._ray.get(waiting, timeout=placement.start_timeout)
        except self._ray.exceptions.GetTimeoutError as error:
            self.kill()
            needs = "; ".join(placement.describe(len(share)) for share in self._shares)
            raise EnvStartError(
                f"the environments were not up within {placement.start_timeout:g} s; the actors need {needs}; Ray has "
                f"{self._ray.available_resources()} free"
            ) from error
        except self._ray.exceptions.RayActorError as error:
            self.kill()
            raise EnvStartError(f"an actor could not make its environments: {error}") from error
        return specs[0]

    def home(self, slot: int) -> tuple[int, int]:
        """Return the actor that hosts a slot, and the slot's number within it."""
        return self._home[slot]

    def begin(self, slot: int, initial: InitialState) -> None:
        """Note that an episode begins."""
        self.failed.pop(slot, None)
        self._open[slot].append((self.begun, initial))
        self.begun += 1

    def withdraw(self, slot: int) -> None:
        """Note that the episode noted last was refused."""
        self._open[slot].pop()
        self.begun -= 1

    def take(self, actor: int, reply: Reply) -> list[Answer]:
        """Take an actor's reply in and return its answers with the pool's slots."""
        self.take_records(actor, reply.records)
        return [self._translate(one, self._shares[actor]) for one in reply.answers]

    def take_records(self, actor: int, records: Sequence[EpisodeRecord]) -> None:
        """Keep an actor's records, with the pool's slots and numbers; replies may come out of order."""
        for record in records:
            slot = self._shares[actor][record.slot]
            began = next(one for one in self._open[slot] if one[1] == record.initial)
            self._open[slot].remove(began)
            failure = None if record.failure is None else replace(record.failure, slot=slot)
            self._close(replace(record, slot=slot, number=began[0], failure=failure))

    def lost(self, actor: int, error: BaseException) -> None:
        """Close the episodes of an actor that died, each as failed; its slots have an entry in ``failed``."""
        self.down.add(actor)
        words = str(error).strip().splitlines()
        reason = f"the Ray actor that hosts it died: {words[0] if words else type(error).__name__}"
        for slot in self._shares[actor]:
            failure = Failure(
                kind="crashed", slot=slot, phase="actor", step=0, reason=reason, last_words=str(error)[-1000:]
            )
            self.failed[slot] = failure
            while self._open[slot]:
                number, initial = self._open[slot].popleft()
                self._close(_unfinished(number, slot, initial, failure))

    def revived(self, actor: int) -> Any:
        """Return a reference that is ready once an actor that died is up again."""
        self.down.discard(actor)
        return self.actors[actor].spec.options(max_task_retries=-1).remote()

    def close(self) -> None:
        """End all actors in good order; those that do not answer are killed."""
        ends = [
            (actor, self.actors[actor].close.remote()) for actor in range(len(self.actors)) if actor not in self.down
        ]
        for actor, end in ends:
            try:
                self.take_records(actor, self._ray.get(end, timeout=_CLOSE_S))
            except self._ray.exceptions.RayError as error:
                self.lost(actor, error)
        self.kill()

    def kill(self) -> None:
        """End all actors at once; their workers end with them."""
        for actor in self.actors:
            self._ray.kill(actor, no_restart=True)

    def _close(self, record: EpisodeRecord) -> None:
        self.records.append(record)
        self.closed += 1

    @staticmethod
    def _translate(one: Answer, share: list[int]) -> Answer:
        if not isinstance(one, StepResult):
            return one
        failure = None if one.failure is None else replace(one.failure, slot=share[one.slot])
        return replace(one, slot=share[one.slot], failure=failure)


def _unfinished(number: int, slot: int, initial: InitialState, failure: Failure) -> EpisodeRecord:
    """Return the record of an episode of which nothing but its beginning is known."""
    return EpisodeRecord(
        number=number,
        slot=slot,
        initial=initial,
        task="",
        ending="failed",
        length=0,
        ret=0.0,
        success_once=False,
        success_at_end=False,
        terminated=False,
        truncated=False,
        failure=failure,
    )
