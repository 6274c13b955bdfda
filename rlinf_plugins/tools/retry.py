"""When to try again, as a pure decision: attempts so far, the failure, the time left, one random number."""

from dataclasses import dataclass

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.results import Failure


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """Full-jitter exponential back-off, bounded by the caller's deadline.

    Attributes:
        retries: Attempts after the first; 0 turns retries off.
        base_s: Upper bound of the first delay, in seconds.
        cap_s: Upper bound of any delay, in seconds.
    """

    retries: int = 2
    base_s: float = 0.05
    cap_s: float = 2.0

    def validate(self, where: str) -> None:
        """Reject negative values."""
        if self.retries < 0 or self.base_s <= 0 or self.cap_s < self.base_s:
            raise ConfigError(f"{where} needs retries >= 0 and 0 < base_s <= cap_s, got {self}")


def retry_delay(
    config: RetryConfig, failure: Failure, attempts: int, time_left_s: float, random: float
) -> float | None:
    """Return the seconds to wait before the next attempt, or None to give up.

    The delay is uniform in ``[0, min(cap, base * 2**(attempts - 1))]`` (full jitter), and never earlier than the
    upstream's ``Retry-After``. An attempt that could not start before the deadline is not made.

    Args:
        config: The policy.
        failure: The last attempt's failure.
        attempts: Attempts made so far, at least 1.
        time_left_s: Seconds until the last waiter's deadline.
        random: A number in [0, 1).
    """
    if not failure.retryable or attempts > config.retries:
        return None
    delay = random * min(config.cap_s, config.base_s * 2.0 ** (attempts - 1))
    if failure.retry_after_s is not None:
        delay += failure.retry_after_s
    return delay if delay < time_left_s else None
