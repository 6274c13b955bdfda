"""The profiler: runs each component at several device counts and granularities and keeps samples, not means.

What a component is, the caller says: a *probe* stands for it on a given number of devices. The profiler discards the
warm-up, measures calls, switches and how much components slow each other down, and never needs to know a framework.
"""

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import ProfileError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.cost import allowed_counts
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile, SwitchSample


@runtime_checkable
class Probe(Protocol):
    """A component on a fixed number of devices."""

    def run(self, items: int) -> None:
        """Process ``items`` items; returns when the devices are done."""
        ...

    def close(self) -> None:
        """Give the devices back."""
        ...


ProbeFactory = Callable[[int], Probe]
"""Makes the component on a number of devices. A probe may also offer ``memory_gib() -> float`` (peak of one device
since the last call), ``onload()``, ``offload()``, and ``lengths() -> list[float]`` (of the items of the last call)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerConfig:
    """What to measure.

    Attributes:
        probes: Per stage, ``"package.module:factory"`` of its :data:`ProbeFactory`.
        devices: Device counts to try; those a stage cannot use are skipped.
        items: Granularities to try; empty: the flow's.
        warmup: Calls to discard at every point.
        repeats: Calls to keep at every point.
        beside: Pairs of stages to run side by side, to measure how much the first slows down.
    """

    probes: dict[str, str]
    devices: tuple[int, ...] = (1, 2, 4, 8)
    items: tuple[int, ...] = ()
    warmup: int = 1
    repeats: int = 3
    beside: tuple[tuple[str, str], ...] = field(default=())

    def validate(self, where: str) -> None:
        """Refuse an empty measurement."""
        if self.repeats < 1 or self.warmup < 0 or not self.devices or min(self.devices) < 1:
            raise ProfileError(f"{where}: repeats and devices must be positive, got {self.repeats} and {self.devices}")


class Profiler:
    """Measures a flow's components.

    Args:
        flow: The flow.
        cluster: The hardware at hand.
        factories: A probe factory per stage.
        config: What to measure.
        clock: Source of time.
    """

    def __init__(
        self,
        flow: Flow,
        cluster: Cluster,
        factories: Mapping[str, ProbeFactory],
        config: ProfilerConfig,
        clock: Clock = monotonic,
    ) -> None:
        missing = [stage.name for stage in flow.stages if stage.name not in factories]
        if missing:
            raise ProfileError(
                f"no probe for {', '.join(missing)}; probes are given for {', '.join(factories) or 'none'}"
            )
        self._flow, self._cluster, self._factories = flow, cluster, factories
        self._config, self._clock = config, clock

    def run(self, report: Callable[[str], None] = lambda line: None) -> Profile:
        """Measure every stage and return the profile.

        Raises:
            ProfileError: A stage can use none of the device counts.
        """
        stages = {stage.name: self._measure(stage.name, report) for stage in self._flow.stages}
        for first, second in self._config.beside:
            factor = self._beside(first, second)
            stages[first] = replace(stages[first], slowdown={**stages[first].slowdown, second: factor})
            report(f"{first} beside {second}: {factor:.2f} times as long")
        return Profile(
            flow=self._flow.name, fingerprint=Fingerprint.of(self._cluster), created=time.time(), stages=stages
        )

    def _counts(self, name: str) -> tuple[str, list[int]]:
        stage = self._flow.stage(name)
        kind = next((k for k in self._cluster.kinds if not stage.kinds or k in stage.kinds), self._cluster.kinds[0])
        allowed = allowed_counts(stage, self._cluster.count(kind), self._cluster.node_of(kind).devices)
        counts = [n for n in self._config.devices if n in allowed]
        if not counts:
            raise ProfileError(
                f"{name} can use none of {list(self._config.devices)} devices; it may use {allowed.tolist()} {kind}"
            )
        return kind, counts

    def _measure(self, name: str, report: Callable[[str], None]) -> StageProfile:
        kind, counts = self._counts(name)
        samples: list[Sample] = []
        switches: list[SwitchSample] = []
        lengths: list[float] = []
        for devices in counts:
            probe = self._factories[name](devices)
            try:
                for items in self._config.items or self._flow.batch_sizes:
                    samples += self._calls(probe, kind, devices, items, lengths)
                    report(f"{name} on {devices} devices, {items} items: {samples[-1].seconds:.4g} s")
                switches += self._switches(probe, kind, devices)
            finally:
                probe.close()
        return StageProfile(samples=tuple(samples), switches=tuple(switches), lengths=tuple(lengths))

    def _calls(self, probe: Probe, kind: str, devices: int, items: int, lengths: list[float]) -> list[Sample]:
        found = []
        for call in range(self._config.warmup + self._config.repeats):
            start = self._clock()
            probe.run(items)
            seconds = self._clock() - start
            memory = float(getattr(probe, "memory_gib", lambda: 0.0)())
            if call >= self._config.warmup:
                found.append(Sample(devices=devices, items=items, seconds=seconds, memory_gib=memory, device_kind=kind))
                lengths.extend(getattr(probe, "lengths", list)())
        return found

    def _switches(self, probe: Probe, kind: str, devices: int) -> list[SwitchSample]:
        if not (hasattr(probe, "onload") and hasattr(probe, "offload")):
            return []
        found = []
        for _ in range(self._config.repeats):
            start = self._clock()
            probe.offload()
            away = self._clock()
            probe.onload()
            back = self._clock()
            found.append(
                SwitchSample(
                    devices=devices, onload_seconds=back - away, offload_seconds=away - start, device_kind=kind
                )
            )
        return found

    def _beside(self, first: str, second: str) -> float:
        """Return how many times as long ``first`` takes while ``second`` runs without pause."""
        measured = self._factories[first](self._counts(first)[1][0])
        other = self._factories[second](self._counts(second)[1][0])
        items = min(self._config.items or self._flow.batch_sizes)
        stop = threading.Event()

        def keep_running() -> None:
            while not stop.is_set():
                other.run(items)

        try:
            alone = self._mean_call(measured, items)
            worker = threading.Thread(target=keep_running, name=f"profile-{second}", daemon=True)
            worker.start()
            together = self._mean_call(measured, items)
            stop.set()
            worker.join()
        finally:
            stop.set()
            measured.close()
            other.close()
        return max(together / alone, 1.0)

    def _mean_call(self, probe: Probe, items: int) -> float:
        kept = self._calls(probe, "", 1, items, [])
        return sum(sample.seconds for sample in kept) / len(kept)


def load_factories(probes: Mapping[str, str]) -> dict[str, ProbeFactory]:
    """Import ``"package.module:factory"`` names.

    Raises:
        ProfileError: A name is not of that form, or does not lead to a callable.
    """
    found: dict[str, ProbeFactory] = {}
    for stage, path in probes.items():
        module, _, attribute = path.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ProfileError(f"probe of {stage!r}: cannot import {path!r}: {error}") from error
        if not callable(factory):
            raise ProfileError(f"probe of {stage!r}: {path!r} is not callable")
        found[stage] = factory
    return found


def samples_from_spans(spans: Iterable[Span], *, device_kind: str = "gpu") -> dict[str, StageProfile]:
    """Return what a running job measured, to append to its profile.

    Args:
        spans: Spans; those with the attributes ``stage``, ``items`` and ``devices`` are stage calls. ``memory_gib`` and
            ``lengths`` are taken where present, and so is ``seconds``, where the stage's own time is not the span's;
            failed calls are left out.
        device_kind: Kind of the devices.
    """
    found: dict[str, StageProfile] = {}
    for span in spans:
        values = span.attributes
        seconds = float(values.get("seconds", span.seconds))
        if not {"stage", "items", "devices"} <= values.keys() or "error" in values or seconds <= 0:
            continue
        stage = found.get(values["stage"], StageProfile())
        sample = Sample(
            devices=int(values["devices"]),
            items=int(values["items"]),
            seconds=seconds,
            memory_gib=float(values.get("memory_gib", 0.0)),
            device_kind=str(values.get("device_kind", device_kind)),
        )
        lengths = tuple(float(length) for length in values.get("lengths", ()))
        found[values["stage"]] = replace(stage, samples=(*stage.samples, sample), lengths=stage.lengths + lengths)
    return found
