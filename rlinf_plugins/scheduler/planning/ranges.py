"""Plans from device ranges, the way placements are usually written down: ``{"actor": "0-7", "env": "0-3"}``.

Stages on disjoint devices run side by side in a pipeline; a stage whose devices overlap with an earlier one's waits for
it and starts a new phase.
"""

from collections.abc import Mapping

from rlinf_plugins.core.config import suggest
from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Block, Flow
from rlinf_plugins.scheduler.planning.plan import PhasePlan, Plan, PoolPlan


def plan_from_ranges(
    flow: Flow,
    cluster: Cluster,
    ranges: Mapping[str, str],
    *,
    items: int | None = None,
    streams: int = 1,
) -> Plan:
    """Return the plan that runs each stage on the given devices.

    Args:
        flow: The flow.
        cluster: The devices.
        ranges: Per stage (or several, separated by commas) ``"0-3"``, ``"0-3,8-11"`` or ``"all"``.
        items: Micro-batch size of pipelined phases; None: the whole batch.
        streams: Interleaved streams of cycles that alternate between pools.

    Raises:
        PlanError: A stage is missing, unknown or named twice, or a range is not one of the cluster's.
    """
    devices = _devices(flow, cluster, ranges)
    phases: list[list[Block]] = []
    for block in flow.blocks:
        mine = {n for name in block.stages for n in devices[name]}
        busy = {n for other in (phases[-1] if phases else []) for name in other.stages for n in devices[name]}
        if not phases or mine & busy:
            phases.append([])
        phases[-1].append(block)
    return Plan(
        flow=flow.name,
        items=flow.items,
        devices={kind: cluster.count(kind) for kind in cluster.kinds},
        phases=tuple(_phase(flow, cluster, blocks, devices, items, streams) for blocks in phases),
        seconds=0.0,
        reasons=("given by device ranges, not planned",),
    )


def parse_range(text: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the devices of ``"0-3,8"`` or ``"all"`` among ``numbers``.

    Raises:
        PlanError: The text is of another form or names a device that is not there.
    """
    if text.strip() == "all":
        return numbers
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise PlanError(f"cannot read the device range {text!r}; write 0-3, 0-3,8-11 or all")
        found.extend(range(int(first), int(last or first) + 1))
    outside = sorted(set(found) - set(numbers))
    if outside or len(set(found)) != len(found):
        raise PlanError(f"device range {text!r}: {outside or 'a device'} is not there or named twice")
    return tuple(found)


def _devices(flow: Flow, cluster: Cluster, ranges: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    names = [stage.name for stage in flow.stages]
    numbers = tuple(n for _, _, machine in cluster.machines() for n in machine)
    devices: dict[str, tuple[int, ...]] = {}
    for key, text in ranges.items():
        for name in (part.strip() for part in key.split(",")):
            if name not in names:
                raise PlanError(f"placement of unknown stage {name!r}; {suggest(name, names)}")
            if name in devices:
                raise PlanError(f"stage {name!r} is placed twice")
            devices[name] = parse_range(str(text), numbers)
    missing = [name for name in names if name not in devices]
    if missing:
        raise PlanError(f"no devices are given for {', '.join(missing)}")
    return devices


def _phase(
    flow: Flow,
    cluster: Cluster,
    blocks: list[Block],
    devices: Mapping[str, tuple[int, ...]],
    items: int | None,
    streams: int,
) -> PhasePlan:
    kind_of = {n: node.kind for _, node, machine in cluster.machines() for n in machine}
    pools: list[PoolPlan] = []
    used_streams: dict[str, int] = {}
    for block in blocks:
        groups: dict[tuple[int, ...], list[str]] = {}
        for name in block.stages:
            groups.setdefault(devices[name], []).append(name)
        if sum(len(numbers) for numbers in groups) != len({n for numbers in groups for n in numbers}):
            raise PlanError(f"the stages of the cycle {block.name} must share their devices or none of them")
        if block.loop is not None:
            used_streams[block.name] = streams if len(groups) > 1 else 1
        for numbers, names in groups.items():
            kinds = {kind_of[n] for n in numbers}
            if len(kinds) > 1:
                raise PlanError(
                    f"{', '.join(names)}: devices of several kinds ({', '.join(sorted(kinds))}) in one pool"
                )
            pools.append(
                PoolPlan(
                    stages=tuple(names),
                    kind=kinds.pop(),
                    devices=len(numbers),
                    allotted=dict.fromkeys(names, len(numbers)),
                    numbers=numbers,
                )
            )
    size = flow.items if items is None or len(pools) == 1 else items
    return PhasePlan(pools=tuple(pools), items=size, streams=used_streams)
