"""Who runs where, and how many items at a time; by hand and from the planner."""

import pytest

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.macro import Placement
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan


def test_workers_get_devices_evenly():
    placement = Placement(devices={"a": ("d0", "d1", "d2", "d3")})
    assert placement.workers_of("a") == 4
    assert placement.shares("a", 2) == [("d0", "d1"), ("d2", "d3")]
    assert placement.shares("a", 6)[4:] == [("d0",), ("d1",)]
    assert placement.workers_of("b") == 1
    assert placement.shares("b", 3) == [(), (), ()]
    with pytest.raises(PlanError, match="a has 3 workers on 4 devices"):
        placement.shares("a", 3)


@pytest.mark.parametrize(
    ("granularity", "stages", "workers", "size"),
    [(None, {}, 1, 64), (None, {}, 4, 16), (8, {}, 4, 2), (1, {}, 4, 1), (8, {"a": 32}, 4, 8), (999, {}, 1, 64)],
)
def test_items_at_a_time(granularity, stages, workers, size):
    assert Placement(granularity=granularity, stages=stages).items_of("a", workers, 64) == size


def test_a_plan_of_the_planner_becomes_a_placement():
    pools = (
        PoolPlan(stages=("rollout",), kind="gpu", devices=2, allotted={"rollout": 2}, numbers=(0, 1)),
        PoolPlan(
            stages=("reference", "actor"), kind="gpu", devices=2, allotted={"reference": 1, "actor": 2}, numbers=(2, 3)
        ),
    )
    plan = Plan(
        flow="f", items=64, devices={"gpu": 4}, phases=(PhasePlan(pools=pools, items=8),), seconds=1.0, band=None
    )
    placement = Placement.from_plan(plan)
    assert placement.devices == {
        "rollout": ("device:0", "device:1"),
        "reference": ("device:2",),
        "actor": ("device:2", "device:3"),
    }
    assert placement.items_of("rollout", 2, 64) == 4
