"""The actors of a distributed pool as the driver sees them: slots are translated, the dead are accounted for."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf_plugins.core.clock import monotonic
from rlinf_plugins.core.errors import EnvStartError, RlinfError
from rlinf_plugins.core.extras import require
from rlinf_plugins.envs.config import PoolConfig
from rlinf_plugins.envs.failures import Failure
from rlinf_plugins.envs.protocol import EnvFactory, EnvSpec, InitialState
from rlinf_plugins.envs.ray_actor import Answer, EnvActor, Reply
from rlinf_plugins.envs.ray_placement import Placement
from rlinf_plugins.envs.results import EpisodeRecord, StepResult

_SLACK_S = 60.0
"""Time an actor has beyond what its workers have, before it counts as hung."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A command to one environment that is under way.

    Attributes:
        slot: Which environment.
        steps: Length of its chunk; 0 for a reset.
        number: Of the episode a reset begins.
        reply: Reference to the actor's reply; None where the actor died with the episode before.
        deadline: When the actor counts as hung.
    """

    slot: int
    steps: int
    number: int
    reply: Any
    deadline: float


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
        down: Actors that died and have not answered since; Ray starts them again.
        lost_errors: What Ray raises when an actor is gone or does not answer.
    """

    def __init__(self, factories: Sequence[EnvFactory], config: PoolConfig, placement: Placement) -> None:
        self._ray = ray = require("ray", "ray")
        self.lost_errors = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, TimeoutError)
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
        self._open: dict[int, dict[int, InitialState]] = {slot: {} for slot in self._home}
        self._seconds = config.deadlines
        self._restart_s = config.deadlines.start + config.restart.max_delay_s
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

    # --- commands ---------------------------------------------------------------------------------------------

    def reset(self, slot: int, initial: InitialState) -> Flight:
        """Send a reset; an actor that is being restarted takes it when it is up."""
        actor, local = self._home[slot]
        number = self.begin(slot, initial)
        reply = self._call(actor, "reset", local, initial, number)
        deadline = monotonic() + self._seconds.reset + self._restart_s + _SLACK_S
        return Flight(slot=slot, steps=0, number=number, reply=reply, deadline=deadline)

    def step(self, slot: int, actions: Any) -> Flight:
        """Send a chunk, ``[steps, action_dim]``."""
        actor, local = self._home[slot]
        reply = None if slot in self.failed else self._call(actor, "step", local, actions)
        deadline = monotonic() + self._seconds.step * len(actions) + _SLACK_S
        return Flight(slot=slot, steps=len(actions), number=-1, reply=reply, deadline=deadline)

    def arrived(self, flights: Sequence[Flight], at_least: int) -> list[Flight]:
        """Wait until ``at_least`` of ``flights`` are answered, lost or overdue, and return all that are."""
        while True:
            waiting = [flight.reply for flight in flights if flight.reply is not None]
            done = set(self._ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
            now = monotonic()
            ready = [one for one in flights if one.reply is None or one.reply in done or one.deadline <= now]
            if len(ready) >= at_least:
                return ready
            slots = {one.slot for one in ready}
            rest = [one for one in flights if one.slot not in slots]
            until = max(0.0, min(one.deadline for one in rest) - now)
            self._ray.wait([one.reply for one in rest], num_returns=at_least - len(ready), timeout=until)

    def ask(
        self, method: str, calls: Mapping[int, tuple[Any, ...]], seconds: float = 0.0
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Call ``method`` of several actors, each with its arguments.

        Returns:
            Replies and errors, by actor. Records in the replies are taken in; an actor that is gone or hangs was
            accounted for.
        """
        replies: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        deadline = monotonic() + seconds + _SLACK_S
        if self.down & calls.keys():
            deadline += self._restart_s
        waiting = {actor: self._call(actor, method, *arguments) for actor, arguments in calls.items()}
        for actor, reference in waiting.items():
            try:
                replies[actor] = self._ray.get(reference, timeout=max(1.0, deadline - monotonic()))
            except self.lost_errors as error:
                errors[actor] = error
            except RlinfError as error:  # the actor's own, as Ray raises it again
                errors[actor] = error
            else:
                self.down.discard(actor)
        for actor, why in errors.items():
            if isinstance(why, self.lost_errors):
                self.lost(actor, why)
        return replies, errors

    def _call(self, actor: int, method: str, *arguments: Any) -> Any:
        retries = -1 if actor in self.down else 0
        return getattr(self.actors[actor], method).options(max_task_retries=retries).remote(*arguments)

    # --- episodes ---------------------------------------------------------------------------------------------

    def begin(self, slot: int, initial: InitialState) -> int:
        """Note that an episode begins; return its number."""
        self.failed.pop(slot, None)
        self._open[slot][self.begun] = initial
        self.begun += 1
        return self.begun - 1

    def withdraw(self, slot: int, number: int) -> None:
        """Note that an episode was refused."""
        if self._open[slot].pop(number, None) is not None:
            self.begun -= 1

    def take(self, actor: int, reply: Reply) -> list[Answer]:
        """Take an actor's reply in and return its answers with the pool's slots."""
        self.down.discard(actor)
        self.take_records(actor, reply.records)
        return [self._translate(one, self._shares[actor]) for one in reply.answers]

    def take_records(self, actor: int, records: Sequence[EpisodeRecord]) -> None:
        """Keep an actor's records; what it says of episodes that failed when it was lost comes too late."""
        for record in records:
            slot = self._shares[actor][record.slot]
            if self._open[slot].pop(record.number, None) is None:
                continue
            failure = None if record.failure is None else replace(record.failure, slot=slot)
            self._close(replace(record, slot=slot, failure=failure))

    def lost(self, actor: int, error: BaseException) -> None:
        """Close the episodes of an actor that died or hangs, each as failed; its slots have an entry in ``failed``."""
        hung = not isinstance(error, self._ray.exceptions.RayActorError)
        if hung:
            self._ray.kill(self.actors[actor], no_restart=False)
        self.down.add(actor)
        words = str(error).strip().splitlines()
        died = f"died: {words[0] if words else type(error).__name__}"
        for slot in self._shares[actor]:
            failure = Failure(
                kind="hung" if hung else "crashed",
                slot=slot,
                phase="actor",
                step=0,
                reason=f"the Ray actor that hosts it {'did not answer in time' if hung else died}",
                last_words=str(error)[-1000:],
            )
            self.failed[slot] = failure
            for number, initial in self._open[slot].items():
                self._close(_unfinished(number, slot, initial, failure))
            self._open[slot].clear()

    def close(self) -> None:
        """End all actors in good order; those that do not answer are killed."""
        living = {actor: () for actor in range(len(self.actors)) if actor not in self.down}
        for actor, records in self.ask("close", living, self._seconds.close)[0].items():
            self.take_records(actor, records)
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
