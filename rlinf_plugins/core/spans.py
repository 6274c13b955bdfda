"""Spans: who did what, when, for how long and why. The one record that metrics, timelines and drift read."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlinf_plugins.core.clock import Clock, monotonic


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One finished piece of work.

    Attributes:
        name: What was done, e.g. ``"onload"``.
        actor: Who did it, e.g. ``"rollout/0"``.
        start: Start in seconds on the recorder's clock.
        end: End in seconds on the recorder's clock.
        attributes: Anything worth reading later: bytes, reason, waiters, granularity.
    """

    name: str
    actor: str
    start: float
    end: float
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end - self.start


class SpanRecorder:
    """Collects spans in memory, bounded; safe to use from several threads.

    Args:
        actor: Default actor of the spans recorded here.
        clock: Source of time.
        capacity: Oldest spans are dropped beyond this many.
    """

    def __init__(self, actor: str, clock: Clock = monotonic, capacity: int = 100_000) -> None:
        self._actor = actor
        self._clock = clock
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
        """Record the block as a span; the yielded dict takes attributes known only later.

        A block that raises is recorded too, with ``error`` set to the exception's type name.
        """
        start = self._clock()
        try:
            yield attributes
        except BaseException as error:
            attributes["error"] = type(error).__name__
            raise
        finally:
            self.add(Span(name=name, actor=self._actor, start=start, end=self._clock(), attributes=attributes))

    def add(self, span: Span) -> None:
        """Record a span that was measured elsewhere."""
        with self._lock:
            self._spans.append(span)

    def drain(self) -> list[Span]:
        """Return the recorded spans, oldest first, and forget them."""
        with self._lock:
            spans = list(self._spans)
            self._spans.clear()
        return spans
