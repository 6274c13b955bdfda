"""Time as an argument, so that state machines can be tested over simulated years."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time in seconds."""

    def __call__(self) -> float:
        """Return seconds since an arbitrary fixed point; never decreases."""
        ...


monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that moves only when told to; for tests and simulations.

    Args:
        now: Starting time in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Return the current simulated time in seconds."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by ``seconds`` (>= 0) and return the new time.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back: advance({seconds})")
        self._now += seconds
        return self._now
