"""The macro flow: what the user's job does, as a typed graph of stages, before anything is placed.

Nodes are stages, edges say what must happen before what. Cycles (environment and policy, agent and tool) are
allowed and collapse into one :class:`Block` with an inner pipeline of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import msgspec
import networkx as nx

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import FlowError

StageKind = Literal["generate", "infer", "train", "environment", "tool", "reward"]
EdgeKind = Literal["data", "barrier", "weights"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One component of the job.

    Attributes:
        name: Name that profiles, plans and pins use.
        kind: What it is; decides nothing but words and veRL's role.
        replica: Devices that one replica needs (tensor x pipeline parallel size); every allotment is a multiple.
        divides: The number of replicas must divide this (e.g. the mini-batch in items); None: any number.
        sizes: The only allowed device counts; empty: any multiple of ``replica``.
        kinds: Device kinds it may run on; empty: every kind it was profiled on.
        streaming: All items are admitted at once and leave as they finish (a serving engine), so the long tail of one
            micro-batch overlaps with the next.
    """

    name: str
    kind: StageKind = "infer"
    replica: int = 1
    divides: int | None = None
    sizes: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    streaming: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A dependency between two stages.

    Attributes:
        source: Name of the stage that produces.
        target: Name of the stage that consumes.
        kind: ``data``: the target may start on a micro-batch as soon as the source has finished it. ``barrier``: the
            target needs everything the source makes in the step. ``weights``: the target takes the source's weights
            for the *next* step; no order within the step.
        group: Items the target needs together (a GRPO group counts one item if items are prompts); a granularity must
            be a multiple.
    """

    source: str
    target: str
    kind: EdgeKind = "data"
    group: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """How often the stages of a cycle call each other.

    Attributes:
        stages: Names of the stages, in the order of one turn.
        turns: Turns per item (episode length in chunks, tool calls per trajectory).
        streams: Allowed numbers of interleaved sub-batches (RLinf's ``pipeline_stage_num``).
    """

    stages: tuple[str, ...]
    turns: int = 1
    streams: tuple[int, ...] = (1, 2)


@dataclass(frozen=True, slots=True)
class Block:
    """A node of the condensed graph: one stage, or the stages of a cycle.

    Attributes:
        stages: Names, in the order of one turn.
        loop: The cycle's loop; None for a single stage.
    """

    stages: tuple[str, ...]
    loop: Loop | None = None

    @property
    def name(self) -> str:
        """``"env<->policy"`` for a cycle, the stage's name otherwise."""
        return "<->".join(self.stages)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A step of training as a graph.

    Attributes:
        name: Shown in tables; also binds a profile to the flow.
        items: Items (prompts, trajectories, environments) one step processes.
        stages: The components.
        edges: Their dependencies.
        loops: Turns of each cycle.
        granularities: Micro-batch sizes in items that the planner may choose; each divides ``items``. Empty: ``items``
            divided by powers of two, down to a 64th.
    """

    name: str
    items: int
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...] = ()
    loops: tuple[Loop, ...] = ()
    granularities: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "flow") -> Self:
        """Build a flow from plain mappings (YAML, JSON).

        Raises:
            ConfigError: An unknown key or a wrong type.
            FlowError: The graph is not usable.
        """
        return from_mapping(cls, values, where)

    def to_mapping(self) -> dict[str, Any]:
        """Return plain mappings that :meth:`from_mapping` takes."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def stage(self, name: str) -> Stage:
        """Return a stage by name."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The condensed graph's nodes in a topological order that depends on the stages' order alone."""
        position = {stage.name: index for index, stage in enumerate(self.stages)}
        condensed = nx.condensation(_ordering_graph(self))
        order = nx.lexicographical_topological_sort(
            condensed, key=lambda node: min(position[name] for name in condensed.nodes[node]["members"])
        )
        loops = {frozenset(loop.stages): loop for loop in self.loops}
        blocks = []
        for node in order:
            members = frozenset(condensed.nodes[node]["members"])
            if len(members) == 1:
                blocks.append(Block(stages=tuple(members)))
            else:
                blocks.append(Block(stages=loops[members].stages, loop=loops[members]))
        return tuple(blocks)

    @cached_property
    def block_edges(self) -> tuple[tuple[int, int, EdgeKind], ...]:
        """Edges between different blocks as (source, target, kind) of block indices; weights edges are left out."""
        owner = {name: index for index, block in enumerate(self.blocks) for name in block.stages}
        found: dict[tuple[int, int], EdgeKind] = {}
        for edge in self.edges:
            pair = (owner[edge.source], owner[edge.target])
            if edge.kind != "weights" and pair[0] != pair[1] and found.get(pair) != "barrier":
                found[pair] = edge.kind
        return tuple((source, target, kind) for (source, target), kind in sorted(found.items()))

    @cached_property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed granularities in items, ascending; the whole batch is always among them."""
        group = max((edge.group for edge in self.edges if edge.kind == "data"), default=1)
        wanted = self.granularities or tuple(
            self.items >> shift for shift in range(7) if self.items % (1 << shift) == 0
        )
        return tuple(sorted({size for size in wanted if size % group == 0} | {self.items}))

    def ideals(self) -> Iterator[int]:
        """Yield every order ideal (downward-closed set of blocks) as a bit mask, in ascending order of size."""
        before = [0] * len(self.blocks)
        for source, target, _ in self.block_edges:
            before[target] |= 1 << source
        level = {0}
        while level:
            yield from sorted(level)
            level = {
                ideal | 1 << block
                for ideal in level
                for block in range(len(self.blocks))
                if not ideal >> block & 1 and before[block] & ideal == before[block]
            }


def _ordering_graph(flow: Flow) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(stage.name for stage in flow.stages)
    graph.add_edges_from((edge.source, edge.target) for edge in flow.edges if edge.kind != "weights")
    return graph


def _check(flow: Flow) -> None:
    names = [stage.name for stage in flow.stages]
    if not names:
        raise FlowError(f"flow {flow.name!r} has no stages; add at least one")
    for name in names:
        if names.count(name) > 1:
            raise FlowError(f"flow {flow.name!r} has stage {name!r} twice; names must differ")
    if flow.items < 1:
        raise FlowError(f"flow {flow.name!r} has items={flow.items}; a step needs at least one item")
    for stage in flow.stages:
        if stage.replica < 1 or (stage.divides is not None and stage.divides < 1) or min(stage.sizes, default=1) < 1:
            raise FlowError(f"stage {stage.name!r}: replica, divides and sizes must be positive, got {stage}")
    for edge in flow.edges:
        for end in (edge.source, edge.target):
            if end not in names:
                raise FlowError(f"edge {edge.source} -> {edge.target} names {end!r}; stages are {', '.join(names)}")
        if edge.source == edge.target:
            raise FlowError(f"stage {edge.source!r} has an edge to itself; a stage's own turns belong into its samples")
        if edge.group < 1 or flow.items % edge.group:
            raise FlowError(f"edge {edge.source} -> {edge.target}: groups of {edge.group} do not divide {flow.items}")
    for size in flow.granularities:
        if size < 1 or flow.items % size:
            raise FlowError(f"granularity {size} does not divide the step's {flow.items} items")
    _check_loops(flow)


def _check_loops(flow: Flow) -> None:
    cycles = {frozenset(c) for c in nx.strongly_connected_components(_ordering_graph(flow)) if len(c) > 1}
    for loop in flow.loops:
        if frozenset(loop.stages) not in cycles or len(set(loop.stages)) != len(loop.stages):
            raise FlowError(f"loop {' <-> '.join(loop.stages)} is not a cycle of the flow's edges")
        if loop.turns < 1 or not loop.streams or min(loop.streams) < 1:
            raise FlowError(f"loop {' <-> '.join(loop.stages)}: turns and streams must be positive, got {loop}")
    for cycle in cycles - {frozenset(loop.stages) for loop in flow.loops}:
        raise FlowError(f"the cycle {' <-> '.join(sorted(cycle))} has no turns; add a Loop that gives them")
    for edge in flow.edges:
        if edge.kind == "barrier" and any({edge.source, edge.target} <= cycle for cycle in cycles):
            raise FlowError(f"barrier {edge.source} -> {edge.target} lies on a cycle and could never be passed")
