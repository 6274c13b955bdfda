"""The user's macro flow: a procedure over groups of workers that runs unchanged wherever the plan puts them.

Importing this package imports neither ray nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.macro.flow import MacroFlow
    from rlinf_plugins.scheduler.macro.placement import Placement
    from rlinf_plugins.scheduler.macro.worker import Worker

__all__ = ["MacroFlow", "Placement", "Worker"]

_HOME = {"MacroFlow": "flow", "Placement": "placement", "Worker": "worker"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
