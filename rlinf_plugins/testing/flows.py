"""Random flows, clusters and profiles for checking planners: small and nasty ones, and plausible ones."""

import random
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from rlinf_plugins.scheduler.cluster import Cluster, Node
from rlinf_plugins.scheduler.flow import Edge, Flow, Loop, Stage
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.draws import serve
from rlinf_plugins.scheduler.planning.profile import (
    Fingerprint,
    Profile,
    Sample,
    StageProfile,
    SwitchSample,
    SyncSample,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A planning problem."""

    flow: Flow
    cluster: Cluster
    profile: Profile
    constraints: Constraints


def random_case(seed: int, *, stages: int | None = None, max_stages: int = 5, max_devices: int = 8) -> Case:
    """Return a small problem with whatever can go wrong in a search: cycles, barriers, memory, kinds, odd sizes.

    Three granularities, up to two device kinds, non-monotone and sparse samples; some problems are infeasible.
    """
    rng = random.Random(seed)
    count = stages or rng.randint(1, max_stages)
    devices = rng.randint(1, max_devices)
    names = [f"s{index}" for index in range(count)]
    items = rng.choice([8, 12, 16])
    cluster = _small_cluster(rng, devices)
    edges, loops = _edges(rng, names)
    sizes = tuple(sorted(rng.sample([d for d in range(1, items) if items % d == 0], 2)))
    flow = Flow(
        name="random",
        items=items,
        stages=tuple(
            Stage(
                name=name,
                replica=rng.choice([1, 1, 1, 2]),
                divides=rng.choice([None, None, 8, 12]),
                streaming=rng.random() < 0.3,
            )
            for name in names
        ),
        edges=edges,
        loops=loops,
        granularities=sizes,
    )
    profile = Profile(
        flow="random",
        fingerprint=Fingerprint.of(cluster),
        created=0.0,
        stages={name: _small_stage(rng, cluster, names, items) for name in names},
        syncs=_syncs(rng, names),
    )
    return Case(flow, cluster, profile, Constraints(max_staleness=rng.choice([0, 0, 0, 1])))


def plausible_case(seed: int, *, noise: float = 0.03, tail: bool = False) -> Case:
    """Return a problem as users have them: two to five stages of post-training on 8 to 64 devices, dense samples.

    Args:
        seed: Seed.
        noise: Relative scatter of the samples.
        tail: Whether the rollout is a serving engine with log-normal lengths whose samples are simulated calls.
    """
    rng = random.Random(seed)
    devices = rng.choice([8, 16, 32, 64])
    items = rng.choice([64, 128, 256])
    names = ["rollout", "reference", "values", "reward", "actor"]
    optional = [name for name in names[1:4] if rng.random() < 0.5]
    used = ["rollout", *optional, "actor"]
    edges = [Edge(source="rollout", target=name) for name in used[1:]]
    edges += [Edge(source=name, target="actor") for name in optional]
    edges.append(Edge(source="actor", target="rollout", kind="weights"))
    granularities = tuple(items // k for k in (4, 8, 16))
    flow = Flow(
        name="plausible",
        items=items,
        stages=tuple(
            Stage(name=name, streaming=name == "rollout", kind="generate" if name == "rollout" else "infer")
            for name in used
        ),
        edges=tuple(dict.fromkeys(edges)),
        granularities=granularities,
    )
    cluster = Cluster.uniform(devices, memory_gib=80.0)
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= devices]
    stages = {}
    for name in used:
        fixed, shared = rng.uniform(0.0, 0.2), rng.uniform(0.1, 1.0) * (3.0 if name in ("rollout", "actor") else 0.5)
        samples = tuple(
            Sample(
                devices=n,
                items=m,
                seconds=(fixed + shared * m / n) * rng.uniform(1 - noise, 1 + noise),
                memory_gib=rng.choice([20.0, 35.0]) / n**0.3,
            )
            for n in counts
            for m in (*granularities, items)
            for _ in range(3)
        )
        switch = SwitchSample(devices=1, onload_seconds=rng.uniform(0, 2), offload_seconds=rng.uniform(0, 1))
        stages[name] = StageProfile(samples=samples, switches=(switch,))
        if tail and name == "rollout":
            stages[name] = _served(rng, stages[name])
    profile = Profile(flow="plausible", fingerprint=Fingerprint.of(cluster), created=0.0, stages=stages)
    return Case(flow, cluster, profile, Constraints())


def _served(rng: random.Random, stage: StageProfile) -> StageProfile:
    """Replace the times of a stage by those of simulated serving calls."""
    draw = np.random.default_rng(rng.randrange(2**32))
    lengths = draw.lognormal(6.0, 0.8, size=400)
    slots, step, token = rng.choice([0, 8, 32]), rng.uniform(0.004, 0.02), rng.uniform(0.0001, 0.001)
    samples = tuple(
        replace(
            s,
            seconds=float(serve(draw.choice(lengths, size=s.items), s.devices, slots, step, token).max()),
        )
        for s in stage.samples
        for _ in range(4)  # maxima of a heavy tail scatter: a profile needs a dozen calls of each to know their mean
    )
    return replace(stage, samples=samples, lengths=tuple(lengths.tolist()), slots=slots)


def _small_cluster(rng: random.Random, devices: int) -> Cluster:
    if devices < 2 or rng.random() < 0.8:
        return Cluster.uniform(devices, memory_gib=10.0)
    first = rng.randint(1, devices - 1)
    return Cluster(
        nodes=(
            Node(name="a", kind="gpu", devices=first, memory_gib=10.0),
            Node(name="b", kind="other", devices=devices - first, memory_gib=6.0),
        )
    )


def _edges(rng: random.Random, names: list[str]) -> tuple[tuple[Edge, ...], tuple[Loop, ...]]:
    chosen = [
        (names[i], names[j], "barrier" if rng.random() < 0.1 else "data")
        for j in range(1, len(names))
        for i in range(j)
        if rng.random() < (0.8 if i == j - 1 else 0.2)
    ]
    if len(names) > 1 and rng.random() < 0.4:
        start = rng.randrange(len(names) - 1)
        span = 2 if start == len(names) - 2 or rng.random() < 0.8 else 3
        ring = names[start : start + span]
        chosen = [edge for edge in chosen if not {edge[0], edge[1]} <= set(ring)]
        chosen += [(a, b, "data") for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from((a, b) for a, b, _ in chosen)
    cycles = [sorted(c, key=names.index) for c in nx.strongly_connected_components(graph) if len(c) > 1]
    loops = tuple(
        Loop(stages=tuple(cycle), turns=rng.choice([1, 3, 10]), streams=rng.choice([(1,), (1, 2), (1, 2, 4)]))
        for cycle in sorted(cycles)
    )
    edges = [
        Edge(source=a, target=b, kind="barrier" if kind == "barrier" and not _inside(a, b, cycles) else "data")
        for a, b, kind in chosen
    ]
    if len(names) > 1 and rng.random() < 0.5:
        edges.append(Edge(source=names[-1], target=names[0], kind="weights"))
    return tuple(edges), loops


def _inside(a: str, b: str, cycles: list[list[str]]) -> bool:
    return any(a in cycle and b in cycle for cycle in cycles)


def _small_stage(rng: random.Random, cluster: Cluster, names: list[str], items: int) -> StageProfile:
    kinds = [kind for kind in cluster.kinds if rng.random() < 0.8] or [cluster.kinds[0]]
    fixed, shared, each = rng.uniform(0, 1), rng.uniform(0.1, 3), rng.uniform(0, 0.3)
    memory = rng.choice([0, 0, 2, 5, 9])
    samples = [
        Sample(
            devices=n,
            items=m,
            seconds=(fixed + shared * m / n + each * m) * rng.uniform(0.8, 1.2),
            memory_gib=memory * rng.uniform(0.5, 1) / n**0.5,
            device_kind=kind,
        )
        for kind in kinds
        for n in sorted(rng.sample(range(1, 9), rng.randint(1, 3)))
        for m in rng.choice([(1, items), (items,), (2,)])
    ]
    switches = tuple(
        SwitchSample(devices=1, onload_seconds=rng.uniform(0, 2), offload_seconds=rng.uniform(0, 1), device_kind=kind)
        for kind in kinds
        if rng.random() < 0.6
    )
    return StageProfile(
        samples=tuple(samples),
        switches=switches,
        lengths=tuple(rng.lognormvariate(3, 1) for _ in range(30)) if rng.random() < 0.3 else (),
        slots=rng.choice([0, 2, 4]),
        bytes_per_item=rng.choice([0.0, 1e9]),
        slowdown={names[0]: 1.3} if rng.random() < 0.2 else {},
    )


def _syncs(rng: random.Random, names: list[str]) -> tuple[SyncSample, ...]:
    if rng.random() < 0.5:
        return ()
    return tuple(
        SyncSample(source=names[-1], target=names[0], seconds=seconds, shared=shared)
        for seconds, shared in ((1.0, False), (0.2, True))
    )
