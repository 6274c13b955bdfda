"""OpenVLA and OpenVLA-OFT on current transformers and timm.

Names are imported on first use, so that importing the package pulls neither torch nor transformers.
"""

import importlib
from typing import Any

_EXPORTS = {
    "ActionCodec": "actions",
    "ActionDistribution": "sampling",
    "ActionOutput": "modeling",
    "ActionSpec": "config",
    "ImageProcessor": "images",
    "OpenVLAConfig": "config",
    "OpenVLAForActionPrediction": "modeling",
    "OpenVLAProcessor": "processing",
    "PolicyInputs": "processing",
    "Sampling": "sampling",
    "Statistics": "statistics",
    "TinySizes": "tiny",
    "ValueHead": "heads",
    "load_policy": "checkpoint",
    "load_statistics": "statistics",
    "make_tiny_checkpoint": "tiny",
    "reduce_log_probs": "sampling",
    "save_policy": "checkpoint",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import the module that defines ``name`` (PEP 562)."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
