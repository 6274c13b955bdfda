"""Virtual devices: shares of a machine's cores and memory that Ray and veRL treat as accelerators."""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from rlinf_plugins.core.errors import ConfigError

DEVICES_ENV = "RLINF_VIRTUAL_DEVICES"
"""Environment variable that carries the division to every worker process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualDevices:
    """A division of one machine.

    Attributes:
        cores: Core ids of each device.
        memory_bytes: Capacity of each device in bytes.
    """

    cores: tuple[tuple[int, ...], ...]
    memory_bytes: int

    @property
    def count(self) -> int:
        """Number of devices."""
        return len(self.cores)

    @classmethod
    def divide(
        cls,
        count: int,
        *,
        cores_per_device: int | None = None,
        memory_gb: float | None = None,
        available_cores: Sequence[int] | None = None,
        available_bytes: int | None = None,
    ) -> Self:
        """Divide the machine into ``count`` devices.

        Args:
            count: Number of devices, at least 1.
            cores_per_device: Cores of each; None shares all cores evenly. With fewer cores than devices, devices
                share cores in turn.
            memory_gb: Capacity of each in GiB; None shares 80 % of the memory evenly.
            available_cores: Core ids to divide; None takes those this process may use.
            available_bytes: Memory to divide; None takes the machine's total.

        Raises:
            ConfigError: More cores or memory are asked for than there are.
        """
        pool = sorted(available_cores if available_cores is not None else os.sched_getaffinity(0))
        total = available_bytes if available_bytes is not None else psutil.virtual_memory().total
        if count < 1:
            raise ConfigError(f"at least one virtual device is needed, got {count}")
        if cores_per_device is not None and count * cores_per_device > len(pool):
            raise ConfigError(
                f"{count} virtual devices x {cores_per_device} cores = {count * cores_per_device} cores are asked for, "
                f"this process may use {len(pool)}; lower virtual_devices.count or cores_per_device"
            )
        memory = int(memory_gb * 2**30) if memory_gb is not None else int(0.8 * total) // count
        if memory * count > total:
            raise ConfigError(
                f"{count} virtual devices x {memory / 2**30:.1f} GiB exceed the machine's {total / 2**30:.1f} GiB; "
                "lower virtual_devices.count or memory_gb"
            )
        size = cores_per_device or len(pool) // count
        if size:
            cores = tuple(tuple(pool[i * size : (i + 1) * size]) for i in range(count))
        else:
            cores = tuple((pool[i % len(pool)],) for i in range(count))
        return cls(cores=cores, memory_bytes=memory)

    def to_json(self) -> str:
        """Return the division as JSON, for :data:`DEVICES_ENV`."""
        return json.dumps({"cores": self.cores, "memory_bytes": self.memory_bytes})

    @classmethod
    def from_environment(cls) -> Self | None:
        """Return the division this process was started with, or None."""
        text = os.environ.get(DEVICES_ENV)
        if not text:
            return None
        value = json.loads(text)
        return cls(cores=tuple(tuple(c) for c in value["cores"]), memory_bytes=value["memory_bytes"])

    def bind(self, index: int) -> None:
        """Confine this process, with the threads it has, to the cores of device ``index`` (modulo their number).

        Torch's thread pool follows, so that a device never computes with more threads than it has cores.
        """
        import torch

        cores = self.cores[index % self.count]
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.sched_setaffinity(int(thread), cores)
        torch.set_num_threads(len(cores))


def bind_assigned_device() -> int | None:
    """Confine this process to the virtual device Ray assigned to it, if there are virtual devices.

    Returns:
        The device's index, or None where this process has none.
    """
    devices = VirtualDevices.from_environment()
    assigned = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if devices is None or not assigned.isdigit():
        return None
    devices.bind(int(assigned))
    return int(assigned)


def listen_on_loopback() -> None:
    """Make the Ray that this process starts next listen on the loopback interface only.

    Ray resolves 127.0.0.1 to an outside address wherever it supports clusters, whatever ``_node_ip_address`` says; the
    switch that says it does not is an environment variable, read when Ray is imported.
    """
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
