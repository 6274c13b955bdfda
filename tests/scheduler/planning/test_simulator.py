from dataclasses import replace

import numpy as np
import pytest

from rlinf_plugins.core.errors import PlanError, ProfileError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Edge, Flow, Loop, Stage
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.cost import CostModel
from rlinf_plugins.scheduler.planning.draws import Draws, serve
from rlinf_plugins.scheduler.planning.evaluate import predict
from rlinf_plugins.scheduler.planning.gantt import html_gantt, text_gantt
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan
from rlinf_plugins.scheduler.planning.planner import PlanRequest, candidates, plan
from rlinf_plugins.scheduler.planning.profile import (
    Fingerprint,
    Profile,
    Sample,
    StageProfile,
    SwitchSample,
    SyncSample,
)
from rlinf_plugins.scheduler.planning.simulator import Failures, mean_and_tail, simulate, simulate_many
from rlinf_plugins.testing.flows import plausible_case


def run(request, chosen, seed=0, **options):
    return simulate(request.flow, request.cluster, request.profile, chosen, np.random.default_rng(seed), **options)


def test_tandem_line_takes_warm_up_and_bottleneck(line):
    request = line(4, 64, {"a": {1: 3.0, 2: 1.5, 3: 1.0, 4: 0.75}, "b": {1: 1.0, 2: 0.75, 4: 0.5}})
    chosen = plan(request, now=0.0)
    simulated = run(request, chosen)
    assert simulated.seconds == pytest.approx(65.0)
    assert len(simulated.spans) == 128


@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("times", [(1.0, 1.0), (2.0, 0.5), (0.5, 2.0), (1.0, 0.9)])
def test_cycles_take_what_the_closed_form_says(streams, times):
    """Judges the cost formula of cycles by an event simulation that does not know it."""
    flow = Flow(
        name="c",
        items=6,
        stages=(Stage(name="e"), Stage(name="p")),
        edges=(Edge(source="e", target="p"), Edge(source="p", target="e")),
        loops=(Loop(stages=("e", "p"), turns=7, streams=(1, 2, 3)),),
        granularities=(6,),
    )
    cluster = Cluster.uniform(2)
    stages = {
        name: StageProfile(samples=tuple(Sample(devices=1, items=m, seconds=t) for m in (2, 3, 6)))
        for name, t in zip(("e", "p"), times, strict=True)
    }
    profile = Profile(flow="c", fingerprint=Fingerprint.of(cluster), created=0.0, stages=stages)
    pools = tuple(PoolPlan(stages=(n,), kind="gpu", devices=1, allotted={n: 1}) for n in ("e", "p"))
    phase = PhasePlan(pools=pools, items=6, streams={"e<->p": streams})
    chosen = Plan(flow="c", items=6, devices={"gpu": 2}, phases=(phase,), seconds=0.0)
    simulated = simulate(flow, cluster, profile, chosen, np.random.default_rng(0)).seconds
    assert simulated == pytest.approx(predict(CostModel(flow, cluster, profile), chosen)[0])


def test_switches_syncs_and_barriers_count(line):
    request = line(2, 4, {"a": {1: 1.0, 2: 0.5}, "b": {1: 1.0, 2: 0.5}}, memory={"a": 8.0, "b": 8.0}, capacity=10.0)
    flow = replace(
        request.flow, edges=(Edge(source="a", target="b", kind="barrier"), Edge(source="b", target="a", kind="weights"))
    )
    switch = (SwitchSample(devices=1, onload_seconds=1.0, offload_seconds=0.5),)
    stages = {name: replace(stage, switches=switch) for name, stage in request.profile.stages.items()}
    syncs = tuple(
        SyncSample(source="b", target="a", seconds=s, shared=shared) for s, shared in ((3.0, False), (0.25, True))
    )
    request = replace(
        request,
        flow=flow,
        profile=replace(request.profile, stages=stages, syncs=syncs),
        constraints=Constraints(modes=("temporal",)),
    )
    chosen = plan(request, now=0.0)
    simulated = run(request, chosen).seconds
    assert simulated == pytest.approx(4 * 0.5 * 2 + 2 * 1.5 + 0.25)
    assert chosen.seconds == pytest.approx(simulated)


def agreement(mode, count, *, tail, repeats):
    errors = []
    for number in range(count):
        case = plausible_case(number, tail=tail)
        request = PlanRequest(
            flow=case.flow, cluster=case.cluster, profile=case.profile, constraints=Constraints(modes=(mode,))
        )
        for chosen in candidates(request, 1):
            simulated = simulate_many(case.flow, case.cluster, case.profile, chosen, seed=number, repeats=repeats)
            errors.append(abs(chosen.seconds / simulated.mean() - 1))
    return float(np.median(errors))


@pytest.mark.parametrize(("mode", "allowed"), [("temporal", 0.02), ("spatial", 0.05), ("hybrid", 0.05)])
def test_predictions_agree_with_the_simulator(mode, allowed):
    assert agreement(mode, 8, tail=False, repeats=2) < allowed


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "allowed"), [("temporal", 0.02), ("spatial", 0.05)])
def test_predictions_agree_with_the_simulator_on_heavy_tails(mode, allowed):
    assert agreement(mode, 10, tail=True, repeats=40) < allowed


def test_overlapping_steps_take_the_bottleneck_alone(line):
    request = line(2, 8, {"a": {1: 1.0}, "b": {1: 1.0}}, constraints=Constraints(max_staleness=1))
    chosen = plan(request, now=0.0)
    assert chosen.staleness == 1
    assert chosen.seconds == pytest.approx(8.0)
    assert run(request, chosen).seconds == pytest.approx(8.0)


def test_failures_cost_their_restart(line):
    request = line(2, 16, {"a": {1: 2.0, 2: 1.0}})
    chosen = plan(request, now=0.0)
    calm = run(request, chosen)
    struck = run(request, chosen, failures=Failures(per_device_hour=120.0, restart_seconds=5.0))
    assert calm.failures == 0
    assert struck.failures > 0
    assert struck.seconds >= calm.seconds + 5.0 * struck.failures


def test_same_seed_same_step(seed):
    case = plausible_case(5, tail=True)
    chosen = candidates(PlanRequest(flow=case.flow, cluster=case.cluster, profile=case.profile), 1)[0]
    first, second = (
        simulate_many(case.flow, case.cluster, case.profile, chosen, seed=seed, repeats=2) for _ in range(2)
    )
    assert (first == second).all()


def test_no_pool_serves_two_calls_at_once():
    case = plausible_case(2)
    chosen = candidates(
        PlanRequest(
            flow=case.flow, cluster=case.cluster, profile=case.profile, constraints=Constraints(modes=("spatial",))
        ),
        1,
    )[0]
    spans = simulate(case.flow, case.cluster, case.profile, chosen, np.random.default_rng(0)).spans
    for pool in {span.actor for span in spans}:
        mine = sorted((s.start, s.end) for s in spans if s.actor == pool)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:], strict=False))


def test_serving_is_work_conserving():
    done = serve(np.array([4.0, 1.0, 1.0, 2.0]), 1, 2, 1.0, 0.0)
    # Slots 0 and 1 take items 0 and 1; item 2 follows item 1, item 3 follows item 2.
    assert done.tolist() == [4.0, 1.0, 2.0, 4.0]
    slowed = serve(np.array([2.0, 1.0]), 1, 0, 1.0, 1.0)
    assert slowed.tolist() == [1.0 * 3 + 1.0 * 2, 3.0]


def test_serving_without_a_queue_is_the_same_with_as_many_slots(seed):
    lengths = np.random.default_rng(seed).lognormal(3, 1, 50)
    np.testing.assert_allclose(serve(lengths, 3, 0, 0.5, 0.1), serve(lengths, 3, 17, 0.5, 0.1))
    lengths = lengths[:9]
    clock, expected = 0.0, np.empty(9)
    for rank, item in enumerate(np.argsort(lengths)):
        before = np.sort(lengths)[rank - 1] if rank else 0.0
        clock += (lengths[item] - before) * (0.5 + 0.1 * (9 - rank))
        expected[item] = clock
    np.testing.assert_allclose(serve(lengths, 1, 0, 0.5, 0.1), expected)


def test_incomplete_inputs_are_named(line):
    request = line(2, 4, {"a": {1: 1.0}, "b": {1: 1.0}})
    chosen = plan(request, now=0.0)
    half = replace(chosen, phases=(replace(chosen.phases[0], pools=chosen.phases[0].pools[:1]),))
    if len(half.stages()) < 2:
        with pytest.raises(PlanError, match="no place for"):
            run(request, half)
    with pytest.raises(ProfileError, match="no samples of z"):
        Draws(request.profile, np.random.default_rng(0)).switch("z", "gpu", 1)


def test_tail_measures():
    mean, p99, cvar = mean_and_tail(np.arange(1.0, 101.0))
    assert mean == 50.5
    assert 99.0 < p99 < 100.0
    assert cvar == 100.0


def test_charts_show_every_pool(golden):
    request = golden("maniskill")
    chosen = plan(request, now=request.profile.created)
    simulated = run(request, chosen, noise=False)
    text = text_gantt(chosen, simulated.spans, simulated.seconds, 80)
    assert all(len(row) <= 80 for row in text.splitlines())
    assert all(f"{name} (" in text for name in ("env", "rollout", "actor"))
    page = html_gantt(chosen, simulated.spans, simulated.seconds)
    assert page.count("<rect") == len(simulated.spans)
    assert "http" not in page
