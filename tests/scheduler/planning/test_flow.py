import pytest

from rlinf_plugins.core.errors import ConfigError, FlowError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.flow import Edge, Flow, Loop, Stage
from rlinf_plugins.scheduler.planning.capture import check_spans, flow_from_roles, flow_from_spans


def flow(*, stages="abc", edges=("ab", "bc"), **options):
    return Flow(
        **{
            "name": "f",
            "items": 8,
            "stages": tuple(Stage(name=s) for s in stages),
            "edges": tuple(Edge(source=e[0], target=e[1]) for e in edges),
            **options,
        }
    )


def call(stage, start, end, **attributes):
    return Span(name="call", actor=stage, start=start, end=end, attributes={"stage": stage, **attributes})


def test_chain_has_its_prefixes_as_ideals():
    assert list(flow().ideals()) == [0, 1, 3, 7]


def test_ideals_of_a_diamond():
    diamond = flow(stages="abcd", edges=("ab", "ac", "bd", "cd"))
    assert list(diamond.ideals()) == [0b0, 0b1, 0b11, 0b101, 0b111, 0b1111]


def test_cycle_collapses_into_a_block_in_the_loops_order():
    cyclic = flow(edges=("ab", "ba", "bc"), loops=(Loop(stages=("b", "a"), turns=3),))
    assert [block.name for block in cyclic.blocks] == ["b<->a", "c"]
    assert cyclic.block_edges == ((0, 1, "data"),)


def test_weights_edges_order_nothing():
    edges = (Edge(source="a", target="b"), Edge(source="b", target="a", kind="weights"))
    assert len(flow(stages="ab", edges=(), **{}).blocks) == 2
    assert [b.name for b in Flow(name="f", items=4, stages=flow(stages="ab", edges=()).stages, edges=edges).blocks] == [
        "a",
        "b",
    ]


def test_barrier_wins_over_data_between_the_same_blocks():
    edges = (Edge(source="a", target="b", kind="barrier"), Edge(source="a", target="b"))
    assert Flow(name="f", items=4, stages=flow(stages="ab", edges=()).stages, edges=edges).block_edges == (
        (0, 1, "barrier"),
    )


def test_granularities_respect_groups_and_contain_the_batch():
    grouped = Flow(
        name="f", items=16, stages=(Stage(name="a"), Stage(name="b")), edges=(Edge(source="a", target="b", group=4),)
    )
    assert grouped.batch_sizes == (4, 8, 16)


def test_round_trip_through_plain_values():
    one = flow(edges=("ab", "ba", "bc"), loops=(Loop(stages=("b", "a"), turns=3),), granularities=(2, 4))
    assert Flow.from_mapping(one.to_mapping()) == one
    assert len(one.blocks) == 2
    assert Flow.from_mapping(one.to_mapping()) == one  # cached values do not leak into the plain form


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stages": ""}, "no stages"),
        ({"stages": "aab"}, "twice"),
        ({"items": 0}, "items=0"),
        ({"edges": ("ax",)}, "names 'x'"),
        ({"edges": ("aa",)}, "itself"),
        ({"edges": ("ab", "ba")}, "no turns"),
        ({"granularities": (3,)}, "does not divide"),
        ({"loops": (Loop(stages=("a", "b")),)}, "not a cycle"),
        ({"edges": ("ab", "ba"), "loops": (Loop(stages=("a", "b"), turns=0),)}, "turns and streams"),
    ],
)
def test_names_what_is_wrong(options, words):
    with pytest.raises(FlowError, match=words):
        flow(**options)


def test_unknown_key_in_a_file_is_named():
    with pytest.raises(ConfigError, match="itemz"):
        Flow.from_mapping({"name": "f", "itemz": 3, "stages": []})


def test_roles_give_the_flow_of_a_step():
    built = flow_from_roles(name="ppo", items=64, reference=True, critic=True, reward_model=True, mini_batch=16)
    assert [s.name for s in built.stages] == [
        "rollout",
        "old_log_prob",
        "reference",
        "values",
        "reward_model",
        "actor",
        "critic",
    ]
    assert built.stage("actor").divides == 16
    assert {(e.source, e.target) for e in built.edges if e.kind == "weights"} == {("actor", "rollout")}


def test_roles_with_environments_make_a_cycle():
    built = flow_from_roles(name="vla", items=64, environments=True, turns=80, old_log_prob=False)
    assert built.blocks[0].name == "environment<->rollout"
    assert built.loops[0].turns == 80
    with pytest.raises(FlowError, match="either tools or environments"):
        flow_from_roles(name="x", items=1, tools=True, environments=True)


def test_capture_finds_edges_through_channels_and_counts_turns():
    spans = [
        call("env", 0, 1, reads=["actions"], writes=["observations"]),
        call("policy", 1, 2, reads=["observations"], writes=["actions", "rows"]),
        call("env", 2, 3, reads=["actions"], writes=["observations"]),
        call("policy", 3, 4, reads=["observations"], writes=["actions", "rows"]),
        call("actor", 4, 5, reads=["rows"], writes=[]),
    ]
    captured = flow_from_spans(spans, name="vla", items=4)
    assert [block.name for block in captured.blocks] == ["env<->policy", "actor"]
    assert captured.loops[0].turns == 2
    check_spans(captured, spans)


def test_capture_refuses_a_channel_nobody_writes():
    with pytest.raises(FlowError, match="no stage writes"):
        flow_from_spans([call("a", 0, 1, reads=["x"])], name="f", items=1)
    with pytest.raises(FlowError, match="no stage calls"):
        flow_from_spans([], name="f", items=1)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([call("a", 0, 1), call("b", 1, 2), call("c", 2, 3), call("d", 3, 4)], "'d' was called"),
        ([call("a", 0, 1), call("b", 1, 2)], "c of the flow was never called"),
        ([call("a", 2, 3), call("b", 0, 1), call("c", 4, 5)], "does not follow"),
    ],
)
def test_running_job_is_checked_against_the_flow(spans, words):
    with pytest.raises(FlowError, match=words):
        check_spans(flow(), spans)
