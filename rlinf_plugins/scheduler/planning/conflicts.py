"""Why nothing fits: a smallest set of constraints that cannot hold together."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.constraints import Constraints, Pin
from rlinf_plugins.scheduler.planning.cost import CostModel
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_plugins.scheduler.planning.search import Search

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.planning.planner import PlanRequest


@dataclass(frozen=True, slots=True)
class _Case:
    flow: Flow
    cluster: Cluster
    profile: Profile
    constraints: Constraints

    def feasible(self) -> bool:
        flow = self.constraints.applied(self.flow, self.cluster)
        model = CostModel(flow, self.cluster, self.profile)
        return Search(model, self.constraints).run() is not None


def smallest_conflict(request: "PlanRequest") -> tuple[str, ...]:
    """Return a smallest set of constraints that no placement satisfies: dropping any one of them would help.

    Deletion filter (Chinneck and Dravnieks 1991): constraints are dropped one by one; one whose absence makes the
    case feasible is put back.
    """
    case = _Case(request.flow, request.cluster, request.profile, request.constraints)
    needed = []
    for text, relax in _relaxations(case):
        relaxed = relax(case)
        if relaxed.feasible():
            needed.append(text)
        else:
            case = relaxed
    sizes = ", ".join(f"{case.cluster.count(kind)} {kind} devices" for kind in case.cluster.kinds)
    return (*needed, f"the cluster has {sizes}")


def _relaxations(case: _Case) -> list[tuple[str, Callable[[_Case], _Case]]]:
    found: list[tuple[str, Callable[[_Case], _Case]]] = []
    limits = case.constraints
    for pin in limits.pins:
        for field, words in (("devices", "devices"), ("kind", "devices of kind"), ("mode", "mode")):
            value = getattr(pin, field)
            if value is not None:
                found.append((f"{pin.stage} is pinned to {words} {value}", _without_pin(pin.stage, field)))
    if len(limits.modes) < 3:
        found.append((f"the mode must be {' or '.join(limits.modes)}", _with_all_modes))
    for group in limits.together:
        found.append((f"{', '.join(group)} share a pool", _apart(group)))
    for stage in case.flow.stages:
        if stage.sizes:
            found.append(
                (f"{stage.name} runs on {', '.join(map(str, stage.sizes))} devices only", _freed(stage.name, sizes=()))
            )
        if stage.divides is not None:
            found.append((f"replicas of {stage.name} must divide {stage.divides}", _freed(stage.name, divides=None)))
        if stage.kinds:
            found.append((f"{stage.name} runs on {', '.join(stage.kinds)} only", _freed(stage.name, kinds=())))
        if stage.replica > 1:
            found.append((f"a replica of {stage.name} needs {stage.replica} devices", _freed(stage.name, replica=1)))
        measured = case.profile.stages.get(stage.name)
        if measured and any(s.memory_gib for s in measured.samples):
            least = min(s.memory_gib for s in measured.samples)
            capacity = max(node.memory_gib for node in case.cluster.nodes)
            text = f"{stage.name} needs memory (least measured {least:.3g} GiB of {capacity:.3g} GiB a device)"
            if math.isfinite(capacity):
                found.append((text, _without_memory(stage.name)))
    return found


def _without_pin(stage: str, field: str) -> Callable[[_Case], _Case]:
    def relax(case: _Case) -> _Case:
        pins = tuple(_released(pin, field) if pin.stage == stage else pin for pin in case.constraints.pins)
        return replace(case, constraints=replace(case.constraints, pins=pins))

    return relax


def _released(pin: Pin, field: str) -> Pin:
    return Pin(
        stage=pin.stage,
        devices=None if field == "devices" else pin.devices,
        kind=None if field == "kind" else pin.kind,
        mode=None if field == "mode" else pin.mode,
    )


def _with_all_modes(case: _Case) -> _Case:
    return replace(case, constraints=replace(case.constraints, modes=Constraints().modes))


def _apart(group: tuple[str, ...]) -> Callable[[_Case], _Case]:
    def relax(case: _Case) -> _Case:
        left = tuple(other for other in case.constraints.together if other != group)
        return replace(case, constraints=replace(case.constraints, together=left))

    return relax


def _freed(
    name: str,
    *,
    sizes: tuple[int, ...] | None = None,
    divides: int | None = -1,
    kinds: tuple[str, ...] | None = None,
    replica: int | None = None,
) -> Callable[[_Case], _Case]:
    def relax(case: _Case) -> _Case:
        stages = tuple(
            replace(
                stage,
                sizes=stage.sizes if sizes is None else sizes,
                divides=stage.divides if divides == -1 else divides,
                kinds=stage.kinds if kinds is None else kinds,
                replica=stage.replica if replica is None else replica,
            )
            if stage.name == name
            else stage
            for stage in case.flow.stages
        )
        return replace(case, flow=replace(case.flow, stages=stages))

    return relax


def _without_memory(name: str) -> Callable[[_Case], _Case]:
    def relax(case: _Case) -> _Case:
        measured = case.profile.stages[name]
        light = replace(measured, samples=tuple(replace(s, memory_gib=0.0) for s in measured.samples))
        return replace(case, profile=replace(case.profile, stages={**case.profile.stages, name: light}))

    return relax
