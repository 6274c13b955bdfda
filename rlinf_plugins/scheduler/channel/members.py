"""Who is alive: leases of producers and consumers, and what follows when one ends."""

from rlinf_plugins.scheduler.channel.intake import Intake
from rlinf_plugins.scheduler.channel.model import Consumer, Group, Member, Producer
from rlinf_plugins.scheduler.channel.outlet import Outlet
from rlinf_plugins.scheduler.channel.queue import KeyQueue
from rlinf_plugins.scheduler.channel.state import State


class Members:
    """Watches the leases of all members.

    Args:
        state: Shared data.
        intake: The producers' side.
        outlet: The consumers' side.
    """

    def __init__(self, state: State, intake: Intake, outlet: Outlet) -> None:
        self._state = state
        self._intake = intake
        self._outlet = outlet

    def wake(self) -> None:
        """Forgive members what they could not say while the broker itself was stopped."""
        due, now = self._state.alarms.due(), self._state.clock()
        lease = self._state.config.lease_seconds
        if due is not None and now - due > lease / 4:
            for member in [*self._state.producers.values(), *self._state.consumers.values()]:
                member.alive_until = max(member.alive_until, now + lease * 2 / 3)

    def find(self, handle: int) -> Member | None:
        """The attached member of this handle."""
        return self._state.consumers.get(handle) or self._state.producers.get(handle)

    def prolong(self, member: Member) -> None:
        """A member was heard of; one whose lease had ended is watched again."""
        member.alive_until = self._state.clock() + self._state.config.lease_seconds
        if member.lapsed:
            member.lapsed = False
            self.watch(member)

    def watch(self, member: Member) -> None:
        """Begin a member's lease."""
        member.alive_until = self._state.clock() + self._state.config.lease_seconds
        self._state.alarms.set(member.alive_until, self._check_alive, member)

    def _check_alive(self, member: Member) -> None:
        if self.find(member.handle) is not member:
            return
        if member.alive_until > self._state.clock():
            self._state.alarms.set(member.alive_until, self._check_alive, member)
            return
        member.lapsed = True
        text = f"{member.name!r} was not heard of for {self._state.config.lease_seconds:g} s"
        if isinstance(member, Consumer):
            held = self._outlet.drop(member, f"consumer {text}")
            self._state.report("consumer-lost", f"consumer {text}; {held} deliveries go to others")
            self._intake.admit()
        elif isinstance(member, Producer) and not member.finished:
            self._lose(member, text)

    def _lose(self, producer: Producer, text: str) -> None:
        state = self._state
        broken = [
            (queue, group)
            for queue in state.queues.values()
            for group in queue.groups.values()
            if producer in group.contributors
        ]
        names = ", ".join(f"{group.name!r} ({group.arrived} of {group.size})" for _, group in broken[:5])
        state.report("producer-lost", f"producer {text}; incomplete groups: {names or 'none'}")
        due = state.clock() + state.config.group_seconds
        for queue, group in broken:
            reason = f"producer {producer.name!r} died, {{}} of {group.size} members came"
            state.alarms.set(due, self._group_overdue, (queue, group, reason))

    def _group_overdue(self, argument: tuple[KeyQueue, Group, str]) -> None:
        queue, group, reason = argument
        state = self._state
        if queue.groups.get(group.name) is group:
            give_up(state, queue, group.name, reason.format(group.arrived))
            self._outlet.serve(queue)
            self._intake.admit()


def give_up(state: State, queue: KeyQueue, name: str, reason: str) -> None:
    """Deliver an incomplete group as it is."""
    queue.give_up(queue.groups[name], reason)
    state.report("group-short", f"group {name!r}: {reason}")
    if state.log is not None:
        state.log(("short", queue.key, name, reason))
