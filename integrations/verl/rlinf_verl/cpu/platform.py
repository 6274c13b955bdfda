"""veRL's ``cpu`` platform: virtual devices instead of accelerators.

Chosen by ``VERL_PLATFORM=cpu`` or by ``trainer.v1.m2flow.virtual_devices``; never by auto-detection, since a head node
without accelerators may well drive workers that have them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from rlinf_verl.cpu.devices import VirtualDevices, bind_assigned_device


def _resident_bytes(*_: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _memory_info(*_: Any) -> tuple[int, int]:
    devices = VirtualDevices.from_environment()
    capacity = devices.memory_bytes if devices else int(psutil.virtual_memory().total)
    return max(0, capacity - _resident_bytes()), capacity


def _nothing(*_: Any, **__: Any) -> None:
    return None


_CUDA_ONLY: dict[str, Any] = {
    "empty_cache": _nothing,
    "ipc_collect": _nothing,
    "reset_peak_memory_stats": _nothing,
    "memory_allocated": _resident_bytes,
    "memory_reserved": _resident_bytes,
    "max_memory_allocated": _resident_bytes,
    "max_memory_reserved": _resident_bytes,
    "mem_get_info": _memory_info,
    "get_device_name": lambda *_: "CPU",
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
}
"""Functions veRL calls on the device module that torch.cpu lacks. veRL compares the module with torch.cpu by identity,
so the functions are added to it instead of wrapping it."""


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Virtual devices on the CPU; see :class:`rlinf_verl.cpu.devices.VirtualDevices`."""

    def __init__(self) -> None:
        for name, function in _CUDA_ONLY.items():
            if not hasattr(torch.cpu, name):
                setattr(torch.cpu, name, function)

    @property
    def device_name(self) -> str:
        """Torch device type."""
        return "cpu"

    @property
    def vendor_name(self) -> str:
        """Vendor key for veRL's engine registry."""
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        """The torch namespace of the device."""
        return torch.cpu

    def is_available(self) -> bool:
        """Always: there is a CPU wherever Python runs."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never chosen by auto-detection."""
        return False

    def current_device(self) -> Any:
        """The torch device; callers pass it to ``tensor.to``, for which an index would mean CUDA."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Number of virtual devices of this machine."""
        devices = VirtualDevices.from_environment()
        return devices.count if devices else 1

    def set_device(self, device_index: int) -> None:
        """Bind this process to the virtual device Ray assigned to it.

        veRL passes the local rank, which is always 0 under Ray, so Ray's own assignment decides.
        """
        bind_assigned_device()

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for: CPU kernels are synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator; all virtual devices of a process share it."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Nothing to set: the host allocator is not configurable from here."""

    def empty_cache(self) -> None:
        """Nothing is cached beyond what the host allocator keeps."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """No compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives run on gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Variable in which Ray passes the assigned devices."""
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """Ray's resource; veRL's availability check counts only GPU and NPU."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Ray may set the visible devices."""
        return []

    def is_ipc_supported(self) -> bool:
        """No device IPC."""
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """No ranges to annotate."""
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def cudart(self) -> Any:
        """No CUDA runtime."""
        return None
