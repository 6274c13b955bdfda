"""What the user fixes: devices or mode of single stages, modes of the whole plan, staleness."""

from dataclasses import dataclass, replace
from typing import Literal

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.plan import Mode
from rlinf_plugins.scheduler.planning.shapes import PhaseShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """What is fixed of one stage; the rest is planned around it.

    Attributes:
        stage: The stage.
        devices: Number of devices; None: free.
        kind: Kind of devices; None: free.
        mode: ``temporal``: it has a phase of its own (shared with its cycle); ``spatial``: it has a pool of its own in
            a pipeline; None: free.
    """

    stage: str
    devices: int | None = None
    kind: str | None = None
    mode: Literal["temporal", "spatial"] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """Limits of the search.

    Attributes:
        pins: Fixed stages.
        modes: Allowed modes of the whole plan.
        max_staleness: 0: on-policy; 1: the consumer may work on the previous step's items.
        granularities: Allowed micro-batch sizes; empty: the flow's.
        together: Groups of stages that share a pool wherever they run in the same phase (one process serves them).
    """

    pins: tuple[Pin, ...] = ()
    modes: tuple[Mode, ...] = ("temporal", "spatial", "hybrid")
    max_staleness: int = 0
    granularities: tuple[int, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()

    def applied(self, flow: Flow, cluster: Cluster) -> Flow:
        """Return the flow with pinned counts and kinds built in.

        Raises:
            PlanError: A pin names an unknown stage or kind, or staleness is out of range.
        """
        if self.max_staleness not in (0, 1) or not self.modes:
            raise PlanError(f"max_staleness must be 0 or 1 and modes not empty, got {self.max_staleness}, {self.modes}")
        pins = {pin.stage: pin for pin in self.pins}
        names = [stage.name for stage in flow.stages]
        for name in (name for group in self.together for name in group):
            if name not in names:
                raise PlanError(f"unknown stage {name!r} in together; stages are {', '.join(names)}")
        for pin in self.pins:
            if pin.stage not in names:
                raise PlanError(f"pin of unknown stage {pin.stage!r}; stages are {', '.join(names)}")
            if pin.kind is not None and pin.kind not in cluster.kinds:
                raise PlanError(
                    f"stage {pin.stage!r} is pinned to {pin.kind!r}; the cluster has {', '.join(cluster.kinds)}"
                )
        stages = []
        for stage in flow.stages:
            fixed = pins.get(stage.name, Pin(stage=stage.name))
            sizes = stage.sizes if fixed.devices is None else (fixed.devices,)
            kinds = stage.kinds if fixed.kind is None else (fixed.kind,)
            stages.append(replace(stage, sizes=sizes, kinds=kinds))
        return replace(flow, stages=tuple(stages), granularities=self.granularities or flow.granularities)

    def allows_shape(self, shape: PhaseShape) -> bool:
        """Say whether a phase respects the pinned modes and the stages that belong together."""
        for group in self.together:
            if sum(bool(set(group) & set(pool.stages)) for pool in shape.pools) > 1:
                return False
        for pin in self.pins:
            if pin.mode is None or pin.stage not in shape.stages:
                continue
            alone = any(pool.stages == (pin.stage,) for pool in shape.pools)
            own = next(pool for pool in shape.pools if pin.stage in pool.stages)
            if pin.mode == "temporal" and (len(shape.pools) > 1 or (own.block is None and not alone)):
                return False
            if pin.mode == "spatial" and not (alone and len(shape.pools) > 1):
                return False
        return True
