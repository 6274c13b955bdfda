from pathlib import Path

import pytest
import yaml

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Edge, Flow, Stage
from rlinf_plugins.scheduler.planning.planner import PlanRequest
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile

GOLDEN = Path(__file__).parents[3] / "benchmarks" / "planner" / "golden"


@pytest.fixture
def golden():
    """Return a planning request for one of the frozen workloads, and the folder it came from."""

    def load(name):
        folder = GOLDEN / name
        flow = Flow.from_mapping(yaml.safe_load((folder / "flow.yaml").read_text()))
        profile = Profile.read(folder / "profile.json")
        return PlanRequest(flow=flow, cluster=Cluster.read(folder / "cluster.yaml"), profile=profile)

    load.folder = GOLDEN
    return load


@pytest.fixture
def line():
    """Return a request for a chain of stages given as {name: {devices: seconds per micro-batch of one item}}."""

    def make(devices, items, times, *, memory=None, capacity=float("inf"), granularities=(1,), per_node=8, **options):
        names = list(times)
        stages = tuple(Stage(name=name) for name in names)
        edges = tuple(Edge(source=a, target=b) for a, b in zip(names, names[1:], strict=False))
        flow = Flow(name="line", items=items, stages=stages, edges=edges, granularities=granularities)
        cluster = Cluster.uniform(devices, per_node=per_node, memory_gib=capacity)
        profiles = {
            name: StageProfile(
                samples=tuple(
                    Sample(devices=n, items=1, seconds=s, memory_gib=(memory or {}).get(name, 0.0))
                    for n, s in times[name].items()
                )
            )
            for name in names
        }
        profile = Profile(flow="line", fingerprint=Fingerprint.of(cluster), created=0.0, stages=profiles)
        return PlanRequest(flow=flow, cluster=cluster, profile=profile, **options)

    return make
