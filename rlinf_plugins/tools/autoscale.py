"""How many actors a service uses: one more while calls wait too long for a slot, one less after a quiet while."""

from dataclasses import dataclass

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscaleConfig:
    """When a service grows and shrinks.

    Attributes:
        max_shards: Most actors; 0 turns autoscaling off.
        grow_wait_s: Mean seconds calls wait for a slot in the actors, above which one actor is added.
        shrink_wait_s: Mean wait below which the service counts as quiet.
        window_s: Seconds of waits that a decision looks at; also the least time between two decisions.
        quiet_s: Seconds the service must have been quiet before an actor is given up.
    """

    max_shards: int = 0
    grow_wait_s: float = 0.1
    shrink_wait_s: float = 0.01
    window_s: float = 2.0
    quiet_s: float = 60.0

    def validate(self, where: str) -> None:
        """Reject values outside their range."""
        if self.max_shards < 0 or self.window_s <= 0 or self.quiet_s < self.window_s:
            raise ConfigError(f"{where} needs max_shards >= 0 and 0 < window_s <= quiet_s, got {self}")
        if not 0 <= self.shrink_wait_s < self.grow_wait_s:
            raise ConfigError(f"{where} needs 0 <= shrink_wait_s < grow_wait_s, got {self}")


class ShardScaler:
    """Decides the number of shards from how long calls waited.

    Args:
        config: Thresholds.
        min_shards: Fewest shards, and the number it starts with.
        clock: Source of monotonic seconds.
    """

    def __init__(self, config: AutoscaleConfig, min_shards: int, clock: Clock = monotonic) -> None:
        self._config = config
        self._least = min_shards
        self._clock = clock
        self._shards = min_shards
        self._since = clock()
        self._busy_at = clock()
        self._calls = 0
        self._waited = 0.0

    @property
    def shards(self) -> int:
        """Shards to use now."""
        self._decide()
        return self._shards

    def observe(self, calls: int, waited_s: float) -> None:
        """Record that ``calls`` calls waited ``waited_s`` seconds in all."""
        if self._config.max_shards:
            self._decide()  # a window that is over is judged by what it held
            self._calls += calls
            self._waited += waited_s

    def settle(self, shards: int) -> None:
        """Take ``shards`` as the number for now: another could not be added."""
        self._shards = shards

    def _decide(self) -> None:
        now = self._clock()
        if not self._config.max_shards or now - self._since < self._config.window_s:
            return
        mean = self._waited / self._calls if self._calls else 0.0
        if mean > self._config.shrink_wait_s:
            self._busy_at = now
        if mean > self._config.grow_wait_s:
            self._shards = max(self._shards, min(self._shards + 1, self._config.max_shards))
        elif now - self._busy_at >= self._config.quiet_s and self._shards > self._least:
            self._shards -= 1
            self._busy_at = now
        self._since, self._calls, self._waited = now, 0, 0.0


def jump_hash(key: int, buckets: int) -> int:
    """Return the bucket of ``key``; one bucket more moves only the keys that it receives.

    Lamping and Veach, "A fast, minimal memory, consistent hash algorithm" (2014).

    Args:
        key: 64 bits, well mixed.
        buckets: Number of buckets, at least 1.
    """
    chosen, following = 0, 0
    while following < buckets:
        chosen = following
        key = (key * 2862933555777941757 + 1) & 0xFFFF_FFFF_FFFF_FFFF
        following = int((chosen + 1) * (1 << 31) / ((key >> 33) + 1))
    return chosen
