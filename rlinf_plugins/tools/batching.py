"""The coalescer's decision: how many of the waiting calls to send now, and when to look again."""

from dataclasses import dataclass

from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How calls are put together.

    Attributes:
        max_batch: Calls sent at once; 1 turns coalescing off.
        max_inflight: Batches under way at once, per pool.
        linger_s: Seconds a lone call may wait for company while a slot is free; 0 sends at once, and batches then
            form only while all slots are busy.
        target_s: Where set, the batch size adapts so that a batch takes about this long: compute-bound upstreams
            gain nothing from very large batches.
    """

    max_batch: int = 64
    max_inflight: int = 4
    linger_s: float = 0.0
    target_s: float | None = None

    def validate(self, where: str) -> None:
        """Reject values outside their range."""
        if self.max_batch < 1 or self.max_inflight < 1 or self.linger_s < 0:
            raise ConfigError(f"{where} needs max_batch >= 1, max_inflight >= 1 and linger_s >= 0, got {self}")
        if self.target_s is not None and self.target_s <= 0:
            raise ConfigError(f"{where}.target_s must be positive or absent, got {self.target_s}")


class BatchPolicy:
    """Work-conserving coalescing with an adaptive size (additive increase, multiplicative decrease)."""

    def __init__(self, config: BatchConfig) -> None:
        self._config = config
        self._limit = float(config.max_batch if config.target_s is None else max(1, config.max_batch // 4))

    @property
    def limit(self) -> int:
        """The batch size allowed at present."""
        return max(1, int(self._limit))

    def due(self, queued: int, inflight: int, oldest_wait_s: float) -> tuple[int, float | None]:
        """Decide.

        Returns:
            The number of calls to send now, and, where that is 0 and calls wait for company, the seconds after which
            to ask again (None: ask when a call arrives or a batch ends).
        """
        if queued == 0 or inflight >= self._config.max_inflight:
            return 0, None
        if queued < self.limit and oldest_wait_s < self._config.linger_s:
            return 0, self._config.linger_s - oldest_wait_s
        return min(queued, self.limit), None

    def observe(self, size: int, seconds: float) -> None:
        """Record a finished batch; only full ones say anything about the limit."""
        target = self._config.target_s
        if target is None:
            return
        if seconds > target:
            self._limit = max(1.0, min(self._limit, size) * 0.7)
        elif size >= self.limit:
            self._limit = min(float(self._config.max_batch), self._limit + 1.0)
