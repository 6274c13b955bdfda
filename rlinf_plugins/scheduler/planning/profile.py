"""Profiles: samples of time and memory per component, in a versioned JSON with the hardware's fingerprint."""

import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ProfileError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow

T = TypeVar("T")

VERSION = 2
"""Version of the JSON form. Version 1 (one mean time per device count, no fingerprint details) is read and migrated."""

MAX_AGE_DAYS = 30.0

KEPT_SAMPLES = 64
"""Samples of one cell (device kind, device count, items) that a growing profile keeps."""

KEPT_LENGTHS = 8192
"""Lengths of a stage that a growing profile keeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One measured call of a component.

    Attributes:
        devices: Devices it ran on.
        items: Items it processed in the call.
        seconds: Wall time of the call.
        memory_gib: Peak memory of one device in GiB.
        device_kind: Kind of the devices.
    """

    devices: int
    items: int
    seconds: float
    memory_gib: float = 0.0
    device_kind: str = "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchSample:
    """One measured change of residents: seconds to bring the component in and to put it away."""

    devices: int
    onload_seconds: float
    offload_seconds: float
    device_kind: str = "gpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSample:
    """One measured weight transfer from ``source`` to ``target``; ``shared``: both live on the same devices."""

    source: str
    target: str
    seconds: float
    shared: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    """Everything measured of one component.

    Attributes:
        samples: Calls, warm-up already discarded.
        switches: Onload and offload times.
        lengths: Observed output lengths (tokens) or episode lengths (turns), one per item; unordered.
        slots: Items one replica works on at the same time; 0: no limit.
        slowdown: Factor on the time while the named component runs beside it on other devices.
        bytes_per_item: What one item sends to its consumers.
    """

    samples: tuple[Sample, ...] = ()
    switches: tuple[SwitchSample, ...] = ()
    lengths: tuple[float, ...] = ()
    slots: int = 0
    slowdown: dict[str, float] = field(default_factory=dict)
    bytes_per_item: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareKind:
    """What identifies one kind of device."""

    kind: str
    devices_per_node: int
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The hardware a profile holds for."""

    kinds: tuple[HardwareKind, ...]

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """Return the fingerprint of a cluster; its size is not part of it, its nodes are."""
        kinds = []
        for kind in cluster.kinds:
            node = cluster.node_of(kind)
            memory = node.memory_gib if math.isfinite(node.memory_gib) else None
            kinds.append(HardwareKind(kind=kind, devices_per_node=node.devices, memory_gib=memory))
        return cls(kinds=tuple(kinds))

    def difference(self, cluster: Cluster) -> str:
        """Say how ``cluster`` differs from the profiled hardware; empty: it does not."""
        mine = {entry.kind: entry for entry in self.kinds}
        for entry in Fingerprint.of(cluster).kinds:
            known = mine.get(entry.kind)
            if known is None:
                return f"it was measured on {', '.join(mine)}, the cluster has {entry.kind}"
            if known.devices_per_node < entry.devices_per_node or (
                known.devices_per_node > entry.devices_per_node and cluster.node_of(entry.kind).count > 1
            ):
                return (
                    f"it was measured with {known.devices_per_node} {entry.kind} devices a node, "
                    f"the cluster has {entry.devices_per_node}"
                )
            if (
                known.memory_gib
                and entry.memory_gib
                and not math.isclose(known.memory_gib, entry.memory_gib, rel_tol=0.05)
            ):
                return f"its {entry.kind} devices have {known.memory_gib} GiB, the cluster's {entry.memory_gib} GiB"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Samples of every component of a flow.

    Attributes:
        flow: Name of the flow that was profiled.
        fingerprint: The hardware it was measured on.
        created: When, in seconds since the epoch.
        stages: Measurements by component.
        syncs: Weight transfers.
        sources: Where numbers come from that were not measured here.
        version: Version of the form.
    """

    flow: str
    fingerprint: Fingerprint
    created: float
    stages: dict[str, StageProfile]
    syncs: tuple[SyncSample, ...] = ()
    sources: tuple[str, ...] = ()
    version: int = VERSION

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "profile") -> Self:
        """Build a profile from plain mappings, migrating older versions.

        Raises:
            ProfileError: The version is unknown or a number is impossible.
            ConfigError: An unknown key or a wrong type.
        """
        version = values.get("version")
        if version == 1:
            values = _from_version_1(values)
        elif version != VERSION:
            raise ProfileError(f"{where} has version {version!r}; this release reads versions 1 and {VERSION}")
        profile = from_mapping(cls, values, where)
        _check_numbers(profile, where)
        return profile

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file."""
        try:
            values = msgspec.json.decode(Path(path).read_bytes())
        except (OSError, msgspec.DecodeError) as error:
            raise ProfileError(f"cannot read the profile {path}: {error}") from error
        if not isinstance(values, dict):
            raise ProfileError(f"the profile {path} is not a JSON object")
        return cls.from_mapping(values, str(path))

    def to_json(self) -> bytes:
        """Return the JSON form, indented, keys in a fixed order."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def write(self, path: str | Path) -> None:
        """Write the JSON form; the file is replaced at once, never half written."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_bytes(self.to_json())
        partial.replace(target)

    def appended(
        self,
        measured: Mapping[str, StageProfile],
        *,
        syncs: Iterable[SyncSample] = (),
        created: float | None = None,
    ) -> Self:
        """Return a profile with the samples of a running job added.

        Newest settings win and samples accumulate, up to :data:`KEPT_SAMPLES` of a cell and :data:`KEPT_LENGTHS`: the
        oldest go first.
        """
        stages = dict(self.stages)
        for name, new in measured.items():
            old = stages.get(name, StageProfile())
            stages[name] = replace(
                old,
                samples=_newest(old.samples + new.samples, lambda s: (s.device_kind, s.devices, s.items)),
                switches=_newest(old.switches + new.switches, lambda s: (s.device_kind, s.devices)),
                lengths=(old.lengths + new.lengths)[-KEPT_LENGTHS:],
                slots=new.slots or old.slots,
                slowdown={**old.slowdown, **new.slowdown},
                bytes_per_item=new.bytes_per_item or old.bytes_per_item,
            )
        return replace(
            self,
            stages=stages,
            syncs=_newest((*self.syncs, *syncs), lambda s: (s.source, s.target, s.shared)),
            created=time.time() if created is None else created,
        )

    def scaled(self, factors: Mapping[str, float]) -> Self:
        """Return a profile whose components take ``factors[name]`` times as long (others unchanged)."""
        stages = {
            name: replace(
                stage,
                samples=tuple(replace(s, seconds=s.seconds * factors.get(name, 1.0)) for s in stage.samples),
            )
            for name, stage in self.stages.items()
        }
        return replace(self, stages=stages)

    def check_usable(self, flow: Flow, cluster: Cluster, *, now: float, max_age_days: float = MAX_AGE_DAYS) -> None:
        """Refuse a profile that does not hold for this flow on this cluster.

        Raises:
            ProfileError: It is empty, stale, from other hardware or another flow, or lacks a component.
        """
        if not any(stage.samples for stage in self.stages.values()):
            raise ProfileError(f"the profile of {self.flow!r} is empty; run `rlinf-plugins profile` first")
        self.check_belongs(flow, cluster, now=now, max_age_days=max_age_days)
        missing = [s.name for s in flow.stages if not self.stages.get(s.name, StageProfile()).samples]
        if missing:
            raise ProfileError(
                f"no samples of {', '.join(missing)}; the profile has {', '.join(self.stages) or 'nothing'}"
            )

    def check_belongs(self, flow: Flow, cluster: Cluster, *, now: float, max_age_days: float = MAX_AGE_DAYS) -> None:
        """Refuse a profile to which samples of this flow on this cluster cannot be added.

        Raises:
            ProfileError: It is stale, from other hardware or another flow.
        """
        if self.flow != flow.name:
            raise ProfileError(f"the profile is of flow {self.flow!r}, not of {flow.name!r}; profile this flow")
        difference = self.fingerprint.difference(cluster)
        if difference:
            raise ProfileError(f"foreign profile: {difference}; profile on this hardware")
        age = (now - self.created) / 86400
        if age > max_age_days:
            raise ProfileError(f"stale profile: it is {age:.0f} days old (limit {max_age_days:.0f}); profile again")


def _newest(entries: tuple[T, ...], cell: Callable[[T], Hashable]) -> tuple[T, ...]:
    """Return the newest :data:`KEPT_SAMPLES` entries of each cell, in order."""
    left = Counter(cell(entry) for entry in entries)
    kept = []
    for entry in entries:
        left[cell(entry)] -= 1
        if left[cell(entry)] < KEPT_SAMPLES:
            kept.append(entry)
    return tuple(kept)


def _check_numbers(profile: Profile, where: str) -> None:
    for name, stage in profile.stages.items():
        for s in stage.samples:
            if s.devices < 1 or s.items < 1 or not 0 < s.seconds < math.inf or not 0 <= s.memory_gib < math.inf:
                raise ProfileError(f"{where}: impossible sample of {name!r}: {s}")
        for w in stage.switches:
            if w.devices < 1 or not 0 <= w.onload_seconds + w.offload_seconds < math.inf:
                raise ProfileError(f"{where}: impossible switch sample of {name!r}: {w}")
        if any(not 0 < length < math.inf for length in stage.lengths):
            raise ProfileError(f"{where}: lengths of {name!r} must be positive and finite")
        if any(not 1 <= factor < math.inf for factor in stage.slowdown.values()):
            raise ProfileError(f"{where}: slowdown of {name!r} must be at least 1, got {stage.slowdown}")
        if stage.slots < 0 or not 0 <= stage.bytes_per_item < math.inf:
            raise ProfileError(f"{where}: slots and bytes_per_item of {name!r} must not be negative")
    for sync in profile.syncs:
        if not 0 <= sync.seconds < math.inf:
            raise ProfileError(f"{where}: impossible weight-sync sample: {sync}")


def _from_version_1(values: Mapping[str, Any]) -> dict[str, Any]:
    """Version 1 had one mean time per stage and device count: ``{"seconds": {stage: {devices: seconds}}}``."""
    try:
        kind = str(values.get("device_kind", "gpu"))
        stages = {
            name: {
                "samples": [
                    {"devices": int(n), "items": int(values["items"]), "seconds": float(s), "device_kind": kind}
                    for n, s in times.items()
                ]
            }
            for name, times in values["seconds"].items()
        }
        return {
            "version": VERSION,
            "flow": values["flow"],
            "created": values["created"],
            "fingerprint": {"kinds": [{"kind": kind, "devices_per_node": int(values["devices_per_node"])}]},
            "stages": stages,
        }
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ProfileError(f"a version 1 profile is incomplete: {error!r}") from error
