"""Flows from what happens: built from roles, captured from stage-call spans, checked against them.

A stage call is a span with the attribute ``stage``. ``reads`` and ``writes`` name the channels it took its input from
and sent its output to, ``barriers`` those of which it needed everything; ``step`` numbers the training step.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import networkx as nx

from rlinf_plugins.core.errors import FlowError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.flow import Edge, Flow, Loop, Stage


def flow_from_roles(
    *,
    name: str,
    items: int,
    turns: int = 1,
    reference: bool = False,
    critic: bool = False,
    reward_model: bool = False,
    tools: bool = False,
    environments: bool = False,
    old_log_prob: bool = True,
    replicas: Mapping[str, int] | None = None,
    mini_batch: int | None = None,
    barrier: bool = False,
) -> Flow:
    """Build the flow of a post-training step from which roles exist.

    Args:
        name: Name of the flow.
        items: Items of a step.
        turns: Turns of the cycle with tools or environments.
        reference: A reference model scores the items.
        critic: A critic values them and is trained.
        reward_model: A reward model scores them on devices.
        tools: The policy calls tools while it generates.
        environments: The policy acts in environments.
        old_log_prob: The actor recomputes log-probabilities before its update.
        replicas: Devices a replica of a stage needs.
        mini_batch: Items of an optimizer step; the actor's replicas must divide it.
        barrier: The update needs every item (advantages whitened over the batch).

    Raises:
        FlowError: Both tools and environments are asked for.
    """
    if tools and environments:
        raise FlowError("a flow has either tools or environments in its cycle; build other cycles from Stage and Edge")
    sizes = dict(replicas or {})
    stages = [Stage(name="rollout", kind="generate", replica=sizes.get("rollout", 1), streaming=not environments)]
    edges: list[Edge] = []
    loops: tuple[Loop, ...] = ()
    partner = "tool" if tools else "environment" if environments else None
    if partner is not None:
        stages.append(Stage(name=partner, kind="tool" if tools else "environment", replica=sizes.get(partner, 1)))
        ring = ("rollout", "tool") if tools else ("environment", "rollout")
        edges += [Edge(source=ring[0], target=ring[1]), Edge(source=ring[1], target=ring[0])]
        loops = (Loop(stages=ring, turns=turns, streams=(1, 2)),)
    scoring = [
        ("old_log_prob", old_log_prob),
        ("reference", reference),
        ("values", critic),
        ("reward_model", reward_model),
    ]
    scorers = [scorer for scorer, exists in scoring if exists]
    trained = ["actor", *(["critic"] if critic else [])]
    for scorer in scorers:
        stages.append(
            Stage(
                name=scorer,
                kind="reward" if scorer == "reward_model" else "infer",
                replica=sizes.get(scorer, 1),
                # The others run in the processes of the model that is trained, on as many devices.
                divides=None if scorer == "reward_model" else mini_batch,
            )
        )
        edges.append(Edge(source="rollout", target=scorer))
    for model in trained:
        stages.append(Stage(name=model, kind="train", replica=sizes.get(model, 1), divides=mini_batch))
        for source in scorers or ["rollout"]:
            edges.append(Edge(source=source, target=model, kind="barrier" if barrier else "data"))
    edges.append(Edge(source="actor", target="rollout", kind="weights"))
    return Flow(name=name, items=items, stages=tuple(stages), edges=tuple(edges), loops=loops)


def flow_from_spans(spans: Iterable[Span], *, name: str, items: int, turns: Mapping[str, int] | None = None) -> Flow:
    """Capture a flow from the stage calls of one step.

    Args:
        spans: Spans with ``stage``, ``reads`` and ``writes``.
        name: Name of the flow.
        items: Items of a step.
        turns: Turns of a cycle by any of its stages; else counted from the calls.

    Raises:
        FlowError: No stage call is among them, or a channel is read that nobody writes.
    """
    calls = [span for span in spans if "stage" in span.attributes]
    if not calls:
        raise FlowError("no stage calls among the spans; record them with the attributes stage, reads and writes")
    order = list(dict.fromkeys(str(call.attributes["stage"]) for call in sorted(calls, key=lambda c: (c.start, c.end))))
    writers: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        for channel in call.attributes.get("writes", ()):
            if call.attributes["stage"] not in writers[channel]:
                writers[channel].append(call.attributes["stage"])
    edges: dict[tuple[str, str], Edge] = {}
    for call in calls:
        for channel in call.attributes.get("reads", ()):
            if channel not in writers:
                raise FlowError(f"{call.attributes['stage']!r} reads channel {channel!r}, which no stage writes")
            for source in writers[channel]:
                if source != call.attributes["stage"]:
                    pair = (source, str(call.attributes["stage"]))
                    waits = channel in call.attributes.get("barriers", ())
                    edges[pair] = Edge(source=pair[0], target=pair[1], kind="barrier" if waits else "data")
    loops = _loops(order, list(edges), calls, dict(turns or {}))
    stages = tuple(Stage(name=stage) for stage in order)
    return Flow(name=name, items=items, stages=stages, edges=tuple(edges.values()), loops=loops)


def check_spans(flow: Flow, spans: Iterable[Span]) -> None:
    """Check the stage calls of a running job against the flow that was planned.

    Raises:
        FlowError: An unknown stage was called, a stage of the flow was not, or a consumer finished its first call of a
            step before its producer had begun.
    """
    calls = [span for span in spans if "stage" in span.attributes]
    names = {stage.name for stage in flow.stages}
    by_step: dict[object, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for call in calls:
        if call.attributes["stage"] not in names:
            raise FlowError(f"stage {call.attributes['stage']!r} was called; the flow has {', '.join(sorted(names))}")
        by_step[call.attributes.get("step", 0)][call.attributes["stage"]].append(call)
    for step, found in by_step.items():
        absent = sorted(names - found.keys())
        if absent:
            raise FlowError(f"step {step}: {', '.join(absent)} of the flow was never called")
        for source, target, _ in flow.block_edges:
            first = min(s.start for name in flow.blocks[source].stages for s in found[name])
            done = min(s.end for name in flow.blocks[target].stages for s in found[name])
            if done <= first:
                raise FlowError(
                    f"step {step}: {flow.blocks[target].name} finished before {flow.blocks[source].name}, which feeds "
                    "it, had begun; the job does not follow the planned flow"
                )


def _loops(
    order: list[str], pairs: list[tuple[str, str]], calls: list[Span], turns: dict[str, int]
) -> tuple[Loop, ...]:
    graph: nx.DiGraph[str] = nx.DiGraph(pairs)
    found = []
    for cycle in nx.strongly_connected_components(graph):
        if len(cycle) > 1:
            names = tuple(sorted(cycle, key=order.index))
            counted = min(sum(call.attributes["stage"] == name for call in calls) for name in names)
            given = [turns[name] for name in names if name in turns]
            found.append(Loop(stages=names, turns=given[0] if given else counted))
    return tuple(sorted(found, key=lambda loop: order.index(loop.stages[0])))
