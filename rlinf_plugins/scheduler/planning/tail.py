"""The long tail: order statistics of observed lengths, and when a serving stage has finished its first items.

A serving stage admits all items at once and advances every active one by a token per step of ``a + b * active``
seconds. If ``q`` of ``M`` items are finished once the length ``x`` is reached, then ``a * x`` seconds went into steps
and ``b * sum(min(length, x))`` into tokens. Waiting for all of them (temporal mode) pays the largest of ``M`` draws; a
consumer that starts on the first ``m`` (pipelined mode) hides it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import betainc, ndtri

Floats = NDArray[np.float64]


def expected_order_statistic(ordered: Floats, rank: int, draws: int) -> float:
    """Return E[the ``rank``-th smallest of ``draws`` draws] from the empirical distribution of ``ordered``.

    Exact: the rank-th order statistic is at most the i-th sample with probability I_{i/n}(rank, draws - rank + 1)
    (David and Nagaraja, Order Statistics, 2.1).
    """
    edges = np.arange(len(ordered) + 1) / len(ordered)
    return float(np.dot(ordered, np.diff(betainc(rank, draws - rank + 1, edges))))


@dataclass(frozen=True, slots=True)
class Tail:
    """Length distribution and step costs of one component.

    Attributes:
        ordered: Observed lengths, ascending.
        slots: Items one replica works on at a time; 0: no limit.
        start: Seconds per call that depend on nothing.
        step: Seconds per step (``a``).
        token: Seconds per token and active item (``b``).
    """

    ordered: Floats
    slots: int
    start: float
    step: float
    token: float

    @classmethod
    def fit(
        cls,
        lengths: Sequence[float],
        slots: int,
        replicas: Sequence[int],
        items: Sequence[int],
        seconds: Sequence[float],
    ) -> Self:
        """Fit the step costs to samples by non-negative least squares; one cell alone is put down to steps.

        So is what no number of devices shortens, where only one granularity was measured: a call's constant part and
        its longest item cannot be told apart then, and a serving engine spends its time on steps.
        """
        shape = cls(ordered=np.sort(np.asarray(lengths, dtype=float)), slots=slots, start=0.0, step=1.0, token=0.0)
        steps = [shape.steps(r, m, m) for r, m in zip(replicas, items, strict=True)]
        tokens = [shape.fullest(r, m) for r, m in zip(replicas, items, strict=True)]
        target = np.asarray(seconds, dtype=float)
        if len({(round(s, 9), round(t, 9)) for s, t in zip(steps, tokens, strict=True)}) < 3:
            return cls(ordered=shape.ordered, slots=slots, start=0.0, step=float(target.mean() / max(steps)), token=0.0)
        features = np.stack([np.ones(len(steps)), np.asarray(steps), np.asarray(tokens)], axis=1)
        if np.ptp(features[:, 1]) <= 0.01 * features[:, 1].max():
            features[:, 0] = 0.0
        scale = np.maximum(features.max(axis=0), 1e-300)
        # Relative errors count: a profile spans orders of magnitude.
        (start, step, token), _ = nnls(features / scale / target[:, None], np.ones_like(target))
        return cls(
            ordered=shape.ordered,
            slots=slots,
            start=float(start / scale[0]),
            step=float(step / scale[1]),
            token=float(token / scale[2]),
        )

    @property
    def mean(self) -> float:
        """Mean length."""
        return float(self.ordered.mean())

    def steps(self, replicas: int, items: int, done: int) -> float:
        """Expected steps until ``done`` of ``items`` items are finished on ``replicas`` replicas."""
        per_replica = items / replicas
        if not self.slots or per_replica <= self.slots:
            return expected_order_statistic(self.ordered, done, items)
        wave = self.slots * replicas
        drained = max(items - wave, 0)
        if done <= drained:  # full concurrency: items leave in proportion, but none before its own length
            first = expected_order_statistic(self.ordered, min(done, wave), wave) if done <= wave else 0.0
            return max(first, done / replicas * self.mean / self.slots)
        residual = self._residual()
        before = (per_replica * self.mean - self.slots * float(residual.mean())) / self.slots
        return before + expected_order_statistic(residual, max(done - drained, 1), wave)

    def fullest(self, replicas: int, items: int) -> float:
        """Expected tokens of the fullest of ``replicas`` replicas that share ``items`` items.

        Mean of a sum plus the expected largest of ``replicas`` standard normals (Blom's approximation) times its
        deviation: sums of many lengths are near normal even where lengths are not.
        """
        share = items / replicas
        blom = float(ndtri((replicas - 0.375) / (replicas + 0.25))) if replicas > 1 else 0.0
        return share * self.mean + blom * math.sqrt(share) * float(self.ordered.std())

    def seconds(self, replicas: int, items: int, done: int) -> float:
        """Expected seconds until ``done`` of ``items`` items are finished."""
        steps = self.steps(replicas, items, done)
        if done >= items:
            tokens = self.fullest(replicas, items)
        elif not self.slots or items / replicas <= self.slots:
            tokens = items / replicas * float(np.minimum(self.ordered, steps).mean())
        else:
            tokens = min(steps * self.slots, items / replicas * self.mean)
        return self.start + self.step * steps + self.token * tokens

    def scatter(self, replicas: int, items: int, points: int = 32) -> Floats:
        """Return how far a call's seconds lie from their mean, at evenly spaced quantiles; the longest item decides.

        The largest of ``m`` draws is below ``F^-1(u^(1/m))`` with probability ``u``.
        """
        level = (np.arange(points) + 0.5) / points
        queued = bool(self.slots) and items / replicas > self.slots
        lengths, draws = (self._residual(), self.slots * replicas) if queued else (self.ordered, items)
        longest = np.quantile(lengths, level ** (1.0 / draws))
        return np.asarray(self.step * (longest - longest.mean()))

    def _residual(self) -> Floats:
        """Quantiles of what is left of an item met in mid-work (equilibrium distribution of renewal theory)."""
        gaps = np.diff(self.ordered, prepend=0.0)
        alive = np.arange(len(self.ordered), 0, -1)
        mass = np.concatenate([[0.0], np.cumsum(gaps * alive)])
        points = np.concatenate([[0.0], self.ordered])
        grid = (np.arange(len(self.ordered)) + 0.5) / len(self.ordered) * mass[-1]
        return np.asarray(np.interp(grid, mass, points))
