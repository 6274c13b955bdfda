"""Write the golden profiles from published numbers and stated assumptions; run once, the files are frozen.

Sources, by number:
[1] RLinf repository at commit a3816b5, tests/unit_tests/test_auto_placement.py, lines 41-67 (math: 16 nodes of 8, group
    16, 4 mini-batches, batch 512, actor 101 s, rollout 224 s, inference 10 s, 128 running requests a replica)
    and lines 83-124 (LIBERO and ManiSkill: seconds by environments an instance, 4 devices, actor 100 s).
[2] The same repository, toolkits/auto_placement/node.py, lines 90-111: how its authors scale a Megatron component's
    time from the largest device count, t(n) = t(N) s / (1 + min(0.9, max(s / 10, 0.1))) with s = N / n.
[3] RLinf, "Flexible and Efficient Large-scale Reinforcement Learning via Macro-to-Micro Flow Transformation",
    arXiv:2509.15965: workloads, cluster sizes and which mode won (Qwen3-30B-A3B: batch 1536, sequences of 20480).
Whatever is in neither is an assumption and says so in the profile's ``sources``.
"""

import argparse
from pathlib import Path

import numpy as np
import yaml

from rlinf_plugins.scheduler.cluster import Cluster, Node
from rlinf_plugins.scheduler.flow import Edge, Flow, Loop, Stage
from rlinf_plugins.scheduler.planning.profile import (
    Fingerprint,
    Profile,
    Sample,
    StageProfile,
    SwitchSample,
    SyncSample,
)

FROZEN = 1_795_564_800.0
"""Date of the golden files, in seconds since the epoch."""

HERE = Path(__file__).parent / "golden"

SYNCS = (
    SyncSample(source="actor", target="rollout", seconds=2.0, shared=True),
    SyncSample(source="actor", target="rollout", seconds=4.0, shared=False),
)


def lengths(median: float, sigma: float, largest: float) -> tuple[float, ...]:
    """Return 200 quantiles of a log-normal, capped at the longest sequence."""
    z = np.array([-np.sqrt(2) * _erfcinv(2 * (i + 0.5) / 200) for i in range(200)])
    return tuple(round(float(x), 1) for x in np.minimum(median * np.exp(sigma * z), largest))


def _erfcinv(x: float) -> float:
    from scipy.special import erfcinv

    return float(erfcinv(x))


def table(times: dict[int, float], items: int, memory: dict[int, float] | float = 0.0) -> tuple[Sample, ...]:
    """Return one sample a device count."""
    return tuple(
        Sample(
            devices=n,
            items=items,
            seconds=round(s, 4),
            memory_gib=memory[n] if isinstance(memory, dict) else memory,
        )
        for n, s in times.items()
    )


def megatron(largest: int, seconds: float, counts: tuple[int, ...]) -> dict[int, float]:
    """Scale a component's time to fewer devices as [2] does."""
    found = {}
    for n in counts:
        scale = largest / n
        found[n] = seconds * scale / (1 + min(0.9, max(scale / 10, 0.1))) if n < largest else seconds
    return found


def switch(onload: float, offload: float) -> tuple[SwitchSample, ...]:
    """Return one switch sample."""
    return (SwitchSample(devices=1, onload_seconds=onload, offload_seconds=offload),)


def math_7b() -> tuple[Flow, Cluster, Profile]:
    """GRPO on math, a 7B dense model on 128 devices [1]."""
    flow = Flow(
        name="math-7b",
        items=512,
        stages=(
            Stage(name="rollout", kind="generate", streaming=True),
            Stage(name="inference", replica=2, divides=128),
            Stage(name="actor", kind="train", replica=2, divides=128),
        ),
        edges=(
            Edge(source="rollout", target="inference"),
            Edge(source="inference", target="actor"),
            Edge(source="actor", target="rollout", kind="weights"),
        ),
    )
    cluster = Cluster.uniform(128, per_node=8, memory_gib=80.0)
    counts = (8, 16, 32, 64, 128)
    # 128 running requests a replica, 0.9 of them before queueing [1]: 71 replicas hold 512 x 16 responses at once.
    rollout = {n: 224.0 * max(1.0, 71 / n) for n in (8, 16, 32, 64, 71, 128)}
    stages = {
        "rollout": StageProfile(
            samples=table(rollout, 512, 60.0), switches=switch(1.0, 1.0), lengths=lengths(5000, 0.8, 28672), slots=0
        ),
        "inference": StageProfile(samples=table(megatron(128, 10.0, counts), 512, 30.0), switches=switch(0.5, 0.5)),
        "actor": StageProfile(samples=table(megatron(128, 101.0, counts), 512, 60.0), switches=switch(2.0, 2.0)),
    }
    sources = (
        "times at 128 devices, batch, group, mini-batches, parallel sizes: [1] lines 41-67",
        "times of inference and actor on fewer devices: the scaling of [2]",
        "rollout on fewer devices: constant while all responses run at once, then in proportion [1]",
        "assumed: lengths (log-normal, median 5000, capped at 28672), switch and sync seconds, memory",
    )
    return flow, cluster, _profile(flow, cluster, stages, sources)


def moe_30b() -> tuple[Flow, Cluster, Profile]:
    """GRPO on math, Qwen3-30B-A3B on 128 devices [3]."""
    flow = Flow(
        name="moe-30b",
        items=1536,
        stages=(
            Stage(name="rollout", kind="generate", replica=4, streaming=True),
            Stage(name="inference", replica=32),
            Stage(name="actor", kind="train", replica=32),
        ),
        edges=(
            Edge(source="rollout", target="inference"),
            Edge(source="inference", target="actor"),
            Edge(source="actor", target="rollout", kind="weights"),
        ),
    )
    cluster = Cluster.uniform(128, per_node=8, memory_gib=80.0)
    counts = (32, 64, 96, 128)
    stages = {
        "rollout": StageProfile(
            samples=table({n: 60 + 140 * 128 / n for n in counts}, 1536, 65.0),
            switches=switch(2.0, 2.0),
            lengths=lengths(4000, 0.7, 20480),
            slots=64,
        ),
        "inference": StageProfile(
            samples=table({n: 30 * 128 / n for n in counts}, 1536, 45.0), switches=switch(1.0, 1.0)
        ),
        "actor": StageProfile(
            samples=table({n: 180 * 128 / n for n in counts}, 1536, {32: 110.0, 64: 75.0, 96: 65.0, 128: 60.0}),
            switches=switch(3.0, 3.0),
        ),
    }
    sources = (
        "batch 1536, sequences of 20480, 128 devices: [3]",
        "assumed, no seconds are published in text: a mixture of experts generates and trains in proportion to its "
        "devices (rollout 60 s + 140 s x 128 / n, inference 30 s, actor 180 s x 128 / n), a training replica takes "
        "32 devices and does not fit on them alone",
        "assumed: lengths, switch and sync seconds, memory",
    )
    return flow, cluster, _profile(flow, cluster, stages, sources)


def embodied(name: str, envs: int, env: dict[int, float], policy: dict[int, float], turns: int, memory: float):
    """Simulator and policy in a cycle, then the actor, on 4 devices [1]."""
    flow = Flow(
        name=name,
        items=envs,
        stages=(
            Stage(name="env", kind="environment"),
            Stage(name="rollout", kind="generate"),
            Stage(name="actor", kind="train", sizes=(4,)),
        ),
        edges=(
            Edge(source="env", target="rollout"),
            Edge(source="rollout", target="env"),
            Edge(source="rollout", target="actor", kind="barrier"),
            Edge(source="actor", target="rollout", kind="weights"),
        ),
        loops=(Loop(stages=("env", "rollout"), turns=turns, streams=(1, 2)),),
        granularities=(envs,),
    )
    cluster = Cluster.uniform(4, per_node=4, memory_gib=80.0)

    def samples(times: dict[int, float], used: float) -> tuple[Sample, ...]:
        return tuple(
            Sample(devices=n, items=n * each, seconds=seconds, memory_gib=used)
            for n in (1, 2, 4)
            for each, seconds in times.items()
            if n * each <= envs
        )

    stages = {
        "env": StageProfile(samples=samples(env, memory), switches=switch(1.0, 1.0)),
        "rollout": StageProfile(samples=samples(policy, 45.0), switches=switch(1.0, 1.0)),
        "actor": StageProfile(samples=table({4: 100.0}, envs, 70.0), switches=switch(3.0, 3.0)),
    }
    lines = "83-101" if name == "libero" else "102-116"
    sources = (
        f"seconds by environments an instance, 4 devices, {envs} environments, actor 100 s: [1] lines {lines}, 118-124",
        f"assumed: {turns} turns an episode, memory (env {memory} GiB, rollout 45 GiB, actor 70 GiB of 80 GiB), "
        "switch and sync seconds",
    )
    return flow, cluster, _profile(flow, cluster, stages, sources)


def search_agent() -> tuple[Flow, Cluster, Profile]:
    """Search-R1: a 3B model and a retrieval service in a cycle, 16 devices and a processor node."""
    flow = Flow(
        name="search-agent",
        items=512,
        stages=(
            Stage(name="rollout", kind="generate"),
            Stage(name="search", kind="tool"),
            Stage(name="reward", kind="reward"),
            Stage(name="inference"),
            Stage(name="actor", kind="train", divides=64),
        ),
        edges=(
            Edge(source="rollout", target="search"),
            Edge(source="search", target="rollout"),
            Edge(source="rollout", target="reward"),
            Edge(source="rollout", target="inference"),
            Edge(source="reward", target="actor"),
            Edge(source="inference", target="actor"),
            Edge(source="actor", target="rollout", kind="weights"),
        ),
        loops=(Loop(stages=("rollout", "search"), turns=4, streams=(1, 2, 4)),),
        granularities=(128, 256, 512),
    )
    cluster = Cluster(
        nodes=(
            Node(name="gpu", kind="gpu", devices=8, memory_gib=80.0, count=2),
            Node(name="cpu", kind="cpu", devices=16),
        )
    )

    def grid(fixed: float, shared: float, used: float, kind: str = "gpu") -> tuple[Sample, ...]:
        return tuple(
            Sample(devices=n, items=m, seconds=round(fixed + shared * m / n, 4), memory_gib=used, device_kind=kind)
            for n in (1, 2, 4, 8, 16)
            for m in (32, 128, 512)
        )

    stages = {
        "rollout": StageProfile(samples=grid(3.0, 0.08, 50.0), switches=switch(1.0, 1.0)),
        "search": StageProfile(samples=grid(0.3, 0.05, 0.0, "cpu")),
        "reward": StageProfile(samples=grid(0.05, 0.01, 0.0, "cpu")),
        "inference": StageProfile(samples=grid(0.5, 0.1, 20.0), switches=switch(0.5, 0.5)),
        "actor": StageProfile(samples=grid(1.0, 0.5, 55.0), switches=switch(2.0, 2.0)),
    }
    sources = ("assumed throughout, in the proportions of a 3B model with four retrievals a question (Search-R1)",)
    return flow, cluster, _profile(flow, cluster, stages, sources)


def _profile(flow: Flow, cluster: Cluster, stages: dict[str, StageProfile], sources: tuple[str, ...]) -> Profile:
    return Profile(
        flow=flow.name,
        fingerprint=Fingerprint.of(cluster),
        created=FROZEN,
        stages=stages,
        syncs=SYNCS,
        sources=sources,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out
    workloads = [
        math_7b(),
        moe_30b(),
        embodied(
            "libero",
            64,
            {4: 0.61, 8: 1.23, 16: 2.46, 32: 4.66, 64: 18.5},
            {4: 0.6, 8: 1.01, 16: 2.12, 32: 3.72, 64: 15.3},
            64,
            20.0,
        ),
        embodied(
            "maniskill",
            40,
            {10: 0.8, 20: 0.8, 30: 0.85, 40: 0.85},
            {10: 0.4, 20: 0.6, 30: 0.85, 40: 1.15},
            80,
            45.0,
        ),
        search_agent(),
    ]
    for flow, cluster, profile in workloads:
        folder = out / flow.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "flow.yaml").write_text(yaml.safe_dump(flow.to_mapping(), sort_keys=False))
        (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster.to_mapping(), sort_keys=False))
        profile.write(folder / "profile.json")
        print(folder.name)


if __name__ == "__main__":
    main()
