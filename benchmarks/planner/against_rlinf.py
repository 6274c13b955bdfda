"""Our planner beside RLinf's on the same tables: search time, the two known misses, and 200 random profiles simulated.

python benchmarks/planner/against_rlinf.py --rlinf PATH [--largest 512] [--profiles 200] [--seed 0]
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
from rlinf_peer import RLinf

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Edge, Flow, Stage
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.planner import PlanRequest, finished, prepared
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile
from rlinf_plugins.scheduler.planning.simulator import simulate

NAMES = ("rollout", "inference", "actor")

Costs = dict[str, dict[int, float]]


def request_of(devices: int, items: int, costs: Costs) -> PlanRequest:
    """Return the same problem for our planner; it may pipeline item by item or run whole batches, as RLinf does."""
    flow = Flow(
        name="chain",
        items=items,
        stages=tuple(Stage(name=name) for name in costs),
        edges=tuple(Edge(source=a, target=b) for a, b in zip(costs, list(costs)[1:], strict=False)),
        granularities=(1,),
    )
    cluster = Cluster.uniform(devices, per_node=devices)
    stages = {
        name: StageProfile(samples=tuple(Sample(devices=n, items=1, seconds=s) for n, s in table.items()))
        for name, table in costs.items()
    }
    profile = Profile(flow="chain", fingerprint=Fingerprint.of(cluster), created=0.0, stages=stages)
    return PlanRequest(flow=flow, cluster=cluster, profile=profile, constraints=Constraints())


def amdahl(rng: random.Random, devices: int, stages: int = 3) -> Costs:
    """Return random costs: a fixed part and a shared part per component."""
    costs = {}
    for index in range(stages):
        name = NAMES[index] if stages == 3 else f"s{index}"
        fixed, shared = rng.uniform(0.0, 0.3), rng.uniform(0.2, 4.0)
        costs[name] = {n: fixed + shared / n for n in range(1, devices + 1)}
    return costs


def timed(function):
    """Return a call's result and its processor seconds."""
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def search_times(peer: RLinf, largest: int, rng: random.Random) -> None:
    print("search time, processor seconds, three stages (RLinf's own graph):")
    print(f"{'devices':>8} {'RLinf':>10} {'ours':>10} {'ratio':>8}")
    for devices in (8, 32, 128, 256, 512, 1024, 2048, 4096):
        costs = amdahl(rng, devices)
        request = request_of(devices, 512, costs)
        ours = min(timed(lambda r=request: prepared(r)[1].run())[1] for _ in range(3))
        if devices > largest:
            print(f"{devices:>8} {'-':>10} {ours:>10.4f} {'-':>8}")
            continue
        _, theirs = timed(lambda d=devices, c=costs: peer.search(d, 512, c))
        print(f"{devices:>8} {theirs:>10.4f} {ours:>10.4f} {theirs / ours:>8.1f}", flush=True)


def known_misses(peers: dict[str, RLinf]) -> None:
    cases = {
        "2 devices": (2, 32, {"rollout": {1: 1.0, 2: 1.0}, "actor": {1: 1.0, 2: 1.0}}),
        "4 devices": (
            4,
            64,
            {"rollout": {1: 3.0, 2: 1.5, 3: 1.0, 4: 0.75}, "actor": {1: 1.0, 2: 0.75, 3: 0.6, 4: 0.5}},
        ),
    }
    for name, (devices, items, costs) in cases.items():
        request = request_of(devices, items, costs)
        found = prepared(request)[1].run()
        theirs = {label: peer.search(devices, items, costs).total_cost for label, peer in peers.items()}
        print(f"{name}: ours {found.seconds:g} s, " + ", ".join(f"{k} {v:g} s" for k, v in theirs.items()))


def random_profiles(peers: dict[str, RLinf], count: int, rng: random.Random) -> None:
    outcomes = {label: {"ours": 0, "tie": 0, "theirs": 0, "none": 0} for label in peers}
    ratios: dict[str, list[float]] = {label: [] for label in peers}
    for _ in range(count):
        devices, items = rng.choice([2, 4, 8, 16]), rng.choice([16, 32, 64])
        costs = amdahl(rng, devices)
        request = request_of(devices, items, costs)
        model, search = prepared(request)
        mine = finished(model, search.run())
        generator = np.random.default_rng(0)
        ours = simulate(request.flow, request.cluster, request.profile, mine, generator, noise=False).seconds
        for label, peer in peers.items():
            result = peer.search(devices, items, costs)
            if result is None:
                outcomes[label]["none"] += 1
                continue
            plan = peer.plan(result, request.flow, request.cluster)
            theirs = simulate(request.flow, request.cluster, request.profile, plan, generator, noise=False).seconds
            ratios[label].append(theirs / ours)
            key = "tie" if abs(theirs / ours - 1) < 1e-9 else "ours" if theirs > ours else "theirs"
            outcomes[label][key] += 1
    for label, found in outcomes.items():
        print(
            f"{count} random profiles, simulated, {label}: ours faster {found['ours']}, equal {found['tie']}, RLinf "
            f"faster {found['theirs']}, RLinf without a plan {found['none']}; "
            f"mean ratio {np.mean(ratios[label]):.3f}, largest {np.max(ratios[label]):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rlinf", type=Path, required=True, help="root of a checkout of RLinf")
    parser.add_argument("--largest", type=int, default=512, help="largest device count RLinf is run at")
    parser.add_argument("--profiles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    rng = random.Random(options.seed)
    peers = {"RLinf": RLinf(options.rlinf), "RLinf, loop mended": RLinf(options.rlinf, mended=True)}
    known_misses(peers)
    random_profiles(peers, options.profiles, rng)
    search_times(peers["RLinf"], options.largest, rng)


if __name__ == "__main__":
    main()
