"""The elastic-pipeline data channel: what a flow's stages exchange data through, at any granularity.

Public names are imported on first use, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_plugins.scheduler.channel.channel import Channel
    from rlinf_plugins.scheduler.channel.config import ChannelConfig, Granularity, JournalConfig
    from rlinf_plugins.scheduler.channel.consumer import Consumer
    from rlinf_plugins.scheduler.channel.delivery import Delivery
    from rlinf_plugins.scheduler.channel.producer import Producer
    from rlinf_plugins.scheduler.channel.stream import Stream
    from rlinf_plugins.scheduler.channel.wire import Put

__all__ = [
    "Channel",
    "ChannelConfig",
    "Consumer",
    "Delivery",
    "Granularity",
    "JournalConfig",
    "Producer",
    "Put",
    "Stream",
]

_HOME = {
    "Channel": "channel",
    "ChannelConfig": "config",
    "Consumer": "consumer",
    "Delivery": "delivery",
    "Granularity": "config",
    "JournalConfig": "config",
    "Producer": "producer",
    "Put": "wire",
    "Stream": "stream",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
