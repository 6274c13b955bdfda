"""A client's belief about its leases: never longer than the lock would agree to."""

import pytest

from rlinf_plugins.core.clock import ManualClock
from rlinf_plugins.core.errors import LockServiceError, StaleTokenError
from rlinf_plugins.scheduler.lock.session import Session
from rlinf_plugins.scheduler.lock.types import Lease

LEASE = Lease(5, "a", "s", frozenset(["d0", "d1"]), False, 0)


@pytest.fixture
def rig():
    class Rig:
        clock = ManualClock(100.0)
        alive: frozenset[int] | Exception = frozenset([5])
        lost: list[Lease] = []
        delay = 0.0

        def beat(self, session, held):
            self.clock.advance(self.delay)
            if isinstance(self.alive, Exception):
                raise self.alive
            return self.alive

    rig = Rig()
    rig.lost = []
    rig.session = Session("a", 9.0, rig.beat, rig.lost.append, rig.clock)
    return rig


def test_a_permit_carries_the_token_of_every_device(rig):
    rig.session.heard(100.0)
    rig.session.entered(LEASE)
    permit = rig.session.permit(LEASE)
    assert permit.tokens == {"d0": 5, "d1": 5}
    assert permit.not_after == 109.0


def test_the_lease_is_counted_from_the_sending_of_a_beat_not_from_its_answer(rig):
    rig.session.entered(LEASE)
    rig.delay = 4.0
    rig.session.beat_once()
    assert rig.session.permit(LEASE).not_after == 109.0


def test_without_answers_the_permit_runs_out_and_comes_back_with_them(rig):
    rig.session.heard(100.0)
    rig.session.entered(LEASE)
    rig.alive = LockServiceError("connection refused")
    rig.clock.advance(9.0)
    rig.session.beat_once()
    with pytest.raises(LockServiceError, match=r"no answer from the lock for 9 s \(connection refused\)"):
        rig.session.permit(LEASE)
    rig.alive = frozenset([5])
    rig.session.beat_once()
    assert rig.session.permit(LEASE).tokens["d0"] == 5
    assert rig.lost == []


def test_a_lease_the_lock_does_not_confirm_is_lost_and_reported_once(rig):
    rig.session.entered(LEASE)
    rig.alive = frozenset()
    rig.session.beat_once()
    rig.session.beat_once()
    assert rig.lost == [LEASE]
    with pytest.raises(StaleTokenError):
        rig.session.permit(LEASE)


def test_entries_are_counted(rig):
    rig.session.heard(100.0)
    rig.session.entered(LEASE)
    rig.session.entered(LEASE)
    rig.session.left(LEASE)
    assert rig.session.entries("a") == 1
    assert rig.session.permit(LEASE)
    rig.session.left(LEASE)
    rig.session.left(LEASE)
    assert rig.session.entries("a") == 0


def test_names_are_unique_and_readable():
    one, two = (Session("rollout/0", 1.0, lambda session, held: frozenset()) for _ in range(2))
    assert one.id.startswith("rollout/0@")
    assert one.id != two.id
    assert one.owner("kv") == f"{one.id}/kv"
    assert one.owner("") == one.id
