"""What the state machine promises, one sentence per test."""

import pytest

from rlinf_plugins.core.errors import (
    BatchTooLargeError,
    ChannelClosedError,
    ChannelTimeoutError,
    EndOfStreamError,
    ItemTooLargeError,
    SequenceGapError,
    UnknownMemberError,
    WrongGroupError,
)
from rlinf_plugins.scheduler.channel.config import Granularity
from rlinf_plugins.scheduler.channel.model import Entry


@pytest.fixture
def small(bench):
    b = bench(max_items=4, max_bytes=100)
    return b, b.core.attach_producer("p"), b.core.attach_consumer("c")


def test_first_in_first_out(small):
    b, p, c = small
    b.put(p, "x", "y", "z")
    assert b.values(b.get(c)) == ["x"]
    assert b.values(b.get(c, 2)) == ["y", "z"]


def test_a_get_waits_until_something_comes(small):
    b, p, c = small
    get = b.get(c)
    assert get not in b.answers
    b.put(p, "x")
    assert b.values(get) == ["x"]


def test_gets_on_different_keys_do_not_block_each_other(small):
    b, p, c = small
    first = b.get(c, key="never")
    second = b.get(c, key="k")
    b.put(p, "x")
    assert first not in b.answers
    assert b.values(second) == ["x"]


# --- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"max_items": 2, "max_bytes": 100}, {"max_items": 9, "max_bytes": 2}])
def test_a_full_channel_makes_the_producer_wait_until_items_are_committed(bench, options):
    b = bench(**options)
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    put = b.put(p, 1, 2, 3)
    assert put not in b.answers
    assert b.core.state.items == 2
    get = b.get(c)
    assert put not in b.answers, "a leased item still takes room"
    b.ack(c, get)
    assert b.answers[put] == 3


def test_a_put_that_finds_no_room_in_time_says_what_holds_the_room(small):
    b, p, c = small
    b.put(p, 1, 2, 3, 4)
    b.get(c)
    put = b.put(p, 5, wait=1)
    b.run(1.1)
    assert isinstance(b.answers[put], ChannelTimeoutError)
    assert "1 of 1 items found no room" in str(b.answers[put])
    assert "4 of 4 items" in str(b.answers[put])
    assert "1 items on lease" in str(b.answers[put])
    assert b.released == [5], "what was refused is released"


def test_waiting_puts_are_admitted_in_the_order_they_came(small):
    b, p, c = small
    q = b.core.attach_producer("q")
    b.put(p, 1, 2, 3, 4)
    b.put(q, "first")
    b.put(p, "second")
    got = []
    for _ in range(6):
        get = b.get(c)
        got += b.values(get)
        b.ack(c, get)
    assert got == [1, 2, 3, 4, "first", "second"]


def test_an_item_larger_than_the_bound_is_refused_at_once_with_both_numbers(small):
    b, p, _ = small
    put = b.put(p, "huge", nbytes=101)
    assert isinstance(b.answers[put], ItemTooLargeError)
    assert "101 bytes" in str(b.answers[put])
    assert "max_bytes=100" in str(b.answers[put])
    assert b.answers[b.put(p, "fine")] == 1


def test_a_batch_larger_than_the_bound_is_refused_at_once_with_both_numbers(small):
    b, _, c = small
    with pytest.raises(BatchTooLargeError, match=r"5 items.*max_items=4"):
        b.values(b.get(c, 5))
    with pytest.raises(BatchTooLargeError, match=r"5 items.*max_items=4"):
        b.core.set_granularity(Granularity.micro_batch(5))


def test_a_batch_that_cannot_fill_because_the_bytes_are_used_up_is_handed_out_short(bench):
    b = bench(max_items=10, max_bytes=30)
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    get = b.get(c, 8)
    b.put(p, 1, 2, 3, 4, nbytes=10)
    assert b.values(get) == [1, 2, 3]


def test_an_exact_batch_that_cannot_fill_is_an_error_with_the_numbers(bench):
    b = bench(max_items=10, max_bytes=30, granularity=Granularity.global_batch(8))
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    get = b.plan(c)
    b.put(p, 1, 2, 3, 4, nbytes=10)
    with pytest.raises(BatchTooLargeError, match=r"8 items.*30 of max_bytes=30"):
        b.values(get)
    assert b.core.state.items == 3, "nothing was dropped"


# --- effectively once -------------------------------------------------------------------------------------------


def test_a_repeated_put_is_admitted_once(small):
    b, p, _ = small
    b.put(p, 1, 2)
    again = b.put(p, 1, 2, 3, base=0)
    assert b.answers[again] == 1
    assert b.core.state.items == 3
    assert b.core.state.counts["duplicates"] == 2


def test_a_repeated_put_that_still_waits_is_answered_with_the_first(small):
    b, p, c = small
    b.put(p, 1, 2, 3, 4)
    first = b.put(p, 5)
    second = b.put(p, 5, base=4)
    assert second not in b.answers
    b.ack(c, b.get(c))
    assert b.answers[first] == b.answers[second] == 1
    assert b.core.state.items == 4


def test_a_repeated_put_that_was_refused_is_not_confirmed(small):
    b, p, _ = small
    b.put(p, 1, 2, 3, 4)
    b.put(p, 5, wait=1)
    b.run(1.1)
    assert isinstance(b.answers[b.put(p, 5, base=4)], ChannelTimeoutError)


def test_puts_that_overtook_each_other_are_put_in_order(small):
    b, p, c = small
    late = b.put(p, "b", base=1)
    assert late not in b.answers
    b.put(p, "a", base=0)
    assert b.answers[late] == 1
    assert b.values(b.get(c, 2)) == ["a", "b"]


def test_a_gap_that_stays_is_an_error(small):
    b, p, _ = small
    put = b.put(p, "b", base=1)
    b.run(b.config.lease_seconds + 1)
    assert isinstance(b.answers[put], SequenceGapError)
    assert b.core.state.items == 0


def test_a_producer_that_was_replaced_can_put_no_more(small):
    b, p, c = small
    b.put(p, 1, 2, 3, 4)
    waiting = b.put(p, 5)
    newer = b.core.attach_producer("p")
    b.settle()
    assert isinstance(b.answers[waiting], Exception)
    assert isinstance(b.answers[b.put(p, 6)], UnknownMemberError)
    assert newer.epoch == 1
    b.ack(c, b.get(c))
    assert b.answers[b.put(newer, 1)] == 1


# --- leases -----------------------------------------------------------------------------------------------------


def test_what_a_dead_consumer_held_is_delivered_to_another(small):
    b, p, c = small
    d = b.core.attach_consumer("d")
    b.put(p, 1, 2)
    get = b.get(c, 2)
    b.silent.add("c")
    waiting = b.get(d, 2)
    b.run(b.config.lease_seconds + 0.1)
    assert b.values(waiting) == [1, 2]
    assert [item.attempts for item in b.answers[waiting].units] == [2, 2]
    assert "lease ended" in b.ack(c, get)[b.answers[get].number]
    assert b.ack(d, waiting) == {}
    assert b.core.state.counts["committed"] == 2
    assert [r.kind for r in b.core.reports() if r.kind == "consumer-lost"] == ["consumer-lost"]


def test_a_consumer_that_beats_keeps_its_lease(small):
    b, p, c = small
    b.put(p, 1)
    get = b.get(c)
    b.run(b.config.lease_seconds * 5)
    assert b.ack(c, get) == {}


def test_a_lease_can_end_although_the_consumer_lives(small):
    b, p, c = small
    b.put(p, 1)
    get = b.get(c, hold=3.0)
    b.run(2.9)
    assert b.core.size("k") == 0
    b.run(0.2)
    assert b.core.size("k") == 1
    assert b.ack(c, get)


def test_an_acknowledgement_that_is_repeated_is_no_mistake(small):
    b, p, c = small
    b.put(p, 1)
    get = b.get(c)
    assert b.ack(c, get) == {}
    assert b.ack(c, get) == {}
    assert b.core.state.counts["committed"] == 1


def test_a_part_of_a_delivery_can_be_committed(small):
    b, p, c = small
    b.put(p, 1, 2, 3)
    get = b.get(c, 3)
    b.ack(c, get, [0, 2])
    b.core.nack(c.handle, b.answers[get].number)
    assert b.released == [1, 3]
    assert b.values(b.get(c)) == [2]


def test_what_comes_back_goes_to_its_place(small):
    b, p, c = small
    b.put(p, 1, 2, 3, 4)
    first, second = b.get(c), b.get(c)
    b.core.nack(c.handle, b.answers[second].number)
    b.core.nack(c.handle, b.answers[first].number)
    assert b.values(b.get(c, 4)) == [1, 2, 3, 4]


def test_a_cancelled_get_takes_nothing(small):
    b, p, c = small
    waiting = b.get(c)
    b.core.cancel(c.handle, waiting)
    b.put(p, 1)
    assert b.core.size("k") == 1
    answered = b.get(c)
    b.core.cancel(c.handle, answered)
    assert b.core.size("k") == 1, "also if its answer was on the way"


def test_a_get_that_was_overtaken_by_its_own_cancellation_takes_nothing(small):
    b, p, c = small
    b.core.cancel(c.handle, b.tickets + 1)
    late = b.get(c)
    assert isinstance(b.answers[late], ChannelTimeoutError)
    b.put(p, 1)
    assert b.core.size("k") == 1


def test_a_stopped_broker_does_not_declare_everybody_dead(small):
    b, p, c = small
    b.put(p, 1)
    get = b.get(c)
    b.clock.advance(1000)
    b.core.tick()
    b.settle()
    b.run(1)
    assert b.ack(c, get) == {}


def test_an_item_that_keeps_coming_back_is_set_aside_and_reported(bench):
    b = bench(max_deliveries=2)
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, "poison", "fine")
    for _ in range(2):
        b.core.nack(c.handle, b.answers[b.get(c)].number)
    assert b.values(b.get(c)) == ["fine"]
    assert [item.payload for item in b.core.dead_letters()] == ["poison"]
    assert any(r.kind == "dead-letter" and r.identity == ("p", 0, 0) for r in b.core.reports())


# --- end of stream ----------------------------------------------------------------------------------------------


def test_closing_flushes_the_tail_and_ends_the_stream(small):
    b, p, c = small
    b.put(p, 1, 2)
    get = b.get(c, 4)
    b.core.close()
    b.settle()
    assert b.values(get) == [1, 2]
    b.ack(c, get)
    with pytest.raises(EndOfStreamError):
        b.values(b.get(c))


def test_nothing_can_be_put_after_closing(small):
    b, p, _ = small
    b.put(p, 1, 2, 3, 4)
    waiting = b.put(p, 5)
    b.core.close("done")
    b.settle()
    assert isinstance(b.answers[waiting], ChannelClosedError)
    assert "1 items were not admitted" in str(b.answers[waiting])
    assert isinstance(b.answers[b.put(p, 6)], ChannelClosedError)


def test_the_stream_does_not_end_while_somebody_may_give_something_back(small):
    b, p, c = small
    d = b.core.attach_consumer("d")
    b.put(p, 1)
    get = b.get(c)
    waiting = b.get(d)
    b.core.close()
    b.settle()
    assert waiting not in b.answers
    b.silent.add("c")
    b.run(b.config.lease_seconds + 0.1)
    assert b.values(waiting) == [1]
    assert b.ack(c, get)


def test_the_stream_ends_for_all_once_the_last_item_is_committed(small):
    b, p, c = small
    d = b.core.attach_consumer("d")
    b.put(p, 1)
    get, waiting = b.get(c), b.get(d)
    b.core.close()
    b.ack(c, get)
    with pytest.raises(EndOfStreamError):
        b.values(waiting)


def test_the_stream_ends_when_all_producers_have_finished(bench):
    b = bench(producers=2)
    p, q, c = b.core.attach_producer("p"), b.core.attach_producer("q"), b.core.attach_consumer("c")
    get = b.get(c)
    b.core.finish(p.handle)
    b.settle()
    assert get not in b.answers
    b.core.finish(q.handle)
    b.settle()
    with pytest.raises(EndOfStreamError, match="all 2 producers have finished"):
        b.values(get)


# --- weights and balance ----------------------------------------------------------------------------------------


def test_a_batch_by_weight_stops_before_it_would_exceed_the_target(small):
    b, p, c = small
    for weight in (3, 3, 3):
        b.put(p, weight, weight=weight)
    assert b.values(b.get(c, None, weight=7)) == [3, 3]


def test_an_item_heavier_than_the_target_is_a_batch_of_its_own(small):
    b, p, c = small
    b.put(p, "heavy", weight=50)
    b.put(p, "light", weight=1)
    assert b.values(b.get(c, None, weight=7)) == ["heavy"]


def test_a_large_batch_is_not_starved_by_small_ones(small):
    b, p, c = small
    d = b.core.attach_consumer("d")
    large, smaller = b.get(c, 3), b.get(d, 1)
    b.put(p, 1, 2)
    assert smaller not in b.answers
    b.put(p, 3, 4)
    assert b.values(large) == [1, 2, 3]
    assert b.values(smaller) == [4]


def test_waiting_consumers_are_balanced_by_weight(bench):
    b = bench()
    p = b.core.attach_producer("p")
    consumers = [b.core.attach_consumer(f"c{i}") for i in range(3)]
    tickets = {c.name: b.get(c) for c in consumers}
    by_name = {c.name: c for c in consumers}
    for index in range(300):
        b.put(p, index, weight=1 + (index * 7919) % 97)
        for name, ticket in tickets.items():
            if ticket in b.answers:
                b.ack(by_name[name], ticket)
                tickets[name] = b.get(by_name[name])
    loads = [c.load for c in consumers]
    assert max(loads) - min(loads) <= 97
    assert min(loads) > 4000


def test_a_newcomer_does_not_get_everything_until_it_has_caught_up(bench):
    b = bench()
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, *range(100))
    b.ack(c, b.get(c, 100))
    d = b.core.attach_consumer("d")
    assert d.load == c.load


def test_shares_are_honoured(bench):
    b = bench()
    p = b.core.attach_producer("p")
    c, d = b.core.attach_consumer("c", share=3.0), b.core.attach_consumer("d", share=1.0)
    counts = {"c": 0, "d": 0}
    tickets = {"c": b.get(c), "d": b.get(d)}
    for index in range(400):
        b.put(p, index)
        for consumer in (c, d):
            if tickets[consumer.name] in b.answers:
                counts[consumer.name] += 1
                b.ack(consumer, tickets[consumer.name])
                tickets[consumer.name] = b.get(consumer)
    assert counts["c"] == pytest.approx(300, abs=4)


# --- groups -----------------------------------------------------------------------------------------------------


def test_groups_are_kept_whole_where_asked(bench):
    b = bench(granularity=Granularity.group())
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    get = b.plan(c)
    b.put(p, "a1", group=("a", 2))
    b.put(p, "b1", "b2", group=("b", 2))
    assert b.values(get) == ["b1", "b2"]
    b.put(p, "a2", group=("a", 2))
    assert b.values(b.plan(c)) == ["a1", "a2"]


def test_a_group_with_a_failed_member_is_delivered_whole_with_the_reason(bench):
    b = bench(granularity=Granularity.group())
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    get = b.plan(c)
    b.put(p, "a1", group=("a", 2))
    b.put_entries(p, [Entry("k", "", group=("a", 2), failure="simulator crashed")])
    (unit,) = b.answers[get].units
    assert [item.payload for item in unit.items] == ["a1"]
    assert [f.reason for f in unit.failed] == ["simulator crashed"]


def test_the_partial_group_of_a_dead_producer_is_reported_and_delivered_short(bench):
    b = bench(granularity=Granularity.group(), group_seconds=20.0)
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, "a1", group=("a", 2))
    get = b.plan(c)
    b.silent.add("p")
    b.run(b.config.lease_seconds + 1)
    lost = [r for r in b.core.reports() if r.kind == "producer-lost"]
    assert len(lost) == 1
    assert "'a' (1 of 2)" in lost[0].text
    b.run(20)
    assert b.values(get) == ["a1"]
    assert "died, 1 of 2 members came" in b.answers[get].units[0].short


def test_a_full_channel_of_incomplete_groups_does_not_block_for_ever(bench):
    b = bench(max_items=3, granularity=Granularity.group())
    p, q, c = b.core.attach_producer("p"), b.core.attach_producer("q"), b.core.attach_consumer("c")
    b.put(p, "a1", group=("a", 2))
    b.put(p, "b1", group=("b", 2))
    b.put(p, "c1", group=("c", 2))
    b.put(p, "d1", group=("d", 2))
    b.put(q, "b2", group=("b", 2))
    assert b.values(b.plan(c)) == ["b1", "b2"], "the member that completes a group is let in beyond the bound"
    assert b.core.state.counts["beyond_bounds"] == 1


# --- steps ------------------------------------------------------------------------------------------------------


def test_micro_batches_never_cross_a_step_and_the_last_one_says_so(bench):
    b = bench(granularity=Granularity.micro_batch(4, step=10))
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, *range(20))
    sizes, ends, steps = [], [], []
    for _ in range(6):
        batch = b.answers[b.plan(c)]
        sizes.append(len(batch.units))
        ends.append(batch.ends_step)
        steps.append(batch.step)
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert ends == [False, False, True] * 2
    assert steps == [0, 0, 0, 1, 1, 1]


def test_a_group_that_does_not_fit_into_the_rest_of_a_step_is_not_added_to_a_batch(bench):
    b = bench(granularity=Granularity.micro_batch(6, step=4, whole_groups=True))
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    for name in "abc":
        b.put(p, *range(3), group=(name, 3))
    first, second = b.answers[b.plan(c)], b.answers[b.plan(c)]
    assert [unit.name for unit in first.units] == ["a"]
    assert [unit.name for unit in second.units] == ["b"], "a group stays whole, so it ends the step it begins in"
    assert (first.ends_step, second.ends_step) == (False, True)


def test_redelivered_items_stay_in_their_step(bench):
    b = bench(granularity=Granularity.micro_batch(2, step=4))
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, *range(8))
    first, second = b.plan(c), b.plan(c)
    assert b.answers[second].ends_step
    b.core.nack(c.handle, b.answers[first].number)
    again, fresh = b.plan(c), b.plan(c)
    assert (b.answers[again].step, b.values(again), b.answers[again].ends_step) == (0, [0, 1], True)
    assert (b.answers[fresh].step, b.values(fresh)) == (1, [4, 5])


def test_granularity_changes_between_steps(bench):
    b = bench(granularity=Granularity.micro_batch(2, step=4))
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, *range(8))
    b.plan(c)
    b.core.set_granularity(Granularity.global_batch(4))
    assert b.values(b.plan(c)) == [2, 3], "the step that has begun is finished as it began"
    assert b.values(b.plan(c)) == [4, 5, 6, 7]


def test_a_waiting_get_follows_a_change_of_granularity(bench):
    b = bench(granularity=Granularity.micro_batch(8))
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    get = b.plan(c)
    b.put(p, 1, 2)
    b.core.set_granularity(Granularity.micro_batch(2))
    b.settle()
    assert b.values(get) == [1, 2]


def test_groups_are_put_together_when_the_plan_asks_for_it(bench):
    b = bench()
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.put(p, "a1", "b1", "a2", group=None)
    b.put(p, "g1", group=("g", 2))
    b.put(p, "x")
    b.put(p, "g2", group=("g", 2))
    b.core.set_granularity(Granularity.micro_batch(2, whole_groups=True))
    assert [b.values(b.plan(c)) for _ in range(3)] == [["a1", "b1"], ["a2", "x"], ["g1", "g2"]]


# --- staleness --------------------------------------------------------------------------------------------------


def test_items_with_old_weights_are_passed_over_and_reported(small):
    b, p, c = small
    b.core.set_version(5)
    b.put(p, "old", version=2)
    b.put(p, "new", version=4)
    get = b.get(c, max_staleness=1)
    assert b.values(get) == ["new"]
    assert [item.identity for item in b.answers[get].stale] == [("p", 0, 0)]
    assert b.released == ["old"], "it no longer takes room"
    assert [r.identity for r in b.core.reports() if r.kind == "stale"] == [("p", 0, 0)]


def test_the_oldest_member_decides_for_a_group(bench):
    b = bench(granularity=Granularity.group(), max_staleness=0)
    p, c = b.core.attach_producer("p"), b.core.attach_consumer("c")
    b.core.set_version(1)
    b.put(p, "g1", group=("g", 2), version=0)
    b.put(p, "g2", group=("g", 2), version=1)
    b.put(p, "new", version=1)
    get = b.plan(c)
    assert b.values(get) == ["new"]
    assert len(b.answers[get].stale) == 2


# --- names ------------------------------------------------------------------------------------------------------


def test_a_stuck_get_is_named_within_five_seconds(bench):
    b = bench()
    p, c = b.core.attach_producer("maker"), b.core.attach_consumer("taker")
    b.put(p, 1, group=("g", 4))
    b.get(c, 3)
    b.run(5)
    (report,) = [r for r in b.core.reports() if r.kind == "stuck"]
    for part in ("'bench'", "'k'", "'taker'", "1 items ready, wants 3 items", "'g': 1 of 4 members from 'maker'"):
        assert part in report.text
    assert b.core.diagnose()[0].startswith("get on channel 'bench'")
    b.run(60)
    assert not [r for r in b.core.reports() if r.kind == "stuck"], "named once"


def test_a_put_that_waits_is_named_with_who_holds_the_room(small):
    b, p, c = small
    b.put(p, 1, 2, 3, 4, 5)
    b.get(c, 4)
    (line,) = b.core.diagnose()
    assert "by 'p'" in line
    assert "4 items on lease to 'c'" in line


def test_a_consumer_of_another_group_is_refused(small):
    b, _, _ = small
    with pytest.raises(WrongGroupError, match=r"'other'.*'default'"):
        b.core.attach_consumer("x", group="other")


def test_keys_are_reclaimed(small):
    b, p, c = small
    for index in range(2000):
        key = f"once-{index}"
        b.put(p, index, key=key)
        b.ack(c, b.get(c, key=key, wait=100))
    assert len(b.core.state.queues) == 0
    assert len(b.core.state.alarms) == 2, "only the members' leases"
