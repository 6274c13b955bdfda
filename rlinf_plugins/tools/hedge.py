"""Hedging: when to ask a second replica because the first is unusually slow, within a budget."""

from bisect import insort
from collections import deque
from dataclasses import dataclass

from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class HedgeConfig:
    """When to hedge. Needs at least two replicas to have an effect.

    Attributes:
        budget: Hedges allowed per call made, e.g. 0.05 for one in twenty; 0 turns hedging off.
        quantile: Latency quantile after which a call counts as slow.
        window: Number of recent latencies the quantile is taken over.
        min_samples: No hedging before this many were seen.
    """

    budget: float = 0.0
    quantile: float = 0.95
    window: int = 256
    min_samples: int = 20

    def validate(self, where: str) -> None:
        """Reject values outside their range."""
        if not 0 <= self.budget <= 1 or not 0 < self.quantile < 1:
            raise ConfigError(f"{where} needs 0 <= budget <= 1 and 0 < quantile < 1, got {self}")
        if not 0 < self.min_samples <= self.window:
            raise ConfigError(f"{where} needs 0 < min_samples <= window, got {self}")


class HedgePolicy:
    """Tracks latencies and the budget; the pool asks :meth:`delay` before a call and :meth:`spend` before a hedge."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._tokens = 0.0

    def delay(self) -> float | None:
        """Return the seconds after which a call is slow, or None where hedging is off or too little is known."""
        if self._config.budget == 0 or len(self._sorted) < self._config.min_samples:
            return None
        return self._sorted[min(len(self._sorted) - 1, int(self._config.quantile * len(self._sorted)))]

    def spend(self) -> bool:
        """Take one hedge from the budget, or refuse."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def observe(self, seconds: float) -> None:
        """Record a finished call; earns its share of the budget."""
        if self._config.budget == 0:
            return
        # At most a handful of hedges may be saved up, so that a quiet hour does not pay for a storm.
        self._tokens = min(8.0, self._tokens + self._config.budget)
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > self._config.window:
            self._sorted.remove(self._recent.popleft())
