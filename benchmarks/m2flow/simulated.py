"""Gains of planned modes on 8 to 1,024 simulated GPUs, with the planner's golden profiles.

Run: ``$(make -s python) benchmarks/m2flow/simulated.py``. For every workload and size: the best plan whose stages take
turns on all devices (veRL's ``sync``), the best with rollout apart, and the best of all. Seconds come from the
discrete-event simulator, which shares no cost code with the planner. The batch stays the same at every size. A ``*``
marks sizes at which a stage of the best plan was not measured.
"""

import sys
from dataclasses import replace
from pathlib import Path

from rlinf_plugins.core.errors import RlinfError
from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.planner import PlanRequest, plan
from rlinf_plugins.scheduler.planning.simulator import simulate_many

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))
from golden_plans import load  # noqa: E402  a script beside this one

SIZES = {
    "math-7b": (8, 16, 32, 64, 128, 256, 512, 1024),
    "moe-30b": (32, 64, 128, 256, 512, 1024),
    "search-agent": (8, 16, 32, 64),
    "libero": (4,),
    "maniskill": (4,),
}
REPEATS = 5


def on(request: PlanRequest, gpus: int) -> PlanRequest:
    """Return the request on so many GPUs of the same nodes; other devices stay as many as they are."""
    nodes = [
        replace(node, devices=min(node.devices, gpus), count=max(1, gpus // node.devices))
        if node.kind == "gpu"
        else node
        for node in request.cluster.nodes
    ]
    return replace(request, cluster=replace(request.cluster, nodes=tuple(nodes)))


def best(request: PlanRequest, modes: tuple) -> Plan | None:
    """Return the fastest plan of some modes; None: none fits."""
    try:
        return plan(replace(request, constraints=Constraints(modes=modes)), now=request.profile.created)
    except RlinfError:
        return None


def seconds(request: PlanRequest, chosen: Plan) -> float:
    """Return the mean of simulated steps."""
    found = simulate_many(request.flow, request.cluster, request.profile, chosen, seed=0, repeats=REPEATS)
    return float(found.mean())


def main() -> None:
    print("| workload | GPUs | in turn s | apart s | best s | mode | gain over in turn | plan |")
    print("|---|---|---|---|---|---|---|---|")
    for name, sizes in SIZES.items():
        for gpus in sizes:
            request = on(load(name), gpus)
            plans = [best(request, modes) for modes in (("temporal",), ("spatial",), ("temporal", "spatial", "hybrid"))]
            turn, apart, chosen = (None if p is None else seconds(request, p) for p in plans)
            if chosen is None:
                print(f"| {name} | {gpus} | - | - | - | nothing fits | - | - |", flush=True)
                continue
            guessed = "*" if any("not measured" in warning for warning in plans[2].warnings) else ""
            columns = ["-" if value is None else f"{value:.1f}" for value in (turn, apart, chosen)]
            gain = "-" if turn is None else f"{turn / chosen:.2f}x"
            cells = [name, f"{gpus}{guessed}", *columns, plans[2].mode, gain, plans[2].summary()]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
