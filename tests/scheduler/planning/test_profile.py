from dataclasses import replace

import msgspec
import pytest

from rlinf_plugins.core.errors import ConfigError, ProfileError
from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.cluster import Cluster, Node
from rlinf_plugins.scheduler.flow import Flow, Stage
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, Sample, StageProfile
from rlinf_plugins.scheduler.planning.profiler import Profiler, ProfilerConfig, load_factories, samples_from_spans
from rlinf_plugins.testing.flows import random_case

CLUSTER = Cluster.uniform(8, memory_gib=80.0)
FLOW = Flow(name="f", items=8, stages=(Stage(name="a"), Stage(name="b")))
SAMPLE = Sample(devices=1, items=8, seconds=1.0)


def profile(**stages):
    measured = {name: StageProfile(samples=samples) for name, samples in stages.items()}
    return Profile(flow="f", fingerprint=Fingerprint.of(CLUSTER), created=0.0, stages=measured)


BOTH = profile(a=(SAMPLE,), b=(SAMPLE,))


def test_json_round_trip(tmp_path, seed):
    for number in range(20):
        one = random_case(seed + number).profile
        one.write(tmp_path / "p.json")
        assert Profile.read(tmp_path / "p.json") == one


def test_version_1_is_migrated():
    old = {
        "version": 1,
        "flow": "f",
        "items": 8,
        "created": 5.0,
        "devices_per_node": 8,
        "seconds": {"a": {"1": 2.0, "4": 1.0}},
    }
    migrated = Profile.from_mapping(old)
    assert migrated.version == 2
    assert migrated.stages["a"].samples[1] == Sample(devices=4, items=8, seconds=1.0)
    with pytest.raises(ProfileError, match="incomplete"):
        Profile.from_mapping({"version": 1})


def test_unknown_versions_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ProfileError, match="version 99"):
        Profile.from_mapping({"version": 99})
    (tmp_path / "x").write_text("{")
    with pytest.raises(ProfileError, match="cannot read"):
        Profile.read(tmp_path / "x")
    (tmp_path / "x").write_text("[]")
    with pytest.raises(ProfileError, match="not a JSON object"):
        Profile.read(tmp_path / "x")
    values = msgspec.json.decode(BOTH.to_json())
    values["stages"]["a"]["samples"][0]["second"] = 3
    with pytest.raises(ConfigError, match="second"):
        Profile.from_mapping(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": 0.0}, "impossible sample of 'a'"),
        ({"seconds": float("nan")}, "impossible sample"),
        ({"devices": 0}, "impossible sample"),
        ({"memory_gib": -1.0}, "impossible sample"),
    ],
)
def test_impossible_numbers_are_named(change, words):
    values = msgspec.to_builtins(profile(a=(replace(SAMPLE, **change),)))
    with pytest.raises(ProfileError, match=words):
        Profile.from_mapping(values)


def test_usable_profile_passes():
    BOTH.check_usable(FLOW, CLUSTER, now=86400.0)
    BOTH.check_usable(FLOW, Cluster.uniform(64, memory_gib=80.0), now=0.0)


@pytest.mark.parametrize(
    ("broken", "flow", "cluster", "now", "words"),
    [
        (profile(a=(), b=()), FLOW, CLUSTER, 0.0, "is empty"),
        (BOTH, replace(FLOW, name="g"), CLUSTER, 0.0, "flow 'f', not of 'g'"),
        (BOTH, FLOW, CLUSTER, 86400.0 * 31, "stale profile: it is 31 days"),
        (profile(a=(SAMPLE,)), FLOW, CLUSTER, 0.0, "no samples of b"),
        (BOTH, FLOW, Cluster.uniform(8, per_node=4, memory_gib=80.0), 0.0, "8 gpu devices a node, the cluster has 4"),
        (BOTH, FLOW, Cluster.uniform(8, memory_gib=40.0), 0.0, r"80\.0 GiB, the cluster's 40\.0"),
        (BOTH, FLOW, Cluster(nodes=(Node(name="n", kind="H100", devices=8),)), 0.0, "cluster has H100"),
    ],
)
def test_unusable_profiles_are_refused(broken, flow, cluster, now, words):
    with pytest.raises(ProfileError, match=words):
        broken.check_usable(flow, cluster, now=now)


def test_running_jobs_append():
    spans = [
        Span(name="call", actor="a/0", start=0.0, end=2.0, attributes={"stage": "a", "items": 8, "devices": 2}),
        Span(
            name="call",
            actor="a/0",
            start=2.0,
            end=3.0,
            attributes={"stage": "a", "items": 8, "devices": 2, "error": "X"},
        ),
        Span(name="onload", actor="a/0", start=0.0, end=2.0),
    ]
    grown = BOTH.appended(samples_from_spans(spans), created=7.0)
    assert grown.stages["a"].samples == (SAMPLE, Sample(devices=2, items=8, seconds=2.0))
    assert grown.created == 7.0


class FakeProbe:
    """Advances a clock by a known time per call; the first call is slow."""

    def __init__(self, clock, devices):
        self.clock, self.devices, self.calls, self.closed = clock, devices, 0, False

    def run(self, items):
        self.calls += 1
        self.clock.now += 10.0 if self.calls == 1 else items / self.devices

    def onload(self):
        self.clock.now += 0.5

    def offload(self):
        self.clock.now += 0.25

    def memory_gib(self):
        return 3.0

    def close(self):
        self.closed = True


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def test_profiler_discards_warmup_and_skips_sizes_a_stage_cannot_use():
    clock = FakeClock()
    made = []

    def factory(devices):
        made.append(FakeProbe(clock, devices))
        return made[-1]

    flow = Flow(name="f", items=8, stages=(Stage(name="a", replica=2),), granularities=(4,))
    config = ProfilerConfig(probes={}, devices=(1, 2, 4), warmup=1, repeats=2)
    measured = Profiler(flow, CLUSTER, {"a": factory}, config, clock).run()
    times = {(s.devices, s.items): s.seconds for s in measured.stages["a"].samples}
    assert times == {(2, 4): 2.0, (2, 8): 4.0, (4, 4): 1.0, (4, 8): 2.0}
    assert measured.stages["a"].switches[0].onload_seconds == 0.5
    assert measured.stages["a"].samples[0].memory_gib == 3.0
    assert all(probe.closed for probe in made)
    measured.check_usable(flow, CLUSTER, now=measured.created)


def test_profiler_says_what_is_missing():
    config = ProfilerConfig(probes={}, devices=(1,))
    with pytest.raises(ProfileError, match="no probe for b"):
        Profiler(FLOW, CLUSTER, {"a": FakeProbe}, config)
    flow = Flow(name="f", items=8, stages=(Stage(name="a", replica=4),))
    with pytest.raises(ProfileError, match=r"none of \[1\] devices; it may use \[4, 8\]"):
        Profiler(flow, CLUSTER, {"a": lambda n: FakeProbe(FakeClock(), n)}, config).run()
    with pytest.raises(ProfileError, match="cannot import 'nowhere:x'"):
        load_factories({"a": "nowhere:x"})


def test_slowdown_side_by_side_is_at_least_one():
    clock = FakeClock()
    config = ProfilerConfig(probes={}, devices=(1,), beside=(("a", "b"),), warmup=0, repeats=1)
    factories = {"a": lambda n: FakeProbe(clock, n), "b": lambda n: FakeProbe(FakeClock(), n)}
    flow = Flow(name="f", items=8, stages=FLOW.stages, granularities=(8,))
    assert Profiler(flow, CLUSTER, factories, config, clock).run().stages["a"].slowdown == {"b": 1.0}
