"""Values that were fetched before: bounded, with a time to live. Failures are never cached."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from cachetools import TTLCache

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """How much is remembered and for how long.

    Attributes:
        entries: Values held at most (least recently used goes first); 0 turns the cache off.
        ttl_s: Seconds a value stays valid.
    """

    entries: int = 100_000
    ttl_s: float = 3600.0

    def validate(self, where: str) -> None:
        """Reject negative values."""
        if self.entries < 0 or self.ttl_s <= 0:
            raise ConfigError(f"{where} needs entries >= 0 and ttl_s > 0, got {self}")


class ResultCache:
    """Maps ``(version, key)`` to a value; a new version of the tool's data therefore starts afresh.

    Args:
        config: Bounds.
        clock: Source of monotonic seconds.
    """

    def __init__(self, config: CacheConfig, clock: Clock = monotonic) -> None:
        self._entries: TTLCache[Hashable, Any] | None = None
        if config.entries:
            self._entries = TTLCache(maxsize=config.entries, ttl=config.ttl_s, timer=clock)

    def get(self, version: str, key: Hashable) -> Any | None:
        """Return the value, or None."""
        return None if self._entries is None else self._entries.get((version, key))

    def put(self, version: str, key: Hashable, value: Any) -> None:
        """Remember a value."""
        if self._entries is not None:
            self._entries[version, key] = value

    def __len__(self) -> int:
        return 0 if self._entries is None else len(self._entries)
