"""The exact best split of the devices over the pools of one phase.

The phase's time is a non-increasing function of every pool's count, so a bound ``V`` on it bounds every count from
below and, since devices are finite, from above. What such a window leaves is enumerated; where that is too much, a
Lagrangian bound (prices on devices, convex weights on the pieces of the maxima) removes rows first. Nothing is cut off
that could be better than the bound, so the result is exact.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_plugins.scheduler.planning.cost import MEMORY_UNITS, Floats, Ints
from rlinf_plugins.scheduler.planning.phase import Phase
from rlinf_plugins.scheduler.planning.pools import PoolTable
from rlinf_plugins.scheduler.planning.pricing import TINY, priced_rows

DIRECT = 300_000
"""Splits that are enumerated without a Lagrangian bound."""

CHUNK = 1_000_000
"""Splits that are evaluated at once."""


@dataclass(frozen=True, slots=True)
class Split:
    """A split of the devices: seconds and the row of each pool's table."""

    seconds: float
    rows: tuple[int, ...]


class SplitProblem:
    """One phase shape, its pools' tables and the devices to share out.

    Args:
        phase: The phase.
        totals: Devices of each kind.
        limit: Memory limit in parts of a device.
        switch: Whether the phase's stages are brought in and put away.
        tables: Tables to use instead of the phase's own (already filtered).
    """

    def __init__(
        self,
        phase: Phase,
        totals: dict[str, int],
        *,
        limit: int = MEMORY_UNITS,
        switch: bool = False,
        tables: list[PoolTable] | None = None,
    ) -> None:
        self.phase = phase
        self.tables = phase.tables(limit) if tables is None else tables
        self.switch = switch
        self.kinds = [(totals[k], [i for i, p in enumerate(phase.kinds) if p == k]) for k in dict.fromkeys(phase.kinds)]
        self._low = [0] * len(self.tables)
        self._high = [len(table.devices) - 1 for table in self.tables]
        self.feasible = min(self._high) >= 0 and self._shrink_high()
        self._rising: list[Floats] = []

    def lower_bound(self) -> float:
        """Return seconds that no split beats (infinite where none is feasible)."""
        if not self.feasible:
            return math.inf
        profiles = [self._profile(index) for index in range(len(self.tables))]
        self._rising = [-profile for profile in profiles]
        low = max(float(profile[-1]) for profile in profiles)
        if len(self.tables) == 1 or self._fits(low):
            return low
        high = max(float(profile[0]) for profile in profiles)
        for _ in range(14):
            middle = (low + high) / 2
            if self._fits(middle):
                high = middle
            else:
                low = middle
        return low

    def solve(self, upper: float) -> Split | None:
        """Return the best split whose seconds are below ``upper``; None where there is none."""
        if not self.feasible:
            return None
        windows = list(self._low), list(self._high)
        best = Split(upper, ())
        # Most problems end here: their rows cannot beat what is known, or so few can that all are tried at once.
        if math.isinf(upper) or self._narrow(upper):
            if self._combinations() > DIRECT:
                climbed = self._climb()
                if climbed.seconds < upper * (1 - TINY):
                    best = climbed
            if best.rows == () or self._narrow(best.seconds):
                best = self._search(best)
        self._low, self._high = windows  # the next bound asked for may be a higher one
        return best if best.rows else None

    def counts(self, split: Split) -> tuple[int, ...]:
        """Return the device count of every pool."""
        return tuple(int(table.devices[row]) for table, row in zip(self.tables, split.rows, strict=True))

    def memory(self, split: Split) -> int:
        """Return the peak of any device in parts of its memory."""
        return max(int(table.memory[row]) for table, row in zip(self.tables, split.rows, strict=True))

    def seconds(self, rows: list[Any]) -> Any:
        """Return the phase's seconds for rows of the pools' tables (scalars or arrays)."""
        first = [table.first[row] for table, row in zip(self.tables, rows, strict=True)]
        busy = [table.busy[row] for table, row in zip(self.tables, rows, strict=True)]
        switch = [table.switch[row] for table, row in zip(self.tables, rows, strict=True)] if self.switch else None
        return self.phase.seconds(first, busy, switch)

    def _shrink_high(self) -> bool:
        """Lower each pool's highest row to what the others leave; False where they leave too little."""
        for total, pools in self.kinds:
            needed = [int(self.tables[i].devices[self._low[i]]) for i in pools]
            for i, own in zip(pools, needed, strict=True):
                room = total - sum(needed) + own
                table = self.tables[i].devices
                self._high[i] = min(self._high[i], int(table.searchsorted(room, side="right")) - 1)
                if self._high[i] < self._low[i]:
                    return False
        return True

    def _profile(self, index: int) -> Floats:
        """Seconds as a function of one pool's row while every other pool has its highest row: a lower bound."""
        rows: list[Any] = list(self._high)
        rows[index] = np.arange(self._low[index], self._high[index] + 1)
        return np.broadcast_to(self.seconds(rows), rows[index].shape)

    def _fits(self, bound: float) -> bool:
        for total, pools in self.kinds:
            used = 0
            for i in pools:
                row = int(self._rising[i].searchsorted(-bound * (1 + TINY)))
                if row == len(self._rising[i]):
                    return False
                used += int(self.tables[i].devices[self._low[i] + row])
            if used > total:
                return False
        return True

    def _narrow(self, bound: float) -> bool:
        """Shrink the windows to the rows that can be below ``bound``; False where none is left."""
        while True:
            before = (list(self._low), list(self._high))
            for i in range(len(self.tables)):
                profile = self._profile(i)
                self._low[i] += int((-profile).searchsorted(-bound * (1 + TINY)))
                if self._low[i] > self._high[i]:
                    return False
            if not self._shrink_high():
                return False
            if before == (self._low, self._high):
                return True

    def _combinations(self) -> int:
        """Number of splits in the windows; the last pool takes what is left."""
        sizes = sorted(high - low + 1 for low, high in zip(self._low, self._high, strict=True))
        return math.prod(sizes[:-1])

    def _climb(self) -> Split:
        """Return a good split: start from the bottleneck's, then move devices between pools while it helps."""
        rows = [int(self._low[i]) for i in range(len(self.tables))]
        profiles = [self._profile(i) for i in range(len(self.tables))]
        for total, pools in self.kinds:
            _level(rows, pools, total, self.tables, profiles, self._low)
        best = float(self.seconds(list(rows)))
        while True:
            moves = self._moves(rows)
            if not len(moves):
                return Split(best, tuple(rows))
            values = np.asarray(self.seconds([moves[:, i] for i in range(len(rows))]))
            chosen = int(np.argmin(values))
            if values[chosen] >= best * (1 - TINY):
                return Split(best, tuple(rows))
            best, rows = float(values[chosen]), [int(row) for row in moves[chosen]]

    def _moves(self, rows: list[int]) -> Ints:
        found = []
        for total, pools in self.kinds:
            used = sum(int(self.tables[i].devices[rows[i]]) for i in pools)
            for giver in pools:
                for step in (0, 1, 2, 4, 16, 64):
                    left = rows[giver] - step
                    if left < 0:
                        break
                    spare = (
                        total - used + int(self.tables[giver].devices[rows[giver]] - self.tables[giver].devices[left])
                    )
                    for taker in pools:
                        if taker == giver:
                            continue
                        reach = int(self.tables[taker].devices[rows[taker]]) + spare
                        row = int(self.tables[taker].devices.searchsorted(reach, side="right")) - 1
                        if row > rows[taker]:
                            moved = list(rows)
                            moved[giver], moved[taker] = left, row
                            found.append(moved)
        return np.asarray(found, dtype=np.int64).reshape(-1, len(rows))

    def _search(self, best: Split) -> Split:
        survivors = [np.arange(low, high + 1) for low, high in zip(self._low, self._high, strict=True)]
        extra: list[Floats] = [np.zeros(len(rows)) for rows in survivors]
        base = 0.0
        if math.prod(len(rows) for rows in sorted(survivors, key=len)[:-1]) > DIRECT:
            survivors, extra, base = priced_rows(
                self.phase, self.tables, self.kinds, self.switch, survivors, best.seconds
            )
        order = sorted(range(len(survivors)), key=lambda i: (len(survivors[i]), i))
        return _enumerate(self, survivors, extra, base, order, best)


def _level(
    rows: list[int], pools: list[int], total: int, tables: list[PoolTable], profiles: list[Floats], low: list[int]
) -> None:
    """Give devices to the pool whose bound is worst until they run out, by bisection over the bound."""
    below, above = max(float(profiles[i][-1]) for i in pools), max(float(profiles[i][0]) for i in pools)
    rising = {i: -profiles[i] for i in pools}
    for _ in range(20):
        middle = (below + above) / 2
        tried = [low[i] + int(rising[i].searchsorted(-middle)) for i in pools]
        if all(row < low[i] + len(profiles[i]) for row, i in zip(tried, pools, strict=True)) and (
            sum(int(tables[i].devices[row]) for row, i in zip(tried, pools, strict=True)) <= total
        ):
            above = middle
            for row, i in zip(tried, pools, strict=True):
                rows[i] = row
        else:
            below = middle


def _enumerate(
    problem: SplitProblem, survivors: list[Ints], extra: list[Floats], base: float, order: list[int], best: Split
) -> Split:
    """Evaluate every combination of surviving rows that fits, in chunks; bounds tighten as better ones are found."""
    tables = problem.tables
    kind_of = {i: number for number, (_, pools) in enumerate(problem.kinds) for i in pools}
    totals = [total for total, _ in problem.kinds]
    if not all(len(rows) for rows in survivors):
        return best
    least = [int(table.devices[rows[0]]) for table, rows in zip(tables, survivors, strict=True)]

    def grow(level: int, rows: NDArray[np.int64], used: NDArray[np.int64], cost: Floats, found: Split) -> Split:
        if level == len(order):
            values = np.broadcast_to(
                problem.seconds([rows[:, order.index(i)] for i in range(len(tables))]), rows.shape[:1]
            )
            chosen = int(np.argmin(values))
            if values[chosen] < found.seconds * (1 - TINY):
                picked = {i: int(rows[chosen, place]) for place, i in enumerate(order)}
                found = Split(float(values[chosen]), tuple(picked[i] for i in range(len(tables))))
            return found
        i = order[level]
        kind = kind_of[i]
        later = [j for j in order[level + 1 :] if kind_of[j] == kind]
        reserve = sum(least[j] for j in later)
        step = max(CHUNK // max(len(survivors[i]), 1), 1)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            counts = tables[i].devices[survivors[i]]
            room = totals[kind] - reserve - used[part, kind]
            if later:
                total_cost = cost[part, None] + extra[i][None, :]
                fits = (counts[None, :] <= room[:, None]) & (total_cost <= found.seconds * (1 + 1e-9) - base)
                left, right = np.nonzero(fits)
            else:  # the last pool of a kind takes the largest surviving row that fits
                right = np.searchsorted(counts, room, side="right") - 1
                left = np.flatnonzero(right >= 0)
                right = right[left]
            if not len(left):
                continue
            grown = np.column_stack([rows[part][left], survivors[i][right]])
            taken = used[part][left].copy()
            taken[:, kind] += counts[right]
            costs = cost[part][left] + extra[i][right]
            if level + 2 < len(order):
                kept = np.flatnonzero(reach(level + 1, grown, taken) < found.seconds * (1 - TINY))
                grown, taken, costs = grown[kept], taken[kept], costs[kept]
            found = grow(level + 1, grown, taken, costs, found)
        return found

    def reach(level: int, rows: NDArray[np.int64], used: NDArray[np.int64]) -> Floats:
        """Seconds that no completion of these beginnings beats: every further pool takes all that the others leave."""
        picked: dict[int, Any] = {i: rows[:, place] for place, i in enumerate(order[:level])}
        for i in order[level:]:
            needed = sum(least[j] for j in order[level:] if kind_of[j] == kind_of[i] and j != i)
            room = totals[kind_of[i]] - needed - used[:, kind_of[i]]
            place = tables[i].devices[survivors[i]].searchsorted(room, side="right") - 1
            picked[i] = survivors[i][np.maximum(place, 0)]
        return np.broadcast_to(problem.seconds([picked[i] for i in range(len(tables))]), rows.shape[:1])

    empty = np.zeros((1, 0), dtype=np.int64)
    return grow(0, empty, np.zeros((1, len(totals)), dtype=np.int64), np.zeros(1), best)
