"""The plan: a value with a JSON form and a readable table."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import PlanError

VERSION = 1

Mode = Literal["temporal", "spatial", "hybrid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """Devices that some stages share in one phase.

    Attributes:
        stages: The stages; they take turns on each micro-batch.
        kind: Kind of the devices.
        devices: Number of devices.
        allotted: Devices each stage uses of them; the rest stays idle.
        resident: All of its stages stay loaded together; otherwise each micro-batch swaps them.
        numbers: Global device numbers, filled in by the layout.
    """

    stages: tuple[str, ...]
    kind: str
    devices: int
    allotted: dict[str, int]
    resident: bool = True
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlan:
    """A stretch of the step between two barriers.

    Attributes:
        pools: Disjoint pools, pipelined with each other.
        items: Micro-batch size in items.
        resident: The phase's stages stay loaded during the other phases; otherwise they are brought in and put away.
        overlap: Steps overlap, at a staleness of one step.
        streams: Interleaved streams of each cycle, by its name.
        seconds: Predicted duration, switching included.
    """

    pools: tuple[PoolPlan, ...]
    items: int
    resident: bool = False
    overlap: bool = False
    streams: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def devices(self) -> int:
        """Devices of all pools together."""
        return sum(pool.devices for pool in self.pools)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A plan that was not chosen, and why."""

    summary: str
    seconds: float
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where and when every stage of a flow runs.

    Attributes:
        flow: Name of the flow.
        items: Items of a step.
        devices: Devices of the cluster, by kind.
        phases: Phases in order.
        seconds: Predicted time of a step.
        band: 5 % and 95 % bounds of the prediction from the profile's scatter.
        memory: Peak share of a device's memory, by kind.
        gap: Proven relative distance to the optimum; 0 for an exact plan.
        reasons: Why this plan, in words.
        warnings: What the prediction rests on that was not measured.
        alternatives: The next best plans.
        version: Version of the JSON form.
    """

    flow: str
    items: int
    devices: dict[str, int]
    phases: tuple[PhasePlan, ...]
    seconds: float
    band: tuple[float, float] | None = None
    memory: dict[str, float] = field(default_factory=dict)
    gap: float = 0.0
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    version: int = VERSION

    @property
    def mode(self) -> Mode:
        """``temporal``: one pool at a time; ``spatial``: one phase of several pools; ``hybrid``: everything else.

        A cycle whose stages share one pool counts as one pool.
        """
        if all(len(phase.pools) == 1 for phase in self.phases):
            return "temporal"
        return "spatial" if len(self.phases) == 1 else "hybrid"

    @property
    def staleness(self) -> int:
        """Steps by which training data may lag behind the weights."""
        return int(any(phase.overlap for phase in self.phases))

    @property
    def device_seconds(self) -> float:
        """Devices held for a step, times its seconds."""
        held = sum(max(_of_kind(phase, kind) for phase in self.phases) for kind in self.devices)
        return held * self.seconds

    @property
    def signature(self) -> tuple[Any, ...]:
        """What makes two plans the same placement: phases, pools and counts, not times."""
        return tuple(
            (phase.items, phase.overlap, tuple(sorted((p.stages, p.kind, p.devices) for p in phase.pools)))
            for phase in self.phases
        )

    @property
    def structure(self) -> tuple[Any, ...]:
        """What makes two plans the same mode: which stages share pools and phases, without counts and granularity."""
        return tuple(tuple(sorted((p.stages, p.kind) for p in phase.pools)) for phase in self.phases)

    def numbers_of(self, stage: str) -> tuple[int, ...]:
        """Return the global device numbers a stage uses."""
        for phase in self.phases:
            for pool in phase.pools:
                if stage in pool.stages:
                    return pool.numbers[: pool.allotted[stage]]
        raise PlanError(f"the plan of {self.flow!r} has no stage {stage!r}")

    def stages(self) -> tuple[str, ...]:
        """Return the names of all stages in the order of phases and pools."""
        return tuple(name for phase in self.phases for pool in phase.pools for name in pool.stages)

    def summary(self) -> str:
        """Return one line: ``rollout 64 | actor 64 (m=8)  ->  ...``; ``|`` pipelines, ``+`` shares, ``->`` follows."""
        return "  ->  ".join(_phase_summary(phase) for phase in self.phases)

    def ranges(self) -> dict[str, str]:
        """Return every stage's devices as ``"0-7"`` or ``"0-3,8-11"``."""
        return {name: _ranges(self.numbers_of(name)) for name in self.stages()}

    def to_json(self) -> bytes:
        """Return the JSON form."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes | str, where: str = "plan") -> Self:
        """Read the JSON form.

        Raises:
            PlanError: Not JSON, or a version this release does not read.
            ConfigError: An unknown key or a wrong type.
        """
        try:
            values = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise PlanError(f"{where} is not JSON: {error}") from error
        if not isinstance(values, Mapping) or values.get("version") != VERSION:
            version = values.get("version") if isinstance(values, Mapping) else None
            raise PlanError(f"{where} has version {version!r}; this release reads version {VERSION}")
        return from_mapping(cls, values, where)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file."""
        try:
            return cls.from_json(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's rows: phase, stage, devices, numbers, shares with, micro-batch, remark."""
        found: list[tuple[str, ...]] = []
        for index, phase in enumerate(self.phases):
            for pool in phase.pools:
                for name in pool.stages:
                    others = [other for other in pool.stages if other != name]
                    loops = [f"{n} streams" for loop, n in phase.streams.items() if name in loop.split("<->") and n > 1]
                    remarks = [*loops, *(["swaps each micro-batch"] if not pool.resident else [])]
                    remarks += (
                        ["stays loaded" if phase.resident else "switched in and out"] if len(self.phases) > 1 else []
                    )
                    remarks += ["one step ahead"] if phase.overlap else []
                    found.append(
                        (
                            str(index + 1),
                            name,
                            f"{pool.allotted[name]} {pool.kind}",
                            _ranges(pool.numbers[: pool.allotted[name]]),
                            ", ".join(others) or "-",
                            f"{phase.items} of {self.items}",
                            ", ".join(remarks) or "-",
                        )
                    )
        return found


def laid_out(plan: Plan, numbers: Mapping[str, tuple[int, ...]], replicas: Mapping[str, int]) -> Plan:
    """Return the plan with global device numbers: pools side by side, those with the largest replicas first.

    Args:
        plan: A plan without numbers.
        numbers: Global device numbers of each kind.
        replicas: Devices one replica of each stage needs; with sizes that divide each other, none straddles.
    """
    phases = []
    for phase in plan.phases:
        offsets = dict.fromkeys(numbers, 0)
        order = sorted(range(len(phase.pools)), key=lambda i: (-max(replicas[s] for s in phase.pools[i].stages), i))
        pools = list(phase.pools)
        for i in order:
            pool = pools[i]
            start = offsets[pool.kind]
            offsets[pool.kind] = start + pool.devices
            pools[i] = replace(pool, numbers=numbers[pool.kind][start : start + pool.devices])
        phases.append(replace(phase, pools=tuple(pools)))
    return replace(plan, phases=tuple(phases))


def _of_kind(phase: PhasePlan, kind: str) -> int:
    return sum(pool.devices for pool in phase.pools if pool.kind == kind)


def _phase_summary(phase: PhasePlan) -> str:
    pools = " | ".join(f"{'+'.join(pool.stages)} {pool.devices}" for pool in phase.pools)
    streams = "".join(f", {n} streams" for n in phase.streams.values() if n > 1)
    return f"{pools} (m={phase.items}{streams}{', overlap' if phase.overlap else ''})"


def _ranges(numbers: tuple[int, ...]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
