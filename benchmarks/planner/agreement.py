"""Predictions against the simulator: the best plan of each mode on plausible random profiles.

python benchmarks/planner/agreement.py [--cases 30] [--repeats 20] [--modes MODE ...] [--tail]
"""

import argparse

import numpy as np

from rlinf_plugins.scheduler.planning.constraints import Constraints
from rlinf_plugins.scheduler.planning.planner import PlanRequest, candidates
from rlinf_plugins.scheduler.planning.simulator import simulate_many
from rlinf_plugins.testing.flows import plausible_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", default=["temporal", "spatial", "hybrid"])
    parser.add_argument("--tail", action="store_true", help="rollouts are serving engines with log-normal lengths")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    for mode in options.modes:
        errors = []
        for number in range(options.seed, options.seed + options.cases):
            case = plausible_case(number, tail=options.tail)
            request = PlanRequest(
                flow=case.flow, cluster=case.cluster, profile=case.profile, constraints=Constraints(modes=(mode,))
            )
            for best in candidates(request, 1):
                steps = simulate_many(case.flow, case.cluster, case.profile, best, seed=number, repeats=options.repeats)
                errors.append(best.seconds / steps.mean() - 1)
        found = np.abs(errors)
        print(
            f"{mode:>9}: {len(found)} plans, median error {np.median(found):.2%}, 90th percentile "
            f"{np.quantile(found, 0.9):.2%}, largest {found.max():.2%}, mean signed {np.mean(errors):+.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
