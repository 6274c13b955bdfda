"""Monotone fits: time and memory of a component over devices and items, faithful where it was measured.

Inside the measured range: isotonic regression over devices (pool adjacent violators; more devices never slower), then
interpolation in log-log. Outside: Amdahl's law ``a + b / n`` with non-negative terms, fitted to the isotonic values and
joined at the edge. Between granularities: linear. ``extrapolates`` flags whatever lies outside the measured box.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, nnls

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A non-increasing positive function of the device count, for one granularity.

    Attributes:
        devices: Measured device counts, ascending.
        values: Isotonic values at those counts.
        fixed: ``a`` of Amdahl's law.
        shared: ``b`` of Amdahl's law.
        violations: Device counts whose mean was above that of a smaller count (kept, pooled by the fit).
    """

    devices: Floats
    values: Floats
    fixed: float
    shared: float
    violations: tuple[int, ...]

    @classmethod
    def fit(cls, devices: Sequence[int], means: Sequence[float], weights: Sequence[float]) -> Self:
        """Fit the curve to the mean at each device count (ascending)."""
        n = np.asarray(devices, dtype=float)
        raw = np.asarray(means, dtype=float)
        values = np.asarray(isotonic_regression(raw, weights=np.asarray(weights, dtype=float), increasing=False).x)
        rising = np.flatnonzero(np.diff(np.minimum.accumulate(raw) - raw) < 0) + 1
        violations = tuple(int(n[i]) for i in rising if raw[i] > raw[i - 1])
        scale = max(float(values.max()), 1e-300)
        if len(n) == 1:
            fixed, shared = 0.0, float(values[0] * n[0])
        else:
            (fixed, shared), _ = nnls(np.stack([np.ones_like(n), n[0] / n], axis=1), values / scale)
            fixed, shared = float(fixed * scale), float(shared * scale * n[0])
        return cls(devices=n, values=values, fixed=fixed, shared=shared, violations=violations)

    def at(self, n: Floats) -> Floats:
        """Return the values at device counts ``n`` (any shape)."""
        if self.values.max() <= 0:
            return np.zeros_like(n)
        floor = max(float(self.values[self.values > 0].min()) * 1e-9, 1e-300)
        inside = np.exp(np.interp(np.log(n), np.log(self.devices), np.log(np.maximum(self.values, floor))))
        # One measured count says nothing about gains beyond it: flat upwards, perfectly shared downwards (pessimistic).
        first, last = self.devices[0], self.devices[-1]
        below = self.values[0] * self._law(n) / self._law(first)
        above = self.values[-1] if len(self.devices) == 1 else self.values[-1] * self._law(n) / self._law(last)
        exact = np.isin(n, self.devices)
        result = np.where(n < first, below, np.where(n > last, above, inside))
        if exact.any():
            result = np.where(exact, self.values[np.searchsorted(self.devices, np.where(exact, n, first))], result)
        return np.asarray(result)

    def _law(self, n: Floats | float) -> Floats:
        return np.asarray(self.fixed + self.shared / np.asarray(n, dtype=float))


@dataclass(frozen=True, slots=True)
class Surface:
    """A function of devices (non-increasing) and items (non-decreasing).

    Attributes:
        items: Measured granularities, ascending.
        curves: One curve per granularity.
        amount: ``"time"``: below the measured granularities the value shrinks at most in proportion. ``"memory"``:
            it does not shrink there, since parameters do not.
    """

    items: tuple[int, ...]
    curves: tuple[Curve, ...]
    amount: Literal["time", "memory"]

    @classmethod
    def fit(
        cls, devices: Sequence[int], items: Sequence[int], values: Sequence[float], amount: Literal["time", "memory"]
    ) -> Self:
        """Fit to samples; several samples of one cell are reduced first, times to their mean, memory to its peak."""
        cells: dict[int, dict[int, list[float]]] = {}
        for n, m, value in zip(devices, items, values, strict=True):
            cells.setdefault(m, {}).setdefault(n, []).append(value)
        curves = []
        for m in sorted(cells):
            counts = sorted(cells[m])
            reduced = [float(np.mean(cells[m][n])) if amount == "time" else max(cells[m][n]) for n in counts]
            curves.append(Curve.fit(counts, reduced, [len(cells[m][n]) for n in counts]))
        return cls(items=tuple(sorted(cells)), curves=tuple(curves), amount=amount)

    def at(self, n: NDArray[np.int64], m: float) -> Floats:
        """Return the values at device counts ``n`` (ascending) for ``m`` items."""
        counts = np.asarray(n, dtype=float)
        if self.amount == "memory":
            m = max(m, self.items[0])
        if m in self.items:
            values = self._row(self.items.index(int(m)), counts)
        elif len(self.items) == 1:
            values = self._row(0, counts) * (m / self.items[0] if self.amount == "time" else 1.0)
        else:
            right = int(np.clip(np.searchsorted(self.items, m), 1, len(self.items) - 1))
            low, high = self._row(right - 1, counts), self._row(right, counts)
            m0, m1 = self.items[right - 1], self.items[right]
            if m < m0 or m > m1:  # outside, more items never take less
                high = np.maximum(low, high)
            values = low + (high - low) / (m1 - m0) * (m - m0)
            if m < m0:  # below the box: no dearer than in proportion
                values = np.maximum(values, low * (m / m0))
        return np.minimum.accumulate(values)

    def _row(self, index: int, counts: Floats) -> Floats:
        """Return one granularity's values; one measured at a single count borrows its neighbour's shape."""
        curve = self.curves[index]
        if len(curve.devices) > 1:
            return curve.at(counts)
        richer = [i for i, other in enumerate(self.curves) if len(other.devices) > 1]
        if not richer:
            return curve.at(counts)
        near = self.curves[min(richer, key=lambda i: abs(math.log(self.items[i] / self.items[index])))]
        here = near.at(curve.devices)
        return curve.at(counts) if here[0] <= 0 else curve.values[0] * near.at(counts) / here[0]

    def extrapolates(self, n: int, m: float) -> bool:
        """Say whether (n, m) lies outside the measured box."""
        counts = [count for curve in self.curves for count in (curve.devices[0], curve.devices[-1])]
        return not (min(counts) <= n <= max(counts) and self.items[0] <= m <= self.items[-1])
