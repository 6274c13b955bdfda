"""A channel's state machine with a clock that moves when told to."""

from dataclasses import dataclass, field

import pytest

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.scheduler.channel.config import ChannelConfig
from rlinf_plugins.scheduler.channel.core import ChannelCore
from rlinf_plugins.scheduler.channel.model import Entry, Request


@dataclass
class Bench:
    """Calls the state machine as a host would, and keeps the answers."""

    config: ChannelConfig
    clock: ManualClock = field(default_factory=ManualClock)
    log: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)
    silent: set = field(default_factory=set)
    tickets: int = 0

    def __post_init__(self):
        self.core = ChannelCore("bench", self.config, self.clock, self.log.append)
        self.released = []

    def put(self, producer, *values, wait=None, base=None, **options):
        """Put values as payloads; returns the ticket."""
        options = {"key": "k", "nbytes": 1, **options}
        entries = [Entry(payload=value, **options) for value in values]
        return self.put_entries(producer, entries, wait, base)

    def put_entries(self, producer, entries, wait=None, base=None):
        self.tickets += 1
        deadline = None if wait is None else self.clock() + wait
        self.core.put(self.tickets, producer.handle, producer.claimed if base is None else base, entries, deadline)
        return self.settle()

    def get(self, consumer, limit=1, wait=None, key="k", **options):
        """Ask for a batch; returns the ticket."""
        self.tickets += 1
        request = Request(key, self.tickets, limit, **options)
        self.core.get(self.tickets, consumer.handle, request, None if wait is None else self.clock() + wait)
        return self.settle()

    def plan(self, consumer, wait=None, key="k"):
        """Ask for a batch of the channel's own granularity."""
        return self.get(consumer, None, wait, key)

    def settle(self):
        replies, self.core.state.replies = self.core.state.replies, []
        for ticket, answer in replies:
            assert ticket not in self.answers, "answered twice"
            self.answers[ticket] = answer
        self.released += self.core.state.released
        self.core.state.released.clear()
        return self.tickets

    def values(self, ticket):
        """Payloads of the batch that answered a get."""
        answer = self.answers[ticket]
        if isinstance(answer, Exception):
            raise answer
        return [item.payload for unit in answer.units for item in unit.items]

    def ack(self, consumer, ticket, parts=None):
        refused = self.core.ack(consumer.handle, [(self.answers[ticket].number, parts)])
        self.settle()
        return refused

    def run(self, seconds):
        """Let time pass; members that are not silent beat."""
        end = self.clock() + seconds
        while self.clock() < end:
            due = self.core.next_deadline()
            step = min(
                end, self.clock() + self.config.lease_seconds / 3, end if due is None else max(due, self.clock())
            )
            self.clock.advance(step - self.clock())
            self.core.tick()
            state = self.core.state
            members = [*state.producers.values(), *state.consumers.values()]
            self.core.beat([m.handle for m in members if m.name not in self.silent])
            self.settle()
            if step == end:
                break


@pytest.fixture
def bench():
    """Makes a bench: ``bench(max_items=4)``."""
    return lambda **options: Bench(ChannelConfig(**options))
