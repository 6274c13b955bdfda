"""A random user against the state machine, with an independent account of what must be true."""

import os
from collections import defaultdict

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.errors import ChannelError, EndOfStreamError
from rlinf_plugins.scheduler.channel.config import ChannelConfig, Granularity
from rlinf_plugins.scheduler.channel.core import ChannelCore
from rlinf_plugins.scheduler.channel.model import Entry, Group, Request
from rlinf_plugins.scheduler.channel.outlet import Batch
from rlinf_plugins.scheduler.channel.recovery import held_items, replay, snapshot

KEYS = ("a", "b")
MAX_ITEMS, MAX_BYTES, LEASE = 12, 60, 10.0
GRANULARITIES = (
    Granularity.item(),
    Granularity.micro_batch(3),
    Granularity.micro_batch(tokens=7),
    Granularity.micro_batch(2, tokens=9, step=5),
    Granularity.global_batch(4),
    Granularity.group(),
    Granularity.micro_batch(4, whole_groups=True),
)


class ChannelMachine(RuleBasedStateMachine):
    """Rules are what members do; invariants are the promise."""

    def __init__(self):
        super().__init__()
        self.log = []
        self.clock = ManualClock()
        self.config = ChannelConfig(
            max_items=MAX_ITEMS, max_bytes=MAX_BYTES, lease_seconds=LEASE, group_seconds=15.0, max_deliveries=None
        )
        self.core = ChannelCore("model", self.config, self.clock, self.log.append)
        self.tickets = 0
        self.puts = {}  # ticket -> identities, in order
        self.gets = {}  # ticket -> (consumer handle, request)
        self.claimed = {}  # producer name -> (handle, epoch, next)
        self.consumers = {}  # name -> handle
        self.alive = set()  # names that beat
        self.offered = {}  # identity -> entry
        self.admitted = set()
        self.refused = set()
        self.committed = set()
        self.stale = set()
        self.leased = {}  # delivery number -> (handle, identities)
        self.last_first = defaultdict(
            lambda: -1
        )  # (producer, epoch, key) -> highest number delivered for the first time
        self.seen = set()
        self.released = set()
        self.group = 0

    @initialize()
    def somebody_is_there(self):
        self.attach_producer("p0")
        self.attach_consumer("c0", 1.0)

    # --- what members do ----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["p0", "p1", "p2"]))
    def attach_producer(self, name):
        producer = self.core.attach_producer(name)
        before = self.claimed.get(name)
        assert before is None or producer.epoch == before[1] + 1
        self.claimed[name] = [producer.handle, producer.epoch, 0]
        self.alive.add(name)
        self.settle()

    @rule(name=st.sampled_from(["c0", "c1", "c2"]), share=st.sampled_from([0.5, 1.0, 2.0]))
    def attach_consumer(self, name, share):
        before = self.consumers.get(name)
        self.consumers[name] = self.core.attach_consumer(name, share=share).handle
        self.leased = {n: held for n, held in self.leased.items() if held[0] != before}
        self.alive.add(name)
        self.settle()

    @rule(
        data=st.data(),
        weights=st.lists(st.integers(0, 9), min_size=1, max_size=6),
        size=st.integers(1, 12),
        key=st.sampled_from(KEYS),
        version=st.none() | st.integers(0, 5),
        wait=st.none() | st.floats(0.5, 8),
        grouped=st.booleans(),
        failing=st.booleans(),
    )
    def put(self, data, weights, size, key, version, wait, grouped, failing):
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        handle, epoch, base = self.claimed[name]
        entries = []
        for weight in weights:
            group = None
            if grouped:
                group = (f"g{self.group // 3}", 3)
                self.group += 1
            failure = "broken" if grouped and failing and not entries else None
            payload = f"{name}/{epoch}/{base + len(entries)}" if failure is None else ""
            entries.append(Entry(key, payload, weight, 0 if failure else size, version, group, failure))
        self._put(name, entries, wait)

    def _put(self, name, entries, wait):
        handle, epoch, base = self.claimed[name]
        self.tickets += 1
        identities = [(name, epoch, base + index) for index in range(len(entries))]
        self.offered.update(zip(identities, entries, strict=True))
        self.puts[self.tickets] = identities
        self.claimed[name][2] = base + len(entries)
        self.core.put(self.tickets, handle, base, entries, None if wait is None else self.clock() + wait)
        self.settle()

    @rule(data=st.data())
    def repeat_put(self, data):
        """A request whose answer was lost is sent again."""
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        handle, epoch, upto = self.claimed[name]
        if upto == 0:
            return
        base = data.draw(st.integers(max(0, upto - 4), upto - 1))
        entries = [self.offered[name, epoch, seq] for seq in range(base, upto)]
        self.tickets += 1
        self.puts[self.tickets] = []
        self.core.put(self.tickets, handle, base, entries, self.clock() + 1)
        self.settle()

    @rule(data=st.data(), swap=st.booleans())
    def overtaking_puts(self, data, swap):
        """Two requests arrive in either order."""
        name = data.draw(st.sampled_from(sorted(self.claimed)))
        handle, epoch, base = self.claimed[name]
        requests = []
        for index in range(2):
            entry = Entry("a", f"{name}/{epoch}/{base + index}", 1, 1)
            self.offered[name, epoch, base + index] = entry
            self.tickets += 1
            self.puts[self.tickets] = [(name, epoch, base + index)]
            requests.append((self.tickets, base + index, entry))
        self.claimed[name][2] = base + 2
        for ticket, seq, entry in reversed(requests) if swap else requests:
            self.core.put(ticket, handle, seq, [entry], self.clock() + 3)
        self.settle()

    @rule(
        data=st.data(),
        key=st.sampled_from(KEYS),
        limit=st.none() | st.integers(1, 5),
        weight=st.none() | st.integers(1, 12),
        fill=st.booleans(),
        wait=st.floats(0.5, 20),
        staleness=st.none() | st.integers(0, 3),
    )
    def get(self, data, key, limit, weight, fill, wait, staleness):
        handle = self.consumers[data.draw(st.sampled_from(sorted(self.consumers)))]
        self.tickets += 1
        request = Request(key, self.tickets, limit, weight, fill, staleness)
        self.gets[self.tickets] = (handle, request)
        self.core.get(self.tickets, handle, request, self.clock() + wait)
        self.settle()

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), partly=st.booleans())
    def ack(self, data, partly):
        number = data.draw(st.sampled_from(sorted(self.leased)))
        handle, units = self.leased[number]
        parts = data.draw(st.sets(st.integers(0, len(units) - 1))) if partly else set(range(len(units)))
        assert self.core.ack(handle, [(number, sorted(parts) if partly else None)]) == {}
        for part in parts:
            assert not self.committed & set(units[part] or ())
            self.committed.update(units[part] or ())
            units[part] = None
        if all(unit is None for unit in units):
            del self.leased[number]
        self.settle()

    @rule(data=st.data())
    def ack_what_is_not_held(self, data):
        """Neither an unknown delivery nor one of another consumer can be committed."""
        handle = self.consumers[data.draw(st.sampled_from(sorted(self.consumers)))]
        foreign = [n for n, held in self.leased.items() if held[0] != handle]
        number = data.draw(st.sampled_from([*foreign, 10**9]))
        assert self.core.ack(handle, [(number, None)])
        self.settle()

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def nack(self, data):
        number = data.draw(st.sampled_from(sorted(self.leased)))
        handle, _ = self.leased.pop(number)
        assert self.core.nack(handle, number)
        assert self.core.ack(handle, [(number, None)])
        self.settle()

    @precondition(lambda self: self.gets)
    @rule(data=st.data())
    def cancel(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.gets)))
        handle, request = self.gets[ticket]
        self.core.cancel(handle, request.number)
        self.settle()
        assert ticket not in self.gets

    @rule(version=st.integers(0, 6))
    def set_version(self, version):
        self.core.set_version(version)
        self.settle()

    @rule(granularity=st.sampled_from(GRANULARITIES))
    def set_granularity(self, granularity):
        self.core.set_granularity(granularity)
        self.settle()

    @rule(data=st.data())
    def fall_silent(self, data):
        self.alive.discard(data.draw(st.sampled_from(sorted(self.alive | {""}))))

    @rule(seconds=st.floats(0.1, 12))
    def time_passes(self, seconds):
        """Whoever lives beats; everything due is done in time, as a host would."""
        end = self.clock() + seconds
        while True:
            due = self.core.next_deadline()
            step = min(end, self.clock() + LEASE / 3, end if due is None else due)
            self.clock.advance(max(0.0, step - self.clock()))
            self.core.tick()
            self.settle()
            handles = {n: h for n, h in self.consumers.items() if n in self.alive}
            handles |= {n: held[0] for n, held in self.claimed.items() if n in self.alive}
            self.core.beat(handles.values())
            if self.clock() >= end:
                break
        self.leased = {n: held for n, held in self.leased.items() if held[0] in self.core.state.consumers}
        for name in [n for n, handle in self.consumers.items() if handle not in self.core.state.consumers]:
            assert name not in self.alive, "a consumer that beats lost its lease"
            self.attach_consumer(name, 1.0)

    @precondition(lambda self: not self.core.state.closed)
    @rule(really=st.integers(0, 9))
    def close(self, really):
        if really == 0:
            self.core.close("test")
            self.settle()

    # --- what the channel did -----------------------------------------------------------------------------------

    steps = 0

    def settle(self):
        ChannelMachine.steps += 1
        state = self.core.state
        for record in self.log:
            if record[0] == "put" and record[5][6] is None:
                identity = record[2:5]
                assert identity in self.offered, f"phantom {identity}"
                assert identity not in self.admitted, f"duplicate {identity}"
                self.admitted.add(identity)
        self.log.clear()
        replies, state.replies = state.replies, []
        # Whoever holds items and waits for more is told of the end together with the others.
        self.told = {self.gets[t][0] for t, answer in replies if isinstance(answer, EndOfStreamError)}
        for ticket, answer in replies:
            if ticket in self.puts:
                self._put_answered(self.puts.pop(ticket), answer)
            else:
                self._get_answered(ticket, *self.gets.pop(ticket), answer)
        for payload in state.released:
            if payload:
                assert payload not in self.released, f"{payload} was released twice"
                self.released.add(payload)
        state.released.clear()

    def _put_answered(self, identities, answer):
        items = {i for i in identities if self.offered[i].failure is None}
        if isinstance(answer, Exception):
            assert isinstance(answer, ChannelError)
            self.refused |= items - self.admitted
        else:
            assert items <= self.admitted, "an item was confirmed and not admitted"

    def _get_answered(self, ticket, handle, request, answer):
        if isinstance(answer, Exception):
            assert isinstance(answer, ChannelError)
            if isinstance(answer, EndOfStreamError):
                assert self.core.size(request.key) == 0
                for consumer in self.core.state.consumers.values():
                    if not consumer.waiting and consumer.handle not in self.told:
                        assert not any(d.queue.key == request.key for d in consumer.deliveries.values())
            return
        assert isinstance(answer, Batch)
        consumer = self.core.state.consumers.get(handle)
        self.stale |= {item.identity for item in answer.stale}
        units = []
        for unit in answer.units:
            identities = [item.identity for item in unit.items]
            assert set(identities) <= self.admitted - self.committed - self.stale
            for item in unit.items:
                assert item.key == request.key
                self._in_order(item)
            if isinstance(unit, Group):
                assert len(unit.items) + len(unit.failed) == unit.size or unit.short
            units.append(identities)
        self._within_limits(request, answer)
        # A batch may already have been taken back (cancel, lapse) by the time its answer is read.
        if consumer is not None and answer.number in consumer.deliveries:
            self.leased[answer.number] = (handle, units)

    def _in_order(self, item):
        """First in, first out per producer and key; groups move as one, so order is kept within and between them."""
        if item.attempts > 1 or item.identity in self.seen or item.group is not None:
            return
        self.seen.add(item.identity)
        stream = (*item.identity[:2], item.key)
        assert item.seq > self.last_first[stream], "order within a producer and key was broken"
        self.last_first[stream] = item.seq

    def _within_limits(self, request, batch):
        units = batch.units
        assert units
        if len(units) > 1:
            if request.limit is not None:
                assert sum(unit.count for unit in units) <= request.limit
            if request.weight is not None:
                assert sum(unit.weight for unit in units) <= request.weight
            assert batch.step is None or {unit.step for unit in units} == {batch.step}

    # --- the promise --------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_made_up(self):
        held = [item.identity for item in held_items(self.core)]
        assert len(held) == len(set(held)), "an item is held twice"
        waiting_stale = {
            item.identity for q in self.core.state.queues.values() for w in q.waiters.values() for item in w.stale
        }
        gone = self.committed | {
            report.identity for report in self.core.state.reports if report.kind == "stale" and report.identity
        }
        assert waiting_stale <= gone
        assert set(held) == self.admitted - gone
        assert not self.committed & self.refused

    @invariant()
    def totals_are_right(self):
        state = self.core.state
        held = list(held_items(self.core))
        assert state.items == len(held)
        assert state.bytes == sum(item.nbytes for item in held)
        leased = sum(
            len(u.items)
            for c in state.consumers.values()
            for d in c.deliveries.values()
            for u in d.units
            if u is not None
        )
        assert state.leased == leased
        for queue in state.queues.values():
            assert queue.count == sum(unit.count for unit in queue.ready)
            assert queue.weight == sum(unit.weight for unit in queue.ready)
            orders = [unit.order for unit in queue.ready]
            assert orders == sorted(orders)

    @invariant()
    def payloads_are_released_once_committed(self):
        kept = {item.payload for item in held_items(self.core)}
        assert not kept & self.released
        assert {f"{n}/{e}/{s}" for n, e, s in self.committed} <= self.released

    @invariant()
    def bounded(self):
        state = self.core.state
        extra = state.counts["beyond_bounds"]
        assert state.items <= MAX_ITEMS + extra
        assert state.bytes <= MAX_BYTES + 12 * extra

    @invariant()
    def nobody_waits_for_nothing(self):
        state = self.core.state
        blocked = self.core.intake.blocked
        if blocked:
            entry = blocked[0].entries[blocked[0].at]
            assert state.items >= MAX_ITEMS or state.bytes + entry.nbytes > MAX_BYTES
        for queue in state.queues.values():
            assert not queue.idle, "an empty key was not reclaimed"
            for waiter in queue.waiters.values():
                limit, weight, fill = waiter.request.limit, waiter.request.weight, waiter.request.fill
                if limit is None and weight is None:
                    continue
                if min(queue.waiters) == waiter.ticket and len(queue.waiters) == 1:
                    assert fill or not queue.ready
                    assert limit is None or queue.count < limit or queue.granularity.whole_groups
                    assert not (state.closed and queue.ready)

    @invariant()
    def alarms_do_not_pile_up(self):
        state = self.core.state
        members = len(state.producers) + len(state.consumers)
        early = sum(len(p.early) for p in state.producers.values())
        waiting = len(self.puts) + len(self.gets) + early
        replaced = self.core.state.number() & 0xFFFF  # members that are gone keep their last alarm until it rings
        assert len(state.alarms) <= members + waiting + replaced

    def teardown(self):
        """The records stand for the state: a channel made of them holds the same items."""
        copy = ChannelCore("copy", self.config, self.clock, None, 1)
        copy.state.granularity = self.core.state.granularity
        replay(snapshot(self.core), copy)
        assert {item.identity for item in held_items(copy)} == {item.identity for item in held_items(self.core)}


STEPS, EXAMPLES = 60, int(os.environ.get("RLINF_CHANNEL_EXAMPLES", "250"))


def test_the_promise_holds_for_random_users(seed):
    """A quick look; the slow variant takes more than 10 000 steps."""
    _run(seed, 40)


@pytest.mark.slow
def test_the_promise_holds_for_many_random_users(seed):
    """At least 10 000 steps, counted."""
    ChannelMachine.steps = 0
    _run(seed, EXAMPLES)
    assert EXAMPLES < 250 or ChannelMachine.steps >= 10_000


def _run(seed, examples):
    chosen = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=True,
        # No shrinking: it takes minutes on long runs, and the steps are printed either way.
        phases=[Phase.generate] if "RLINF_CHANNEL_SHRINK" not in os.environ else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(hypothesis.seed(seed)(ChannelMachine), settings=chosen)
