"""Settings given on a command line."""

from collections.abc import Sequence
from typing import Any

import msgspec

from rlinf_plugins.core.errors import ConfigError


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Turn ``["encoder.model=x", "k1=0.9"]`` into nested settings; numbers, booleans and null are recognised.

    Raises:
        ConfigError: An entry has no ``=``.
    """
    settings: dict[str, Any] = {}
    for entry in options:
        path, equals, text = entry.partition("=")
        if not equals or not path:
            raise ConfigError(f"--option takes NAME=VALUE, got {entry!r}")
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError:
            value = text
        *parents, name = path.split(".")
        target = settings
        for parent in parents:
            target = target.setdefault(parent, {})
        target[name] = value
    return settings
