"""All settings of a pool in one place."""

from dataclasses import dataclass, field

from rlinf_plugins.core.errors import ConfigError
from rlinf_plugins.tools.batching import BatchConfig
from rlinf_plugins.tools.breaker import BreakerConfig
from rlinf_plugins.tools.cache import CacheConfig
from rlinf_plugins.tools.hedge import HedgeConfig
from rlinf_plugins.tools.retry import RetryConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """All of a pool's settings; each feature can be turned off where its own config says so.

    Attributes:
        timeout_s: Deadline of a call that names none, in seconds, retries included.
        attempt_timeout_s: Longest a single batch may take, in seconds.
        queue: Calls that may wait; beyond it a call fails as overloaded.
        single_flight: Whether equal calls under way share one execution.
        weights: Fair share per tenant; a tenant not listed weighs 1.
        batch: How calls are put together.
        cache: How long values are remembered.
        retry: When a failed call is tried again.
        breaker: When a failing replica is left alone.
        hedge: When a slow batch is also sent to a second replica.
    """

    timeout_s: float = 30.0
    attempt_timeout_s: float = 10.0
    queue: int = 10_000
    single_flight: bool = True
    weights: dict[str, float] = field(default_factory=dict)
    batch: BatchConfig = field(default_factory=BatchConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    hedge: HedgeConfig = field(default_factory=HedgeConfig)

    def validate(self, where: str) -> None:
        """Reject values outside their range."""
        if self.timeout_s <= 0 or self.attempt_timeout_s <= 0 or self.queue < 1:
            raise ConfigError(f"{where} needs timeout_s > 0, attempt_timeout_s > 0 and queue >= 1, got {self}")
        if any(weight <= 0 for weight in self.weights.values()):
            raise ConfigError(f"{where}.weights must be positive, got {self.weights}")
