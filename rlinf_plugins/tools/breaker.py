"""A circuit breaker per back-end, as a state machine with an injected clock."""

from dataclasses import dataclass
from enum import StrEnum

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.errors import ConfigError


class BreakerState(StrEnum):
    """``closed`` lets calls through, ``open`` none, ``half_open`` a single probe."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakerConfig:
    """When a circuit opens and for how long.

    Attributes:
        failures: Consecutive failed batches that open the circuit; 0 turns the breaker off.
        open_s: Seconds it stays open the first time; doubled by each failed probe.
        max_open_s: Upper bound of that doubling.
    """

    failures: int = 5
    open_s: float = 1.0
    max_open_s: float = 30.0

    def validate(self, where: str) -> None:
        """Reject negative values."""
        if self.failures < 0 or self.open_s <= 0 or self.max_open_s < self.open_s:
            raise ConfigError(f"{where} needs failures >= 0 and 0 < open_s <= max_open_s, got {self}")


class CircuitBreaker:
    """Stops calling a back-end that keeps failing, and probes it again after a while.

    Args:
        config: Thresholds.
        clock: Source of monotonic seconds.
    """

    def __init__(self, config: BreakerConfig, clock: Clock = monotonic) -> None:
        self._config = config
        self._clock = clock
        self._failures = 0
        self._open_s = config.open_s
        self._open_until: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        """The state at this moment."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._open_until else BreakerState.HALF_OPEN

    @property
    def retry_after_s(self) -> float:
        """Seconds until a probe is let through; 0 unless open."""
        return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    def can_enter(self) -> bool:
        """Say whether :meth:`enter` would let a call through, without taking the probe's place."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._probing)

    def enter(self) -> bool:
        """Let a call through, or not; in the half-open state the first caller becomes the probe."""
        if not self.can_enter():
            return False
        if self._open_until is not None:
            self._probing = True
        return True

    def success(self) -> None:
        """Record a call that the back-end answered; closes the circuit."""
        self._failures = 0
        self._open_until = None
        self._open_s = self._config.open_s
        self._probing = False

    def failure(self) -> None:
        """Record a call that failed through the back-end's fault."""
        if self._config.failures == 0:
            return
        self._failures += 1
        if self._probing:
            self._probing = False
            self._open_s = min(self._config.max_open_s, self._open_s * 2)
            self._open_until = self._clock() + self._open_s
        elif self._open_until is None and self._failures >= self._config.failures:
            self._open_until = self._clock() + self._open_s

    def abandon(self) -> None:
        """Record a call that ended without a verdict (cancelled); frees the probe's place."""
        self._probing = False
