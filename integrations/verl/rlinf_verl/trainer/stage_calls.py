"""The stage calls of one step, measured where they happen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rlinf_plugins.core.clock import Clock, monotonic
from rlinf_plugins.core.spans import Span


def _nothing() -> float:
    return 0.0


class StageCalls:
    """Collects the spans of a step's stage calls, with the attributes a profile is made of.

    A call's ``seconds`` are the stage's own: without the wait for devices, with the work done for it beforehand, and
    with its share of what the stage does once a step.

    Args:
        waited: Seconds spent so far on waiting for devices; only differences count.
        clock: Source of time.
    """

    def __init__(self, waited: Callable[[], float] = _nothing, clock: Clock = monotonic) -> None:
        self._waited = waited
        self._clock = clock
        self._spans: list[Span] = []
        self._carried = 0.0
        self._finishing: dict[str, float] = {}

    @contextmanager
    def call(self, stage: str, items: int, devices: int) -> Iterator[None]:
        """Measure the block as a call of ``stage`` with ``items`` items; a block that raises counts for nothing."""
        start, waited = self._clock(), self._waited()
        yield
        end = self._clock()
        seconds, self._carried = end - start - (self._waited() - waited) + self._carried, 0.0
        if items:
            self.add(stage, items, devices, start, end, seconds)

    def add(self, stage: str, items: int, devices: int, start: float, end: float, seconds: float | None = None) -> None:
        """Record a call that was measured elsewhere."""
        attributes = {
            "stage": stage,
            "items": items,
            "devices": devices,
            "seconds": end - start if seconds is None else seconds,
        }
        self._spans.append(Span(name="call", actor="trainer", start=start, end=end, attributes=attributes))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Measure the block as work for the next call, whatever its stage."""
        start = self._clock()
        yield
        self._carried += self._clock() - start

    @contextmanager
    def finishing(self, stage: str) -> Iterator[None]:
        """Measure the block as work that all calls of ``stage`` in this step share, by their items."""
        start, waited = self._clock(), self._waited()
        yield
        spent = self._clock() - start - (self._waited() - waited)
        self._finishing[stage] = self._finishing.get(stage, 0.0) + spent

    def take(self, step: int) -> list[Span]:
        """Return the calls of the step numbered ``step`` and forget them."""
        totals: dict[str, int] = {}
        for span in self._spans:
            totals[span.attributes["stage"]] = totals.get(span.attributes["stage"], 0) + span.attributes["items"]
        found = []
        for span in self._spans:
            of = span.attributes
            share = self._finishing.get(of["stage"], 0.0) * of["items"] / totals[of["stage"]]
            found.append(replace(span, attributes={**of, "step": step, "seconds": of["seconds"] + share}))
        self._spans, self._carried, self._finishing = [], 0.0, {}
        return found
