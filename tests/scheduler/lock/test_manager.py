"""The lock's rules, one by one."""

import pytest

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.errors import (
    ConfigError,
    DeviceSetError,
    ExceedsCapacityError,
    HoldAndWaitError,
    LockTimeoutError,
    NotOwnerError,
    StaleTokenError,
    UnknownDeviceError,
)
from rlinf_plugins.scheduler.lock.manager import LockManager
from rlinf_plugins.scheduler.lock.types import Granted, Lease, Priority, Revoked, Ticket, TimedOut, Withdrawn

GB = 1 << 30


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def make(clock):
    def build(n=4, **options):
        return LockManager({f"gpu:{i}": 10 * GB for i in range(n)}, clock=clock, **{"ttl_s": 10.0, **options})

    return build


def granted(lock: LockManager) -> dict[str, Lease]:
    return {event.lease.owner: event.lease for event in lock.drain_events() if isinstance(event, Granted)}


def test_free_devices_are_granted_at_once_and_tokens_grow(make):
    lock = make()
    first = lock.acquire("a", ["gpu:0", "gpu:1"])
    second = lock.acquire("b", ["gpu:2"])
    assert first.devices == {"gpu:0", "gpu:1"}
    assert second.token > first.token
    assert lock.release(first.token, "a")
    assert lock.acquire("c", ["gpu:0"]).token > second.token


def test_a_set_is_granted_whole_or_not_at_all(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    b = lock.acquire("b", ["gpu:0", "gpu:1"])
    assert isinstance(b, Ticket)
    assert isinstance(lock.acquire("c", ["gpu:1"]), Lease), "a waiter must not hold the free part of its set"
    lock.release(a.token, "a")
    assert granted(lock) == {}


def test_release_hands_over_to_the_waiter(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    lock.acquire("b", ["gpu:0"])
    lock.release(a.token, "a")
    lease = granted(lock)["b"]
    assert lease.token > a.token


def test_nested_entries_are_counted(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0", "gpu:1"])
    assert lock.acquire("a", ["gpu:0"]) == a
    assert not lock.release(a.token, "a")
    assert isinstance(lock.acquire("b", ["gpu:0"], timeout_s=5), Ticket), "the inner release must not free the device"
    assert lock.release(a.token, "a")
    assert "b" in granted(lock)


def test_nested_entry_passes_a_starved_waiter(make):
    lock = make(max_bypass=0)
    a = lock.acquire("a", ["gpu:0"])
    lock.acquire("b", ["gpu:0"])
    assert lock.acquire("a", ["gpu:0"]) == a, "otherwise the holder and the waiter would wait for each other"


def test_holding_and_waiting_is_refused(make):
    lock = make()
    lock.acquire("a", ["gpu:0"])
    with pytest.raises(HoldAndWaitError, match="holds gpu:0"):
        lock.acquire("a", ["gpu:0", "gpu:1"])
    lock.acquire("b", ["gpu:0"])
    with pytest.raises(HoldAndWaitError, match="already waits"):
        lock.acquire("b", ["gpu:0"])


def test_a_shared_lease_cannot_be_entered_exclusively_or_with_more_bytes(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"], shared=True, nbytes=GB)
    assert lock.acquire("a", ["gpu:0"], shared=True, nbytes=GB) == a
    with pytest.raises(HoldAndWaitError):
        lock.acquire("a", ["gpu:0"])
    with pytest.raises(HoldAndWaitError):
        lock.acquire("a", ["gpu:0"], shared=True, nbytes=2 * GB)


def test_shared_leases_fill_the_memory_and_no_more(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"], shared=True, nbytes=6 * GB)
    b = lock.acquire("b", ["gpu:0", "gpu:1"], shared=True, nbytes=4 * GB)
    assert isinstance(a, Lease)
    assert isinstance(b, Lease)
    assert isinstance(lock.acquire("c", ["gpu:0"], shared=True, nbytes=1), Ticket)
    assert isinstance(lock.acquire("d", ["gpu:1"]), Ticket), "exclusive waits for all sharers"
    assert "0 bytes left" in lock.state().waiters[0].why
    lock.release(b.token, "b")
    assert set(granted(lock)) == {"c", "d"}


@pytest.mark.parametrize(
    ("devices", "options", "error", "match"),
    [
        (["gpu:9"], {}, UnknownDeviceError, "gpu:9; the cluster has gpu:0"),
        ([f"gpu:{i}" for i in range(5)], {}, UnknownDeviceError, "5 devices were asked for, the cluster has 4"),
        ([], {}, DeviceSetError, "empty"),
        (["gpu:0"], {"shared": True}, DeviceSetError, "needs the bytes"),
        (["gpu:0"], {"nbytes": 5}, DeviceSetError, "to itself"),
        (["gpu:0"], {"shared": True, "nbytes": 11 * GB}, ExceedsCapacityError, f"{11 * GB} bytes can never fit"),
    ],
)
def test_bad_requests_are_named_and_leave_no_trace(make, devices, options, error, match):
    lock = make()
    before = lock.state()
    with pytest.raises(error, match=match):
        lock.acquire("a", devices, **options)
    assert lock.state() == before


@pytest.mark.parametrize("capacity", [{}, {"gpu:0": -1}])
def test_bad_clusters_are_refused(capacity):
    with pytest.raises(ConfigError):
        LockManager(capacity)


def test_only_the_owner_releases_and_only_once(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    with pytest.raises(NotOwnerError, match="belongs to a"):
        lock.release(a.token, "b")
    with pytest.raises(NotOwnerError, match="ever granted"):
        lock.release(999, "a")
    lock.release(a.token, "a")
    with pytest.raises(StaleTokenError, match="has ended"):
        lock.release(a.token, "a")
    assert lock.state().free == ("gpu:0", "gpu:1", "gpu:2", "gpu:3")


def test_priority_is_dependency_first_then_placement_then_arrival(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    lock.acquire("late-data", ["gpu:0"], priority=Priority(ready=False, urgency=99, resident=True))
    lock.acquire("plain", ["gpu:0"], priority=Priority(urgency=1))
    lock.acquire("resident", ["gpu:0"], priority=Priority(urgency=1, resident=True))
    lock.acquire("unblocks", ["gpu:0"], priority=Priority(urgency=5))
    order = []
    token, owner = a.token, "a"
    for _ in range(4):
        lock.release(token, owner)
        ((owner, lease),) = granted(lock).items()
        order.append(owner)
        token = lease.token
    assert order == ["unblocks", "resident", "plain", "late-data"]


def test_reprioritise_moves_a_waiter(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    lock.acquire("b", ["gpu:0"])
    lock.acquire("c", ["gpu:0"], priority=Priority(ready=False))
    assert lock.reprioritise("c", Priority(urgency=3))
    assert not lock.reprioritise("a", Priority())
    lock.release(a.token, "a")
    assert list(granted(lock)) == ["c"]


def test_a_large_set_is_overtaken_only_so_often(make):
    lock = make(2, max_bypass=3)
    tokens = {"x0": lock.acquire("x0", ["gpu:0"]).token, "y0": lock.acquire("y0", ["gpu:1"]).token}
    lock.acquire("big", ["gpu:0", "gpu:1"])
    overtook = 0
    for i in range(1, 10):
        for side, device in (("x", "gpu:0"), ("y", "gpu:1")):
            lock.acquire(f"{side}{i}", [device])
            before = f"{side}{i - 1}"
            if before in tokens:
                lock.release(tokens.pop(before), before)
            for owner, lease in granted(lock).items():
                tokens[owner] = lease.token
                if owner == "big":
                    assert overtook == 3
                    return
                overtook += 1
    pytest.fail(f"big starved: overtaken {overtook} times")


def test_old_waiters_are_not_overtaken_at_all(make, clock):
    lock = make(2, starvation_s=5.0)
    lock.acquire("a", ["gpu:0"])
    lock.acquire("big", ["gpu:0", "gpu:1"])
    assert isinstance(lock.acquire("early", ["gpu:1"]), Lease)
    lock.release(2, "early")
    clock.advance(5.0)
    assert isinstance(lock.acquire("late", ["gpu:1"]), Ticket)
    assert lock.state().waiters[0].owner == "big"
    assert "kept for big" in lock.state().waiters[1].why


def test_timeouts_say_who_was_in_the_way(make, clock):
    lock = make()
    lock.acquire("a", ["gpu:0"], session="s")
    with pytest.raises(LockTimeoutError, match="gpu:0 held by a"):
        lock.acquire("b", ["gpu:0"], timeout_s=0)
    ticket = lock.acquire("b", ["gpu:0"], timeout_s=3)
    assert lock.next_deadline() == pytest.approx(103.0)
    clock.advance(3)
    lock.tick()
    (event,) = lock.drain_events()
    assert event == TimedOut(ticket.number, "gpu:0 held by a (token 1, 3 s)")
    assert lock.state().waiters == ()


def test_cancel_frees_the_place_in_the_queue(make):
    lock = make(2, max_bypass=0)
    a = lock.acquire("a", ["gpu:0"])
    big = lock.acquire("big", ["gpu:0", "gpu:1"])
    small = lock.acquire("small", ["gpu:1"])
    assert isinstance(small, Ticket)
    assert lock.cancel(big.number)
    assert [type(event) for event in lock.drain_events()] == [Withdrawn, Granted]
    assert not lock.cancel(big.number)
    lock.release(a.token, "a")


def test_a_silent_session_loses_leases_and_places_within_one_ttl(make, clock):
    lock = make()
    dead = lock.acquire("a", ["gpu:0"], session="p1")
    lock.acquire("b", ["gpu:1"], session="p2")
    lock.acquire("c", ["gpu:1"], session="p1")
    lock.acquire("d", ["gpu:0"], session="p2")
    clock.advance(9)
    assert lock.renew("p2") == {2}
    clock.advance(1)
    lock.tick()
    events = lock.drain_events()
    assert [type(event) for event in events] == [Revoked, Withdrawn, Granted]
    assert events[0].lease == dead
    assert "no heartbeat from p1 for 10 s" in events[0].reason
    assert events[2].lease.owner == "d"
    assert lock.renew("p1") == frozenset()
    with pytest.raises(StaleTokenError):
        lock.release(dead.token, "a")


def test_expiry_happens_without_a_tick(make, clock):
    lock = make()
    lock.acquire("a", ["gpu:0"])
    clock.advance(10)
    assert isinstance(lock.acquire("b", ["gpu:0"]), Lease)


def test_heartbeats_keep_a_lease_for_ever(make, clock):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    for _ in range(1000):
        clock.advance(9.9)
        assert lock.renew("a") == {a.token}


def test_a_death_that_is_reported_is_acted_on_at_once(make):
    lock = make()
    lock.acquire("a", ["gpu:0"], session="p1")
    lock.acquire("b", ["gpu:0"], session="p2")
    lock.end_session("p1", "actor died")
    assert [type(event) for event in lock.drain_events()] == [Revoked, Granted]


def test_a_restarted_lock_waits_for_earlier_holders(make, clock):
    old = make(2).acquire("a", ["gpu:0"])
    lock = make(2, recovery_s=10.0)
    lock.acquire("b", ["gpu:0"])
    assert isinstance(lock.acquire("c", ["gpu:1"]), Ticket), "gpu:1 may belong to a holder still to come forward"
    assert lock.state().recovering_s == 10.0
    assert lock.state().waiters[0].why == "the lock is recovering"
    assert lock.recovering
    assert lock.reassert(old, count=2)
    clock.advance(9)
    for session in "abc":
        lock.renew(session)
    clock.advance(1)
    lock.tick()
    assert list(granted(lock)) == ["c"]
    assert not lock.reassert(Lease(77, "z", "z", frozenset(["gpu:1"]), False, 0)), "too late"
    lock.release(old.token, "a")
    lock.release(old.token, "a")
    assert granted(lock)["b"].token > old.token


def test_a_restarted_lock_takes_the_release_of_who_has_not_come_forward_yet(make, clock):
    """A holder may release before its next heartbeat tells the new lock of the lease."""
    lock = make(2, recovery_s=10.0, first_token=100)
    assert lock.release(7, "a")
    with pytest.raises(NotOwnerError, match="no such lease was ever granted"):
        lock.release(100, "a")
    kept = Lease(8, "b", "b", frozenset(["gpu:0"]), False, 0)
    assert lock.reassert(kept)
    with pytest.raises(NotOwnerError, match="belongs to b"):
        lock.release(8, "a")
    clock.advance(10)
    lock.renew("b")
    with pytest.raises(StaleTokenError):
        lock.release(7, "a")


def test_two_earlier_holders_of_one_device_cannot_both_come_forward(make):
    lock = make(2, recovery_s=10.0)
    assert lock.reassert(Lease(5, "a", "a", frozenset(["gpu:0"]), False, 0))
    assert lock.reassert(Lease(5, "a", "a", frozenset(["gpu:0"]), False, 0)), "the same one again is no conflict"
    assert not lock.reassert(Lease(4, "b", "b", frozenset(["gpu:0"]), False, 0))


def test_introspection_shows_everything(make, clock):
    lock = make()
    lock.acquire("a", ["gpu:0"], session="p1")
    lock.acquire("a", ["gpu:0"], session="p1")
    lock.acquire("b", ["gpu:0", "gpu:1"], session="p2")
    clock.advance(4)
    state = lock.state()
    (holder,) = state.holders
    (waiter,) = state.waiters
    assert (holder.owner, holder.session, holder.count, holder.held_s, holder.expires_in_s) == ("a", "p1", 2, 4, 6)
    assert (waiter.owner, waiter.devices, waiter.waited_s) == ("b", ("gpu:0", "gpu:1"), 4)
    assert waiter.why == "gpu:0 held by a (token 1, 4 s)"
    assert state.free == ("gpu:1", "gpu:2", "gpu:3")


def test_a_reason_over_hundreds_of_devices_stays_short(make):
    lock = make(512)
    names = [f"gpu:{i}" for i in range(512)]
    lock.acquire("a", names)
    lock.acquire("b", names)
    assert "and 504 more" in lock.state().waiters[0].why


def test_entries_an_owner_never_learnt_of_are_undone(make):
    lock = make()
    lock.acquire("a", ["gpu:0"])
    lock.acquire("a", ["gpu:0"])
    lock.acquire("b", ["gpu:0"])
    lock.leave_to("a", 1)
    assert lock.state().holders[0].count == 1
    lock.leave_to("a", 1)
    lock.leave_to("a", 0)
    lock.leave_to("nobody", 0)
    assert list(granted(lock)) == ["b"]


def test_a_lease_can_be_revoked(make):
    lock = make()
    a = lock.acquire("a", ["gpu:0"])
    lock.acquire("b", ["gpu:0"])
    lock.revoke(a.token, "operator")
    lock.revoke(a.token, "operator")
    assert [type(event) for event in lock.drain_events()] == [Revoked, Granted]


def drive(lock, clock, seconds):
    """Tick at every deadline for ``seconds``, as a host that is not suspended does."""
    end = clock() + seconds
    while (due := lock.next_deadline()) is not None and due <= end:
        clock.advance(due - clock())
        lock.tick()
    clock.advance(end - clock())


@pytest.mark.parametrize("suspended_s", [2.5, 9.0, 10.0, 500.0])
def test_a_lock_that_was_suspended_itself_blames_nobody(make, clock, suspended_s):
    lock = make(stall_s=2.0)
    drive(lock, clock, 1000)
    a = lock.acquire("a", ["gpu:0"])
    drive(lock, clock, 9.5)
    clock.advance(suspended_s)
    lock.acquire("b", ["gpu:1"])
    assert a.token in lock.renew("a"), "its heartbeats could not be heard"
    drive(lock, clock, 9.0)
    assert lock.drain_events() == []
    drive(lock, clock, 1.0)
    assert [type(event) for event in lock.drain_events()] == [Revoked, Revoked]


def test_without_sessions_a_lock_asks_for_no_ticks(make, clock):
    lock = make(stall_s=2.0)
    assert lock.next_deadline() is None
    lock.release(lock.acquire("a", ["gpu:0"]).token, "a")
    drive(lock, clock, 20)
    assert lock.next_deadline() is None
