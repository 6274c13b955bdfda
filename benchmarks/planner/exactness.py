"""Search against full enumeration on random flows: cycles, memory limits, kinds, three granularities.

python benchmarks/planner/exactness.py --stages 6 --count 20 [--devices 8] [--seed 0]
"""

import argparse
import math
import time

from rlinf_plugins.scheduler.planning.cost import CostModel
from rlinf_plugins.scheduler.planning.enumeration import enumerate_best
from rlinf_plugins.scheduler.planning.evaluate import sync_seconds
from rlinf_plugins.scheduler.planning.search import Search
from rlinf_plugins.testing.flows import random_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=None, help="stages of every flow; default: up to five")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    wrong = feasible = 0
    spent = {"search": 0.0, "enumeration": 0.0}
    for number in range(options.count):
        case = random_case(options.seed + number, stages=options.stages, max_devices=options.devices)
        model = CostModel(case.flow, case.cluster, case.profile)
        start = time.process_time()
        exact, _ = enumerate_best(model, case.constraints)
        middle = time.process_time()
        found = Search(CostModel(case.flow, case.cluster, case.profile), case.constraints).run()
        spent["enumeration"] += middle - start
        spent["search"] += time.process_time() - middle
        seconds = math.inf if found is None else found.seconds + sync_seconds(model)
        feasible += math.isfinite(exact)
        if seconds != exact and not math.isclose(seconds, exact, rel_tol=1e-9):
            wrong += 1
            print(f"case {options.seed + number}: search {seconds}, enumeration {exact}", flush=True)
    print(
        f"{options.count} flows, {feasible} feasible, {wrong} wrong; "
        f"processor seconds: search {spent['search']:.1f}, enumeration {spent['enumeration']:.1f}"
    )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
