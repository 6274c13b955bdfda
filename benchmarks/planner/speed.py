"""Search time over devices and stages: random Amdahl profiles, seven granularities, switch costs.

python benchmarks/planner/speed.py [--repeats 3] [--seed 0]
"""

import argparse
import random
import time

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Edge, Flow, Stage
from rlinf_plugins.scheduler.planning.planner import PlanRequest, prepared
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile, SwitchSample

CASES = ((3, 256), (3, 1024), (3, 4096), (5, 1024), (6, 1024), (7, 1024))


def request_of(stages: int, devices: int, rng: random.Random) -> PlanRequest:
    """Return a chain with a random cost, memory and switch time per stage."""
    names = [f"s{index}" for index in range(stages)]
    flow = Flow(
        name="speed",
        items=512,
        stages=tuple(Stage(name=name, streaming=index == 0) for index, name in enumerate(names)),
        edges=tuple(Edge(source=a, target=b) for a, b in zip(names, names[1:], strict=False)),
    )
    cluster = Cluster.uniform(devices, memory_gib=80.0)
    profiles = {}
    for name in names:
        fixed, shared, memory = rng.uniform(0.0, 0.1), rng.uniform(1.0, 20.0), rng.uniform(10.0, 60.0)
        samples = tuple(
            Sample(devices=n, items=m, seconds=fixed + shared * m / n, memory_gib=memory)
            for n in (2, 16, 128, 1024)
            for m in (8, 512)
        )
        switch = SwitchSample(devices=1, onload_seconds=rng.uniform(0, 3), offload_seconds=rng.uniform(0, 1))
        profiles[name] = StageProfile(samples=samples, switches=(switch,))
    profile = Profile(flow="speed", fingerprint=Fingerprint.of(cluster), created=0.0, stages=profiles)
    return PlanRequest(flow=flow, cluster=cluster, profile=profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    print(f"{'stages':>7} {'devices':>8} {'slowest s':>10} {'mean s':>8}")
    for stages, devices in CASES:
        seconds = []
        for number in range(options.repeats):
            request = request_of(stages, devices, random.Random(options.seed + number))
            start = time.process_time()
            prepared(request)[1].run()
            seconds.append(time.process_time() - start)
        print(f"{stages:>7} {devices:>8} {max(seconds):>10.3f} {sum(seconds) / len(seconds):>8.3f}", flush=True)


if __name__ == "__main__":
    main()
