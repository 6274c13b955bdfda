"""Plans of the golden workloads, and how wrong the math profile may be before its plan changes.

python benchmarks/planner/golden_plans.py
"""

from pathlib import Path

import numpy as np
import yaml

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.planner import PlanRequest, plan
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_plugins.scheduler.planning.simulator import simulate
from rlinf_plugins.scheduler.planning.uncertainty import robustness

GOLDEN = Path(__file__).parent / "golden"


def load(name: str) -> PlanRequest:
    """Return the planning request of a golden workload."""
    folder = GOLDEN / name
    return PlanRequest(
        flow=Flow.from_mapping(yaml.safe_load((folder / "flow.yaml").read_text())),
        cluster=Cluster.read(folder / "cluster.yaml"),
        profile=Profile.read(folder / "profile.json"),
    )


def main() -> None:
    for folder in sorted(GOLDEN.iterdir()):
        request = load(folder.name)
        best = plan(request, now=request.profile.created)
        run = simulate(request.flow, request.cluster, request.profile, best, np.random.default_rng(0))
        print(f"{folder.name}: {best.mode}, predicted {best.seconds:.1f} s, simulated {run.seconds:.1f} s")
        print(f"    {best.summary()}")
    request = load("math-7b")
    best = plan(request, now=request.profile.created)
    print("math-7b: the plan stays best while the true time is this many times the profiled one")
    for entry in robustness(request, best):
        print(
            f"    {entry.stage}: placement {entry.faster:.3f} to {entry.slower:.3f}, "
            f"mode {entry.mode_faster:.3f} to {entry.mode_slower:.3f}"
        )


if __name__ == "__main__":
    main()
