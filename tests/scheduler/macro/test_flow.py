"""One flow, every mode and granularity: the same results; its graph is what was declared; failures end it."""

import itertools

import pytest
from macro_flows import (
    MB,
    Alone,
    Broken,
    Env,
    Filter,
    Generate,
    Policy,
    Train,
    Whiten,
    expected,
    filtered,
)

from rlinf_plugins.core.errors import ExceedsCapacityError, FlowError, PlanError, StageFailedError
from rlinf_plugins.scheduler.flow import Edge, Flow, Stage
from rlinf_plugins.scheduler.macro import MacroFlow, Placement, Worker

MODES = {
    "temporal": lambda size: Placement.temporal(("generate", "filter", "train"), ("d0", "d1"), size),
    "spatial": lambda size: Placement.spatial({"generate": ["d0", "d1"], "filter": ["c"], "train": ["d2"]}, size),
    "hybrid": lambda size: Placement(devices={"generate": ("d0", "d1"), "train": ("d1",)}, granularity=size),
}


@pytest.mark.parametrize(("mode", "size"), list(itertools.product(MODES, (None, 20, 7, 1))))
def test_results_do_not_depend_on_mode_and_granularity(mode, size):
    with MacroFlow("filtered", items=40, placement=MODES[mode](size), memory=100 * MB) as flow:
        call = filtered(flow)
        assert sorted(itertools.chain(*call.result(30))) == expected(40)
        assert flow.captured() == DECLARED


DECLARED = Flow(
    name="filtered",
    items=40,
    stages=(Stage(name="generate"), Stage(name="filter"), Stage(name="train")),
    edges=(Edge(source="generate", target="filter"), Edge(source="filter", target="train")),
)


def test_granularity_is_what_a_group_takes_at_a_time_over_its_workers():
    placement = Placement(devices={"train": ("d0", "d1")}, granularity=10)
    with MacroFlow("filtered", items=40, placement=placement) as flow:
        filtered(flow).result(30)
        sizes = [size for sizes, _ in flow.group("train", Train).history().result(30) for size in sizes]
        kept = len(expected(40))
        assert sum(sizes) == kept
        assert sorted(sizes, reverse=True)[: kept // 5] == [5] * (kept // 5), "10 over two workers, then the tail"


def test_stages_that_share_a_device_take_turns_and_move():
    placement = Placement.temporal(("generate", "train"), ("d0",))
    with MacroFlow("filtered", items=40, placement=placement, memory=100 * MB) as flow:
        for _ in range(2):
            filtered(flow).result(30)
        ((_, where),) = flow.group("train", Train).history().result(30)
        assert where == ["on", "off", "on"], "60 + 60 MB do not fit into 100 together"
        switches = flow.switches()
        assert [span.attributes["resident"] for span in switches] == ["generate/0", "train/0"] * 2
        assert switches[1].attributes["evicted"] == ["generate/0"]
        assert switches[1].attributes["bytes_in"] == 60 * MB


def test_stages_that_fit_together_stay():
    placement = Placement.temporal(("generate", "train"), ("d0",))
    with MacroFlow("filtered", items=40, placement=placement, memory=120 * MB) as flow:
        for _ in range(2):
            filtered(flow).result(30)
        assert len(flow.switches()) == 2


def test_only_one_works_on_a_device_at_a_time():
    Alone.most = 0
    placement = Placement(devices={"a": ("d0",), "b": ("d0",)}, granularity=1)
    with MacroFlow("alone", items=20, placement=placement) as flow:
        calls = [flow.group(name, Alone).run(flow.feed(f"for {name}", range(20))) for name in ("a", "b")]
        for call in calls:
            call.result(30)
    assert Alone.most == 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_full_channel_lets_the_reader_have_the_device(shared):
    placement = Placement(devices={"generate": ("d0",), "train": ("d0",) if shared else ("d1",)}, granularity=2)
    with MacroFlow("narrow", items=40, placement=placement, memory=100 * MB) as flow:
        samples = flow.channel("samples", max_items=2)
        flow.group("generate", Generate).run(flow.feed("prompts", range(40)), to=samples)
        assert len(flow.group("train", Train).run(samples).result(30)[0]) == 40


def test_a_cycle_of_environment_and_policy_on_one_device():
    placement = Placement(devices={"env": ("d0",), "policy": ("d0",)}, granularity=1)
    with MacroFlow("embodied", items=3, placement=placement) as flow:
        observations, actions = flow.channel("observations"), flow.channel("actions")
        envs = flow.group("env", Env, workers=3).run(actions, 5, to=observations)
        policy = flow.group("policy", Policy).run(observations, to=actions)
        assert envs.result(30) == [5, 5, 5]
        policy.result(30)
        (loop,) = flow.captured(turns={"env": 5}).loops
        assert set(loop.stages) == {"env", "policy"}
        assert loop.turns == 5


def test_a_barrier_gets_everything_and_is_captured_as_one():
    with MacroFlow("whitened", items=12, placement=Placement(granularity=3)) as flow:
        samples, white = flow.channel("samples"), flow.channel("white")
        flow.group("generate", Generate).run(flow.feed("prompts", range(3, 15)), to=samples)
        flow.group("whiten", Whiten).run(samples, to=white)
        assert sorted(flow.drain(white)) == [n * n - 9 for n in range(3, 15)]
        assert flow.captured().edges == (Edge(source="generate", target="whiten", kind="barrier"),)


def test_several_writers_end_a_stream_together_and_steps_follow_each_other():
    with MacroFlow("two", items=10, placement=Placement(granularity=2)) as flow:
        for _ in range(3):
            joined = flow.channel("joined")
            for name in ("a", "b"):
                flow.group(name, Generate).run(flow.feed(f"to {name}", range(10)), to=joined)
            assert len(flow.group("train", Train).run(joined).result(30)[0]) == 20


def test_a_worker_that_raises_ends_the_flow_with_its_error():
    with MacroFlow("broken", items=10) as flow:
        samples, kept = flow.channel("samples"), flow.channel("kept")
        flow.group("generate", Generate).run(flow.feed("prompts", range(10)), to=samples)
        flow.group("filter", Broken).run(samples, to=kept)
        train = flow.group("train", Train).run(kept)
        with pytest.raises(StageFailedError, match="filter/0 failed: ConnectionResetError: the tool hung up") as caught:
            train.result(30)
        assert isinstance(caught.value.__cause__, ConnectionResetError)
        with pytest.raises(StageFailedError):
            flow.group("train", Train).history()


def test_what_cannot_run_is_refused_by_name():
    with pytest.raises(FlowError, match="items=0"):
        MacroFlow("empty", items=0)
    with pytest.raises(PlanError, match="b and a share d0"):
        Placement.spatial({"a": ["d0"], "b": ["d0"]})
    with pytest.raises(PlanError, match="granularity takes 0 items"):
        Placement(granularity=0)
    with MacroFlow("refused", items=4, placement=Placement(devices={"train": ("d0", "d1", "d2")}), memory=MB) as flow:
        with pytest.raises(PlanError, match="2 workers on 3 devices"):
            flow.group("train", Train, workers=2)
        with pytest.raises(ExceedsCapacityError, match=r"train/0 can never run: it needs 60000000 bytes on d0"):
            flow.group("train", Train)
    with MacroFlow("refused", items=4) as flow:
        prompts, other = flow.feed("prompts", range(4)), flow.channel("other")
        filtering = flow.group("filter", Filter)
        with pytest.raises(AttributeError, match="have no method 'walk'"):
            filtering.walk(prompts)
        with pytest.raises(FlowError, match="writes 'prompts', which is fed"):
            filtering.run(other, to=prompts)
        filtering.run(prompts, to=other)
        with pytest.raises(FlowError, match="train and filter read 'prompts'"):
            flow.group("train", Train).run(prompts)
    with MacroFlow("refused", items=4) as flow:
        both = [flow.channel("a"), flow.channel("b")]
        call = flow.group("generate", Generate).run(flow.feed("prompts", range(4)), to=both)
        with pytest.raises(StageFailedError, match=r"a channel without saying which; its call writes a, b"):
            call.result(30)
    with pytest.raises(FlowError, match="is not being called by a group"):
        Worker().send(1)


def test_a_timeout_is_said_and_the_flow_can_be_closed():
    with MacroFlow("waiting", items=4) as flow:
        endless = flow.channel("endless")
        flow.group("never", Filter).run(flow.channel("nothing"), to=endless)
        with pytest.raises(TimeoutError, match="train has not returned"):
            flow.group("train", Train).run(endless).result(0.05)
