import pytest

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.capture import flow_from_roles
from rlinf_plugins.scheduler.planning.profile import (
    Fingerprint,
    Profile,
    Sample,
    StageProfile,
    SwitchSample,
    SyncSample,
)
from rlinf_verl.forecast import Forecast

ITEMS = 16
CLUSTER = Cluster.uniform(2, kind="cpu")
FLOW = flow_from_roles(name="job", items=ITEMS, mini_batch=ITEMS)
LONG_TAIL = tuple([20.0] * 14 + [100.0] * 2)


def profile(*, rollout=(8.0, 5.0), train=(4.0, 2.0), lengths=LONG_TAIL, switch=0.0):
    """Seconds of the whole step's stages on one and on two devices; training is proportional to items."""

    def samples(seconds, sizes=(ITEMS,)):
        return tuple(
            Sample(devices=n, items=m, seconds=s * m / ITEMS, device_kind="cpu")
            for n, s in zip((1, 2), seconds, strict=True)
            for m in sizes
        )

    switches = (SwitchSample(devices=1, onload_seconds=switch, offload_seconds=0.0, device_kind="cpu"),)
    stages = {
        "rollout": StageProfile(samples=samples(rollout), lengths=lengths, switches=switches if switch else ()),
        "old_log_prob": StageProfile(samples=samples([s / 4 for s in train], (2, ITEMS))),
        "actor": StageProfile(samples=samples([3 * s / 4 for s in train], (2, ITEMS))),
    }
    syncs = tuple(SyncSample(source="actor", target="rollout", seconds=0.5, shared=shared) for shared in (True, False))
    return Profile(flow="job", fingerprint=Fingerprint.of(CLUSTER), created=0.0, stages=stages, syncs=syncs)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The age of a profile is the planner's concern."""
    monkeypatch.setattr("time.time", lambda: 1.0)


def forecast(flow=FLOW, mini_batch=ITEMS, **changes):
    return Forecast(flow, CLUSTER, profile(**changes), mini_batch=mini_batch)


def planned(mode, devices=2, **changes):
    """The planner's choice of a mode on so many devices in all."""
    found = [c for c in forecast(**changes).planned() if c.mode == mode and c.rollout + c.trainer == devices]
    return found[0] if found else None


def test_in_turn_stages_add_up():
    found = planned("temporal")
    assert found.seconds == pytest.approx(5.0 + 2.0 + 0.5, rel=0.01)
    assert (found.trainer, found.rollout, found.granularity) == (2, 0, 0)
    assert found.stages == pytest.approx({"rollout": 5.0, "old_log_prob": 0.5, "actor": 1.5})


def test_apart_the_longer_side_sets_the_pace():
    found = planned("spatial")
    assert (found.trainer, found.rollout) == (1, 1)
    assert found.seconds == pytest.approx(8.0 + 0.5 + 0.5, abs=0.3)  # rollout, the last chunk, the weights
    slow = planned("spatial", train=(40.0, 20.0))
    assert slow.seconds >= 40.0


def test_lending_pays_where_generation_is_the_longer_side():
    lent = forecast().hybrid(1, 1, 2)
    assert lent.seconds < planned("spatial").seconds
    assert 0 < lent.lend_until < 1
    assert lent.stages["rollout"] < 8.0


def test_lending_costs_its_switch():
    assert forecast(switch=3.0).hybrid(1, 1, 2).seconds == pytest.approx(forecast().hybrid(1, 1, 2).seconds + 3.0)


def test_what_cannot_be_placed_is_left_out():
    odd = flow_from_roles(name="job", items=15, mini_batch=5)
    assert planned("temporal", flow=odd, mini_batch=5) is None  # two replicas do not divide a mini-batch of five
    assert planned("temporal", devices=1, flow=odd, mini_batch=5) is not None


def test_a_barrier_is_waited_for_apart_too():
    waits = flow_from_roles(name="job", items=ITEMS, mini_batch=ITEMS, barrier=True)
    assert planned("spatial", flow=waits).seconds >= 8.0 + 4.0


def test_a_choice_says_what_it_is():
    assert str(planned("spatial")).startswith("spatial (rollout 1 | training 1, ")
    assert "lent until" in str(forecast().hybrid(1, 1, 4))
    assert str(planned("temporal")) == "temporal (2 device(s) in turn): 7.5 s"
