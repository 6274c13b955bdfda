"""Profiles that jobs add to, and what profiling makes of them."""

import multiprocessing
import time
from dataclasses import replace

import pytest

from rlinf_plugins.core.errors import ProfileError
from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.planning.capture import flow_from_roles
from rlinf_plugins.scheduler.planning.profile import (
    KEPT_SAMPLES,
    Fingerprint,
    Profile,
    Sample,
    StageProfile,
    SyncSample,
)
from rlinf_verl.profiles import JobProfile
from rlinf_verl.profiling import counts, slowdowns

FLOW = flow_from_roles(name="job", items=8)
CLUSTER = Cluster.uniform(2, kind="1-core", memory_gib=8.0)


def measured(*seconds, items=8, stage="actor"):
    return {
        stage: StageProfile(
            samples=tuple(Sample(devices=1, items=items, seconds=s, device_kind="1-core") for s in seconds)
        )
    }


def test_jobs_add_to_one_file(tmp_path):
    path = tmp_path / "new" / "p.json"
    first = JobProfile(path, FLOW, CLUSTER)
    first.add(measured(1.0), [SyncSample(source="actor", target="rollout", seconds=0.5, shared=True)])
    assert not path.exists()
    first.write()
    first.write()
    second = JobProfile(path, FLOW, CLUSTER)
    second.add(measured(2.0))
    second.write()
    found = Profile.read(path)
    assert [sample.seconds for sample in found.stages["actor"].samples] == [1.0, 2.0]
    assert [sync.seconds for sync in found.syncs] == [0.5]
    assert time.time() - found.created < 60


def _add(path, number):
    job = JobProfile(path, FLOW, CLUSTER)
    job.add(measured(float(number)))
    job.write()


def test_jobs_that_write_at_once_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add, args=(tmp_path / "p.json", n)) for n in range(1, 9)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    samples = Profile.read(tmp_path / "p.json").stages["actor"].samples
    assert sorted(sample.seconds for sample in samples) == list(range(1, 9))


@pytest.mark.parametrize(
    ("flow", "cluster", "age_days", "words"),
    [
        (replace(FLOW, name="other"), CLUSTER, 0, "of flow 'job', not of 'other'"),
        (FLOW, Cluster.uniform(2, kind="2-core", memory_gib=8.0), 0, "cluster has 2-core"),
        (FLOW, CLUSTER, 31, "stale"),
    ],
)
def test_foreign_and_stale_profiles_are_refused_when_opened(tmp_path, flow, cluster, age_days, words):
    created = time.time() - age_days * 86400
    profile = Profile(flow="job", fingerprint=Fingerprint.of(CLUSTER), created=created, stages=measured(1.0))
    profile.write(tmp_path / "p.json")
    with pytest.raises(ProfileError, match=words):
        JobProfile(tmp_path / "p.json", flow, cluster)


def test_a_growing_profile_keeps_the_newest_samples_of_each_cell():
    profile = Profile(flow="job", fingerprint=Fingerprint.of(CLUSTER), created=0.0, stages=measured(0.5, items=4))
    for number in range(1, KEPT_SAMPLES + 11):
        profile = profile.appended(measured(float(number)))
    samples = profile.stages["actor"].samples
    assert len(samples) == KEPT_SAMPLES + 1
    assert samples[0].items == 4
    assert samples[1].seconds == 11.0
    assert samples[-1].seconds == KEPT_SAMPLES + 10


def test_slowdown_compares_calls_apart_with_calls_alone():
    alone = Profile(
        flow="job",
        fingerprint=Fingerprint.of(CLUSTER),
        created=0.0,
        stages={
            **measured(2.0, stage="rollout"),
            "actor": StageProfile(samples=measured(1.0, items=4)["actor"].samples + measured(2.0)["actor"].samples),
            **measured(1.0, stage="old_log_prob"),
        },
    )
    apart = replace(
        alone,
        stages={
            **measured(3.0, stage="rollout"),
            **measured(1.8, items=6, stage="actor"),  # alone, 6 items take 1.5 s
            **measured(0.5, stage="old_log_prob"),
        },
    )
    found = {stage: profile.slowdown for stage, profile in slowdowns(alone, apart).items()}
    assert found["rollout"] == {"actor": 1.5}
    assert found["actor"] == {"rollout": pytest.approx(1.2)}
    assert found["old_log_prob"] == {"rollout": 1.0}, "faster beside others is noise"


def test_device_counts_to_try():
    assert counts(1) == [1]
    assert counts(6) == [1, 2, 4, 6]
    assert counts(8) == [1, 2, 4, 8]
