"""How sure a plan is: bands from the samples' scatter, the error that would change it, the measurement worth making."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlinf_plugins.scheduler.planning.cost import CostModel
from rlinf_plugins.scheduler.planning.evaluate import phase_cost, predict
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.profile import Profile, Sample, StageProfile
from rlinf_plugins.scheduler.planning.search import Search

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.planning.planner import PlanRequest

RESAMPLES = 60
"""Bootstrap resamples behind a band."""

WIDEST = 8.0
"""Factors beyond this are reported as "never": a profile wrong by more than that is no profile."""


@dataclass(frozen=True, slots=True)
class Robustness:
    """How wrong one stage's times may be before another placement is better.

    Attributes:
        stage: The stage.
        faster: The smallest factor on its true times (below 1) at which the choice still holds; 0: any.
        slower: The largest such factor (above 1); infinite: any.
        mode_faster: As ``faster``, for the mode instead of the exact placement.
        mode_slower: As ``slower``, for the mode.
        scatter: Relative scatter of its measurements (standard deviation over mean, averaged over cells).
    """

    stage: str
    faster: float
    slower: float
    mode_faster: float
    mode_slower: float
    scatter: float


def prediction_band(request: "PlanRequest", plan: Plan, *, seed: int = 0) -> tuple[float, float] | None:
    """Return 5 % and 95 % bounds of the plan's predicted seconds; None where no cell has two samples."""
    if not any(len(cell) > 1 for s in request.profile.stages.values() for cell in _cells(s).values()):
        return None
    rng = np.random.default_rng(seed)
    seconds = []
    for _ in range(RESAMPLES):
        model = CostModel(request.flow, request.cluster, resampled(request.profile, rng))
        seconds.append(predict(model, plan)[0])
    low, high = np.quantile(seconds, [0.05, 0.95])
    return float(low), float(high)


def resampled(profile: Profile, rng: np.random.Generator) -> Profile:
    """Return a bootstrap resample: each cell of (kind, devices, items) redrawn with replacement."""
    stages = {}
    for name, stage in profile.stages.items():
        samples: list[Sample] = []
        for cell in _cells(stage).values():
            samples += [cell[i] for i in rng.integers(len(cell), size=len(cell))]
        lengths = stage.lengths
        if lengths:
            lengths = tuple(rng.choice(np.asarray(lengths), size=len(lengths)).tolist())
        stages[name] = replace(stage, samples=tuple(samples), lengths=lengths)
    return replace(profile, stages=stages)


def robustness(request: "PlanRequest", plan: Plan, *, digits: float = 0.002) -> tuple[Robustness, ...]:
    """Return, per stage, the range of errors of its profile within which the plan stays the best.

    The true times are the profiled ones times a factor; the ends of the range are found by bisection to ``digits``.
    """
    return tuple(
        Robustness(
            stage=stage.name,
            faster=_end(request, plan, stage.name, -1, digits, mode=False),
            slower=_end(request, plan, stage.name, 1, digits, mode=False),
            mode_faster=_end(request, plan, stage.name, -1, digits, mode=True),
            mode_slower=_end(request, plan, stage.name, 1, digits, mode=True),
            scatter=_scatter(request.profile.stages[stage.name]),
        )
        for stage in request.flow.stages
    )


def worth_measuring(found: tuple[Robustness, ...]) -> str:
    """Say which measurement is most likely to change the decision: the smallest margin in units of its scatter."""
    scored = []
    for entry in found:
        margin = min(1 - entry.faster, entry.slower - 1)
        scored.append((margin / max(entry.scatter, 0.01), entry.stage, margin))
    ratio, stage, margin = min(scored)
    if ratio > 3:
        return "no further measurement is likely to change the plan"
    return (
        f"measure {stage} again: an error of {margin:.1%} would change the plan, which is {ratio:.1f} times its scatter"
    )


def _end(request: "PlanRequest", plan: Plan, stage: str, direction: int, digits: float, *, mode: bool) -> float:
    def holds(factor: float) -> bool:
        profile = request.profile.scaled({stage: factor})
        model = CostModel(request.constraints.applied(request.flow, request.cluster), request.cluster, profile)
        constraints = request.constraints
        best = Search(model, constraints).run()
        if best is None:
            return False
        if mode:
            found = Search(model, replace(constraints, modes=(plan.mode,))).run(best.seconds * (1 + 1e-9))
            return found is not None
        known = sum(phase_cost(model, phase, alone=len(plan.phases) == 1).seconds for phase in plan.phases)
        return known <= best.seconds * (1 + 1e-9)

    good, bad = 0.0, direction * float(np.log(WIDEST))
    if holds(float(np.exp(bad))):
        return 0.0 if direction < 0 else float("inf")
    while abs(bad - good) > digits:
        middle = (good + bad) / 2
        if holds(float(np.exp(middle))):
            good = middle
        else:
            bad = middle
    return float(np.exp(good))


def _cells(stage: StageProfile) -> dict[tuple[str, int, int], list[Sample]]:
    cells: dict[tuple[str, int, int], list[Sample]] = {}
    for sample in stage.samples:
        cells.setdefault((sample.device_kind, sample.devices, sample.items), []).append(sample)
    return cells


def _scatter(stage: StageProfile) -> float:
    spread = [
        float(np.std([s.seconds for s in cell], ddof=1) / np.mean([s.seconds for s in cell]))
        for cell in _cells(stage).values()
        if len(cell) > 1
    ]
    return float(np.mean(spread)) if spread else 0.0
