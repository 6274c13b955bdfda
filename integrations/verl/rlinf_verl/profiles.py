"""The profile that a job adds to: one JSON file, opened before anything expensive and shared by jobs."""

import fcntl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from rlinf_plugins.scheduler.cluster import Cluster
from rlinf_plugins.scheduler.flow import Flow
from rlinf_plugins.scheduler.planning.profile import Fingerprint, Profile, StageProfile, SyncSample
from rlinf_verl.config import M2FlowConfig
from rlinf_verl.job_flow import job_cluster, job_flow


class JobProfile:
    """A profile on disk.

    Args:
        path: JSON file; made if there is none.
        flow: The job's flow.
        cluster: The job's devices.

    Raises:
        ProfileError: The file is of another flow or other hardware, or stale.
    """

    def __init__(self, path: Path, flow: Flow, cluster: Cluster) -> None:
        self.path = path
        self.flow = flow
        self.cluster = cluster
        self._measured: list[Mapping[str, StageProfile]] = []
        self._syncs: list[SyncSample] = []
        self.read()

    def read(self) -> Profile:
        """Return what the file holds now; an empty profile where there is none."""
        if not self.path.exists():
            return Profile(flow=self.flow.name, fingerprint=Fingerprint.of(self.cluster), created=0.0, stages={})
        profile = Profile.read(self.path)
        profile.check_belongs(self.flow, self.cluster, now=time.time())
        return profile

    def add(self, measured: Mapping[str, StageProfile], syncs: Iterable[SyncSample] = ()) -> None:
        """Keep samples for the next :meth:`write`."""
        self._measured.append(measured)
        self._syncs.extend(syncs)

    def write(self) -> None:
        """Add to the file what was kept; jobs that write at the same time wait for each other."""
        if not self._measured:
            return
        with self._locked():
            profile = self.read()
            for measured in self._measured:
                profile = profile.appended(measured)
            profile.appended({}, syncs=self._syncs).write(self.path)
        self._measured, self._syncs = [], []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(self.path.name + ".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def open_profile(config: DictConfig, options: M2FlowConfig) -> JobProfile | None:
    """Return the profile the job adds to, or None where it adds to none.

    Raises:
        ProfileError: See :class:`JobProfile`.
    """
    if options.profile.path is None:
        return None
    return JobProfile(Path(options.profile.path), job_flow(config), job_cluster(config, options))
