"""The micro flow: on which devices each stage's workers run and how many items they take at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rlinf_plugins.core.errors import PlanError
from rlinf_plugins.scheduler.planning.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Chosen by the system or by hand; the flow's code does not change with it.

    Attributes:
        devices: Devices of each stage, by the stage's name. Stages that share a device take turns on it. A stage that
            is left out has one worker and no device.
        granularity: Items a stage's group takes at a time, over its workers; None: all items of a step.
        stages: The same for single stages.
    """

    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    granularity: int | None = None
    stages: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {"granularity": self.granularity, **self.stages}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise PlanError(f"{name} takes {size} items at a time; give at least 1, or None for all of them")

    @classmethod
    def temporal(cls, stages: Sequence[str], devices: Sequence[str], granularity: int | None = None) -> Self:
        """All stages on all devices, taking turns."""
        return cls(devices=dict.fromkeys(stages, tuple(devices)), granularity=granularity)

    @classmethod
    def spatial(cls, devices: Mapping[str, Sequence[str]], granularity: int | None = None) -> Self:
        """Every stage on devices of its own, pipelined.

        Raises:
            PlanError: Two stages share a device.
        """
        owners: dict[str, str] = {}
        for stage, names in devices.items():
            for name in names:
                if name in owners:
                    raise PlanError(f"{stage} and {owners[name]} share {name}; a spatial placement keeps them apart")
                owners[name] = stage
        return cls(devices={stage: tuple(names) for stage, names in devices.items()}, granularity=granularity)

    @classmethod
    def from_plan(cls, plan: Plan) -> Self:
        """Run the flow as the planner says."""
        return cls(
            devices={stage: tuple(f"device:{number}" for number in plan.numbers_of(stage)) for stage in plan.stages()},
            stages={stage: phase.items for phase in plan.phases for pool in phase.pools for stage in pool.stages},
        )

    def workers_of(self, stage: str) -> int:
        """Return how many workers a stage has where its group does not say: one a device."""
        return len(self.devices.get(stage, ())) or 1

    def shares(self, stage: str, workers: int) -> list[tuple[str, ...]]:
        """Return the devices of each of a stage's workers.

        Raises:
            PlanError: The devices cannot be divided evenly.
        """
        names = self.devices.get(stage, ())
        if not names:
            return [()] * workers
        if workers <= len(names):
            if len(names) % workers:
                raise PlanError(f"{stage} has {workers} workers on {len(names)} devices, which do not divide")
            each = len(names) // workers
            return [names[rank * each : (rank + 1) * each] for rank in range(workers)]
        return [(names[rank % len(names)],) for rank in range(workers)]

    def items_of(self, stage: str, workers: int, items: int) -> int:
        """Return how many items each of a stage's workers takes at a time, of ``items`` in a step."""
        size = self.stages.get(stage, self.granularity)
        return max(1, -(-(items if size is None else min(size, items)) // workers))
