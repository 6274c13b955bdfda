"""What a step takes under each mode that the trainer can run, by the planner and its cost model."""

from dataclasses import dataclass, field
from typing import Literal

from rlinf_plugins.core.errors import InfeasiblePlanError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.cost import CostModel
from rlinf_plugins.scheduler.planning.plan import Plan
from rlinf_plugins.scheduler.planning.planner import plan
from rlinf_plugins.scheduler.planning.profile import Profile
from rlinf_verl.job_flow import ROLLOUT
from rlinf_verl.planned import requests

LENT = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Shares of a step's groups until which trainer devices may be lent to generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A way to run the job.

    Attributes:
        mode: As ``trainer.v1.m2flow.mode``.
        trainer: Devices of the trainer.
        rollout: Devices of rollout alone; 0 under ``temporal``.
        granularity: Prompts that training takes at a time; 0: all.
        lend_until: As ``trainer.v1.m2flow.lend_until``.
        seconds: Predicted seconds of a step.
        stages: Predicted seconds by stage, ``rollout`` until its last answer.
    """

    mode: Literal["temporal", "spatial", "hybrid"]
    trainer: int
    rollout: int = 0
    granularity: int = 0
    lend_until: float = 0.0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.mode == "temporal":
            where = f"{self.trainer} device(s) in turn"
        else:
            where = f"rollout {self.rollout} | training {self.trainer}, {self.granularity} prompts at a time"
        lent = f", lent until {self.lend_until:.0%} of the groups" if self.mode == "hybrid" else ""
        return f"{self.mode} ({where}{lent}): {self.seconds:.3g} s"


class Forecast:
    """Choices of a job and their predicted seconds.

    Args:
        flow: The job's flow.
        cluster: Its devices, all of one kind.
        profile: What its stages took.
        mini_batch: Prompts of a mini-batch; chunks divide it.
        trainer_devices: Devices the trainer must have; None: any number.
    """

    def __init__(
        self, flow: Flow, cluster: Cluster, profile: Profile, *, mini_batch: int, trainer_devices: int | None = None
    ) -> None:
        self._flow, self._cluster, self._profile = flow, cluster, profile
        self._mini_batch, self._trainer_devices = mini_batch, trainer_devices
        self._kind = cluster.kinds[0]
        self._model = CostModel(flow, cluster, profile)
        self._trained = [stage.name for stage in flow.stages if stage.name != ROLLOUT]

    def planned(self) -> list[Choice]:
        """Return the planner's best plan of each of :func:`rlinf_verl.planned.requests`."""
        found = []
        for request in requests(
            self._flow,
            self._cluster,
            self._profile,
            mini_batch=self._mini_batch,
            actor_devices=self._trainer_devices,
        ):
            try:
                found.append(self.of_plan(plan(request)))
            except InfeasiblePlanError:
                continue
        return found

    def of_plan(self, plan: Plan) -> Choice:
        """Return a temporal or spatial plan as a choice, with the seconds of its stages."""
        trainer, items = len(plan.numbers_of("actor")), min(phase.items for phase in plan.phases)
        if plan.mode == "temporal":
            stages = self._stages(trainer, trainer, self._flow.items)
            return Choice(mode="temporal", trainer=trainer, seconds=plan.seconds, stages=stages)
        rollout = len(plan.numbers_of(ROLLOUT))
        return Choice(
            mode="spatial",
            trainer=trainer,
            rollout=rollout,
            granularity=min(items, self._mini_batch),
            seconds=plan.seconds,
            stages=self._stages(rollout, trainer, items),
        )

    def hybrid(self, rollout: int, trainer: int, granularity: int) -> Choice:
        """Return the best step in which the trainer's devices generate first.

        All devices generate until a share of the groups is complete. The rest of the answers then takes as long as on
        the rollout's devices alone, and training has a pile to work off meanwhile. The planner's family has no such
        plan, so this is worked out here from the same costs.
        """
        everywhere, items = rollout + trainer, self._flow.items
        chunk = sum(self._first(name, trainer, granularity) for name in self._trained)
        best: tuple[float, float, float] | None = None
        for share in LENT:
            lent = max(1, round(share * items))
            until = self._first(ROLLOUT, everywhere, lent)
            tail = self._first(ROLLOUT, rollout, items) - self._first(ROLLOUT, rollout, lent)
            generated = until + tail
            seconds = max(until + items / granularity * chunk, generated + chunk)
            if best is None or seconds < best[0]:
                best = (seconds, share, generated)
        assert best is not None
        seconds, share, generated = best
        return Choice(
            mode="hybrid",
            trainer=trainer,
            rollout=rollout,
            granularity=granularity,
            lend_until=share,
            seconds=seconds + self._switch(trainer) + self._sync(),
            stages={**self._stages(rollout, trainer, granularity), ROLLOUT: generated},
        )

    def _stages(self, rollout: int, trainer: int, granularity: int) -> dict[str, float]:
        items = self._flow.items
        trained = {name: items / granularity * self._first(name, trainer, granularity) for name in self._trained}
        return {ROLLOUT: self._first(ROLLOUT, rollout, items), **trained}

    def _first(self, name: str, devices: int, items: int) -> float:
        """Seconds until a stage has finished its first ``items`` items."""
        table = self._model.table(name, self._kind, items, self._flow.items)
        return float(table.first[int(table.rows(devices))])  # type: ignore[arg-type]

    def _switch(self, trainer: int) -> float:
        table = self._model.table(ROLLOUT, self._kind, self._flow.items, self._flow.items)
        return float(table.switch[max(int(table.rows(trainer)), 0)])  # type: ignore[arg-type]

    def _sync(self) -> float:
        edges = [edge for edge in self._flow.edges if edge.kind == "weights"]
        return sum(self._model.sync_seconds(edge, shared=False) for edge in edges)
