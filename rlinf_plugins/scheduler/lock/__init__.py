"""The device lock and the context switcher.

Importing this package imports neither ray nor torch; what needs them is loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.lock.manager import LockManager
    from rlinf_plugins.scheduler.lock.types import Lease, LockState, Priority

__all__ = ["Lease", "LockManager", "LockState", "Priority"]

_HOME = {"LockManager": "manager", "Lease": "types", "LockState": "types", "Priority": "types"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
