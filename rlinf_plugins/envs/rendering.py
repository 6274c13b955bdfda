"""What a process must set before it imports a simulator, and the check that a frame was really drawn.

Drivers read their settings once, when they are loaded: call :func:`prepare_vulkan` or :func:`prepare_mujoco` first in
the process, never after. What the user has set in the environment is left alone.
"""

import ctypes
import os
import sys
from pathlib import Path

import numpy as np

from rlinf_plugins.core.errors import BlankFrameError, MissingAssetError, RenderingSetupError

SYSTEM_DRIVERS = Path("/usr/share/vulkan/icd.d")
MIN_FRAME_STD = 1.0
"""Smallest standard deviation of a drawn frame, in grey levels of 0..255; a blank frame has exactly 0."""

_preloaded: list[ctypes.CDLL] = []  # kept, so that the libraries stay loaded


def has_gpu() -> bool:
    """Return whether an NVIDIA kernel driver is present; touches no device."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def cache_folder() -> Path:
    """Return the folder in which the private software Vulkan driver is unpacked (``scripts/lavapipe.sh``)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rlinf-plugins"


def software_driver() -> Path:
    """Return the description file of the software Vulkan driver: the private one, else the system's.

    Raises:
        MissingAssetError: There is neither.
    """
    private = sorted(cache_folder().glob("mesa-*/.complete"), key=lambda path: path.stat().st_mtime)
    if private:
        return private[-1].parent / "lvp_icd.json"
    system = sorted(SYSTEM_DRIVERS.glob("lvp_icd*.json"))
    if system:
        return system[0]
    raise MissingAssetError(
        f"no Vulkan driver: this machine has no GPU, and neither {cache_folder()}/mesa-* nor {SYSTEM_DRIVERS} holds "
        "lavapipe; run `make system` in a checkout, or install mesa-vulkan-drivers (Mesa >= 24.3)"
    )


def check_vulkan() -> None:
    """Refuse a machine that cannot draw, without starting a driver.

    Raises:
        MissingAssetError: There is no GPU and no software driver, or the environment names one that is not there.
    """
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):  # the first overrules the second
        if name in os.environ:
            absent = [path for path in os.environ[name].split(os.pathsep) if path and not Path(path).is_file()]
            if absent:
                raise MissingAssetError(
                    f"{name}={os.environ[name]} names Vulkan drivers that are not there: {', '.join(absent)}; unset "
                    f"{name} to use this machine's own"
                )
            return
    if not has_gpu():
        software_driver()


def prepare_vulkan() -> str:
    """Choose the Vulkan driver of this process, before SAPIEN starts its renderer.

    Returns:
        The render backend to ask ManiSkill for: ``"gpu"``, or ``"pci:0"`` for the software driver.

    Raises:
        MissingAssetError: There is no GPU and no software driver, or the environment names one that is not there.
    """
    check_vulkan()
    if has_gpu():
        return "gpu"
    if "VK_DRIVER_FILES" not in os.environ and "VK_ICD_FILENAMES" not in os.environ:
        driver = software_driver()
        os.environ["VK_ICD_FILENAMES"] = str(driver)
        _preload(driver.parent)
    os.environ.setdefault("SAPIEN_DISABLE_RAY_TRACING", "1")
    os.environ.setdefault("LP_NUM_THREADS", "1")  # a process per environment is the parallelism
    return "pci:0"


def prepare_mujoco() -> str:
    """Choose MuJoCo's offscreen renderer in this process, before ``mujoco`` or ``OpenGL`` is imported.

    Returns:
        ``"egl"`` with a GPU, ``"osmesa"`` without, or what ``MUJOCO_GL`` says.

    Raises:
        RenderingSetupError: MuJoCo was imported before with another renderer.
    """
    chosen = os.environ.get("MUJOCO_GL")
    wanted = chosen or ("egl" if has_gpu() else "osmesa")
    if chosen is None and "mujoco" in sys.modules:
        raise RenderingSetupError(
            f"mujoco was imported before its renderer was chosen; set MUJOCO_GL={wanted} in the environment, or create "
            "the environment in a process of its own (EnvPool does)"
        )
    os.environ["MUJOCO_GL"] = wanted
    os.environ.setdefault("PYOPENGL_PLATFORM", wanted)
    return wanted


def check_frame(frame: np.ndarray, what: str) -> None:
    """Refuse a frame that was not drawn.

    Args:
        frame: Image ``[height, width, channels]``, uint8.
        what: What was drawn, for the message.

    Raises:
        BlankFrameError: All pixels are (nearly) the same.
    """
    spread = float(np.std(frame))
    if spread < MIN_FRAME_STD:
        raise BlankFrameError(
            f"{what}: the first frame is blank (standard deviation {spread:.2f} grey levels, shape {frame.shape}); "
            "the renderer draws nothing: run `rlinf-plugins doctor`"
        )


def _preload(folder: Path) -> None:
    """Load the private driver's libraries, dependencies first; the driver then finds them by name."""
    order = folder / "preload"
    if order.exists():
        _preloaded.extend(ctypes.CDLL(str(folder / "lib" / name)) for name in order.read_text().split())
