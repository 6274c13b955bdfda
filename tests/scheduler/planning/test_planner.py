import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_plugins.core.errors import ConfigError, InfeasiblePlanError, PlanError, ProfileError
from rlinf_plugins.scheduler.cluster import Cluster, Node
from rlinf_plugins.scheduler.flow import Stage
from rlinf_plugins.scheduler.planning.constraints import Constraints, Pin
from rlinf_plugins.scheduler.planning.cost import CostModel
from rlinf_plugins.scheduler.planning.evaluate import predict, repredicted
from rlinf_plugins.scheduler.planning.objectives import choose, knee, pareto
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan
from rlinf_plugins.scheduler.planning.planner import candidates, plan
from rlinf_plugins.scheduler.planning.rescale import rescaled
from rlinf_plugins.scheduler.planning.uncertainty import prediction_band, robustness, worth_measuring
from rlinf_plugins.testing.flows import plausible_case, random_case


def now(request):
    return request.profile.created


@pytest.mark.parametrize(
    ("name", "mode"), [("math-7b", "spatial"), ("moe-30b", "temporal"), ("libero", "temporal"), ("maniskill", "hybrid")]
)
def test_golden_workloads_flip_as_published(golden, name, mode):
    request = golden(name)
    assert plan(request, now=now(request)).mode == mode


def test_maniskill_gets_the_published_placement(golden):
    request = golden("maniskill")
    assert plan(request, now=now(request)).ranges() == {"env": "0", "rollout": "1-3", "actor": "0-3"}


def test_search_agent_keeps_tools_on_processors(golden):
    request = golden("search-agent")
    best = plan(request, now=now(request))
    kinds = {name: pool.kind for phase in best.phases for pool in phase.pools for name in pool.stages}
    assert kinds == {"rollout": "gpu", "search": "cpu", "reward": "cpu", "inference": "gpu", "actor": "gpu"}


@pytest.mark.parametrize("name", ["math-7b", "moe-30b", "libero", "maniskill", "search-agent"])
def test_golden_profiles_say_where_their_numbers_come_from(golden, name):
    assert golden(name).profile.sources


def test_plan_is_a_value(golden):
    request = golden("maniskill")
    best = plan(request, now=now(request))
    assert Plan.from_json(best.to_json()) == best
    assert len(best.rows()) == 3
    with pytest.raises(PlanError, match="version 9"):
        Plan.from_json(b'{"version": 9}')
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json(b"{")
    with pytest.raises(ConfigError, match="modes"):
        Plan.from_json(best.to_json().replace(b'"flow"', b'"modes": 1, "flow"', 1))


def test_prediction_of_a_plan_is_what_the_planner_said(golden):
    for name in ("math-7b", "maniskill", "search-agent"):
        request = golden(name)
        best = plan(request, now=now(request))
        model = CostModel(request.flow, request.cluster, request.profile)
        assert predict(model, best)[0] == pytest.approx(best.seconds)
        assert repredicted(model, best).seconds == pytest.approx(best.seconds)


def test_alternatives_are_slower_and_say_why(golden):
    request = golden("math-7b")
    best = plan(request, now=now(request))
    assert len(best.alternatives) == 5
    seconds = [other.seconds for other in best.alternatives]
    assert seconds == sorted(seconds)
    assert seconds[0] >= best.seconds
    assert all("s (" in other.reason for other in best.alternatives)


def test_devices_of_pools_are_disjoint_and_replicas_do_not_straddle(seed):
    for number in range(20):
        case = plausible_case(seed % 10_000 + number)
        for best in candidates(request_of(case), 3):
            for phase in best.phases:
                numbers = [n for pool in phase.pools for n in pool.numbers]
                assert len(numbers) == len(set(numbers)) == sum(pool.devices for pool in phase.pools)


def request_of(case, **options):
    from rlinf_plugins.scheduler.planning.planner import PlanRequest

    return PlanRequest(flow=case.flow, cluster=case.cluster, profile=case.profile, **options)


def test_pins_are_kept_and_the_rest_is_planned(golden):
    request = golden("math-7b")
    pinned = replace(request, constraints=Constraints(pins=(Pin(stage="actor", devices=32),)))
    best = plan(pinned, now=now(request))
    assert len(best.numbers_of("actor")) == 32
    assert best.seconds >= plan(request, now=now(request)).seconds
    alone = replace(request, constraints=Constraints(pins=(Pin(stage="rollout", mode="temporal"),)))
    assert plan(alone, now=now(request)).phases[0].pools[0].stages == ("rollout",)
    beside = replace(golden("moe-30b"), constraints=Constraints(pins=(Pin(stage="rollout", mode="spatial"),)))
    phase = plan(beside, now=now(request)).phases[0]
    assert len(phase.pools) > 1


@pytest.mark.parametrize(
    ("pin", "words"), [(Pin(stage="x"), "unknown stage 'x'"), (Pin(stage="actor", kind="tpu"), "pinned to 'tpu'")]
)
def test_wrong_pins_are_named(golden, pin, words):
    request = replace(golden("math-7b"), constraints=Constraints(pins=(pin,)))
    with pytest.raises(PlanError, match=words):
        plan(request, now=now(request))


def test_modes_can_be_demanded(golden):
    request = golden("math-7b")
    for mode in ("temporal", "spatial", "hybrid"):
        only = replace(request, constraints=Constraints(modes=(mode,)))
        assert plan(only, now=now(request)).mode == mode


def test_overlap_needs_staleness_and_is_never_slower(golden):
    request = golden("math-7b")
    stale = plan(replace(request, constraints=Constraints(max_staleness=1)), now=now(request))
    assert stale.seconds <= plan(request, now=now(request)).seconds
    assert stale.staleness == 1
    with pytest.raises(PlanError, match="max_staleness"):
        plan(replace(request, constraints=Constraints(max_staleness=2)), now=now(request))


def test_smallest_conflict_is_named_and_minimal(line):
    request = line(
        4,
        8,
        {"a": {1: 1.0}, "b": {1: 1.0}},
        memory={"a": 20.0, "b": 1.0},
        capacity=10.0,
        constraints=Constraints(pins=(Pin(stage="b", devices=2),)),
    )
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(request, now=0.0)
    conflict = caught.value.conflict
    assert len(conflict) == 2
    assert "a needs memory (least measured 20 GiB of 10 GiB a device)" in conflict[0]
    assert "4 gpu devices" in conflict[1]


def test_conflict_of_pin_and_cluster(line):
    request = line(4, 8, {"a": {1: 1.0}}, constraints=Constraints(pins=(Pin(stage="a", devices=8),)))
    with pytest.raises(InfeasiblePlanError, match="a is pinned to devices 8; the cluster has 4 gpu devices"):
        plan(request, now=0.0)


def test_conflict_of_replica_and_node_size():
    case = plausible_case(0)
    flow = replace(case.flow, stages=tuple(replace(s, replica=8) for s in case.flow.stages))
    small = Cluster(nodes=(Node(name="n", devices=3, count=4),))
    request = replace(request_of(case), flow=flow, cluster=small)
    request = replace(request, profile=replace(case.profile, fingerprint=type(case.profile.fingerprint).of(small)))
    with pytest.raises(InfeasiblePlanError, match=r"a replica of \w+ needs 8 devices; the cluster has 12"):
        plan(request, now=0.0)


def test_memory_forces_a_switch(line):
    times = {"a": {1: 1.0, 2: 0.5}, "b": {1: 1.0, 2: 0.5}}
    fits = plan(line(2, 1, times, memory={"a": 4.0, "b": 4.0}, capacity=10.0), now=0.0)
    tight = plan(line(2, 1, times, memory={"a": 8.0, "b": 8.0}, capacity=10.0), now=0.0)
    assert fits.memory["peak"] <= 1
    assert fits.phases[0].pools[0].resident
    assert len(tight.phases) == 2 or not tight.phases[0].pools[0].resident
    assert tight.memory["peak"] <= 1


def test_idle_devices_are_allowed_and_reported(line):
    request = line(8, 4, {"a": {1: 1.0, 2: 0.9, 8: 0.9}})
    best = plan(request, now=0.0)
    assert best.phases[0].pools[0].devices == 2
    assert any("6 of 8 gpu devices stay idle" in reason for reason in best.reasons)


def test_warnings_name_extrapolation_and_violations(line):
    best = plan(line(8, 4, {"a": {1: 1.0, 2: 0.5, 4: 0.6}}), now=0.0)
    assert any("a was measured slower on 4 devices" in warning for warning in best.warnings)
    far = plan(line(8, 4, {"a": {1: 1.0, 2: 0.5}}), now=0.0)
    assert any("not measured near 8 devices" in warning for warning in far.warnings)


def test_stale_profile_is_refused(golden):
    request = golden("libero")
    with pytest.raises(ProfileError, match="stale"):
        plan(request, now=now(request) + 86400 * 60)


def test_band_holds_the_prediction():
    request = request_of(plausible_case(1))
    best = plan(request, now=0.0)
    assert best.band[0] <= best.seconds * 1.02
    assert best.band[1] >= best.seconds * 0.98
    assert best.band[1] / best.band[0] < 1.2
    assert prediction_band(request, best, seed=1)


def test_robustness_is_the_exact_flip(line):
    # Temporal costs 64 * 1.25; spatial (3, 1) costs 1 + max(f, 1) * 63 + ...: a slower rollout breaks the balance.
    request = line(2, 32, {"rollout": {1: 1.0, 2: 1.0}, "train": {1: 1.0, 2: 1.0}})
    best = plan(request, now=0.0)
    found = {entry.stage: entry for entry in robustness(request, best)}
    assert found["rollout"].faster == 0.0
    assert math.isinf(found["rollout"].slower)

    request = line(4, 64, {"rollout": {1: 3.0, 2: 1.5, 3: 1.0, 4: 0.75}, "train": {1: 1.0, 2: 0.75, 4: 0.5}})
    best = plan(request, now=0.0)
    entry = next(e for e in robustness(request, best) if e.stage == "train")
    for factor, same in ((entry.slower * 0.99, True), (entry.slower * 1.01, False)):
        wrong = replace(request, profile=request.profile.scaled({"train": factor}))
        assert (plan(wrong, now=0.0).signature == best.signature) == same
    assert "measure" in worth_measuring((entry,))


def test_pareto_front_and_knee():
    points = [(1.0, 9.0), (2.0, 3.0), (2.5, 3.5), (9.0, 1.0)]
    assert pareto(points) == (0, 1, 3)
    assert knee([points[i] for i in (0, 1, 3)]) == 1
    assert knee([(1.0, 1.0)]) == 0


@pytest.mark.parametrize("objective", ["time", "p99", "cvar", "gpu-hours", "memory", "staleness"])
def test_objectives_choose_their_minimum(golden, objective):
    request = golden("search-agent")
    choice = choose(request, objective, count=3, repeats=4)
    assert choice.best.value(objective) == min(score.value(objective) for score in choice.scores)
    assert choice.knee in choice.front


def test_energy_needs_watts(line):
    request = line(2, 8, {"a": {1: 1.0, 2: 0.9}})
    with pytest.raises(PlanError, match="watts"):
        choose(request, "energy", count=2, repeats=2)
    hot = Cluster(nodes=(Node(name="n", devices=2, watts=100.0, idle_watts=10.0),))
    choice = choose(replace(request, cluster=hot), "energy", count=2, repeats=2)
    # Two devices: 2 * 100 W * 7.2 s; one device: 100 W * 8 s and 10 W * 8 s of the idle one.
    assert choice.best.energy == pytest.approx(880 / 3600)
    assert max(score.energy for score in choice.scores) == pytest.approx(1440 / 3600)


def test_rescaled_plan_fits_another_cluster(golden):
    request = golden("math-7b")
    best = plan(replace(request, constraints=Constraints(pins=(Pin(stage="inference", devices=16),))), now=now(request))
    half = rescaled(best, request.flow, Cluster.uniform(64, memory_gib=80.0), request.profile)
    assert half.devices == {"gpu": 64}
    assert max(n for pool in half.phases[0].pools for n in pool.numbers) < 64
    assert half.seconds > best.seconds
    with pytest.raises(PlanError, match="share of"):
        rescaled(best, request.flow, Cluster.uniform(2, per_node=2, memory_gib=80.0), request.profile)


def test_plans_that_do_not_run_the_flow_are_refused(line):
    request = line(2, 4, {"a": {1: 1.0}, "b": {1: 1.0}})
    model = CostModel(request.flow, request.cluster, request.profile)

    def made(*phases):
        return Plan(
            flow="line",
            items=4,
            devices={"gpu": 2},
            seconds=0.0,
            phases=tuple(
                PhasePlan(
                    items=items,
                    pools=(PoolPlan(stages=names, kind="gpu", devices=n, allotted=dict.fromkeys(names, n)),),
                )
                for names, n, items in phases
            ),
        )

    for broken, words in (
        (made((("a",), 1, 4)), "the flow has a, b"),
        (made((("b",), 1, 4), (("a",), 1, 4)), "earlier phase"),
        (made((("a",), 1, 3), (("b",), 1, 4)), "do not divide"),
        (made((("a",), 3, 4), (("b",), 1, 4)), "uses 3 gpu devices"),
    ):
        with pytest.raises(PlanError, match=words):
            predict(model, broken)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.integers(0, 3))
def test_a_pinned_plan_is_never_better_than_the_free_one(number, place):
    case = random_case(number, max_stages=3, max_devices=5)
    request = request_of(case)
    free = candidates(request, 1)
    stage = case.flow.stages[place % len(case.flow.stages)]
    count = int(np.random.default_rng(number).integers(1, 5))
    pinned = candidates(replace(request, constraints=Constraints(pins=(Pin(stage=stage.name, devices=count),))), 1)
    if pinned:
        assert free
        assert pinned[0].seconds >= free[0].seconds * (1 - 1e-9)


def test_stage_sizes_are_respected(line):
    request = line(8, 4, {"a": {1: 4.0, 8: 0.5}})
    flow = replace(request.flow, stages=(Stage(name="a", sizes=(3,)),))
    assert len(plan(replace(request, flow=flow), now=0.0).numbers_of("a")) == 3
