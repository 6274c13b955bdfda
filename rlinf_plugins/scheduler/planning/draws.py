"""Service times for the simulator, drawn from a profile's raw samples.

Independent of the planner's cost code on purpose: another interpolation, another extrapolation, another regression for
the long tail, and noise from the samples themselves. Where both agree, neither is likely to be wrong.
"""

import copy
import heapq
import math
from collections import defaultdict
from itertools import islice
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlinf_plugins.core.errors import ProfileError
from rlinf_plugins.scheduler.planning.profile import Profile, StageProfile

CALIBRATION = 64
"""Batches whose mean a long tail is scaled by; fewer would scatter as much as the plans that are compared."""


class Draws:
    """Draws the durations of calls.

    Args:
        profile: Samples.
        rng: Source of randomness.
        noise: Whether calls scatter as the samples do; otherwise every call takes its mean.
    """

    def __init__(self, profile: Profile, rng: np.random.Generator, *, noise: bool = True) -> None:
        self._profile = profile
        self._rng = rng
        self._noise = noise
        self._grids: dict[tuple[str, str], dict[int, dict[int, NDArray[np.float64]]]] = {}
        self._scales: dict[tuple[str, str, int, int], float] = {}
        self._costs: dict[tuple[str, str], tuple[float, float, float]] = {}
        self._means: dict[tuple[str, str, int, float], float] = {}

    def with_rng(self, rng: np.random.Generator) -> Self:
        """Return draws from another source of randomness, sharing what was fitted."""
        other = copy.copy(self)
        other._rng = rng
        return other

    def call(self, name: str, kind: str, devices: int, items: float) -> float:
        """Return the seconds of one call on ``devices`` devices with ``items`` items."""
        mean = self.mean(name, kind, devices, items)
        if not self._noise:
            return mean
        cell = self._nearest_cell(name, kind, devices, items)
        return mean * float(self._rng.choice(cell) / cell.mean())

    def mean(self, name: str, kind: str, devices: int, items: float) -> float:
        """Return the expected seconds of one call."""
        key = (name, kind, devices, items)
        if key not in self._means:
            grid = self._grid(name, kind)
            rich = [size for size in grid if len(grid[size]) > 1 or devices in grid[size]]
            sizes = sorted(rich or grid)
            values = [self._over_devices(grid[size], devices) for size in sizes]
            self._means[key] = self._over_items(sizes, values, items)
        return self._means[key]

    def completions(
        self, name: str, kind: str, devices: int, replica: int, total: int, items: int
    ) -> NDArray[np.float64]:
        """Return when each micro-batch of a serving stage is complete if all ``total`` items are admitted at once.

        Without lengths the items leave at a constant rate. With them every item draws a length, replicas take items
        from one queue into their slots, and a step lasts longer the more items are active.
        """
        measured = self._stage(name)
        count = total // items
        if not measured.lengths:
            whole = self.call(name, kind, devices, total)
            return whole * (np.arange(count) + 1) / count
        replicas = max(devices // replica, 1)
        start, step, token = self._step_costs(name, kind, replica)
        lengths = self._rng.choice(np.asarray(measured.lengths), size=total)
        finished = start + np.sort(serve(lengths, replicas, measured.slots, step, token))
        scale = self._tail_scale(name, kind, devices, replicas, total, (start, step, token))
        return np.asarray(finished[items - 1 :: items] * scale)

    def switch(self, name: str, kind: str, devices: int) -> tuple[float, float]:
        """Return seconds to onload and to offload."""
        samples = [s for s in self._stage(name).switches if s.device_kind == kind]
        if not samples:
            return 0.0, 0.0
        counts = np.array([s.devices for s in samples])
        near = counts[np.argmin(np.abs(np.log(counts / devices)))]
        chosen = [s for s in samples if s.devices == near]
        return (
            float(np.mean([s.onload_seconds for s in chosen])),
            float(np.mean([s.offload_seconds for s in chosen])),
        )

    def slowdown(self, name: str, beside: set[str]) -> float:
        """Return the factor on calls while other stages run beside this one."""
        return math.prod(f for other, f in sorted(self._stage(name).slowdown.items()) if other in beside)

    def bytes_per_item(self, name: str) -> float:
        """Return what a stage sends per item."""
        return self._stage(name).bytes_per_item

    def sync(self, source: str, target: str, *, shared: bool) -> float:
        """Return the seconds of a weight transfer."""
        found = [s for s in self._profile.syncs if s.source == source and s.target == target]
        same = [s.seconds for s in found if s.shared is shared]
        return float(np.mean(same)) if same else float(np.mean([s.seconds for s in found])) if found else 0.0

    def _stage(self, name: str) -> StageProfile:
        if name not in self._profile.stages:
            raise ProfileError(f"no samples of {name}; the profile has {', '.join(self._profile.stages)}")
        return self._profile.stages[name]

    def _grid(self, name: str, kind: str) -> dict[int, dict[int, NDArray[np.float64]]]:
        if (name, kind) not in self._grids:
            cells: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
            for sample in self._stage(name).samples:
                if sample.device_kind == kind:
                    cells[sample.items][sample.devices].append(sample.seconds)
            if not cells:
                raise ProfileError(f"no samples of {name} on {kind} devices")
            self._grids[name, kind] = {m: {n: np.array(v) for n, v in row.items()} for m, row in cells.items()}
        return self._grids[name, kind]

    def _nearest_cell(self, name: str, kind: str, devices: int, items: float) -> NDArray[np.float64]:
        grid = self._grid(name, kind)
        cells = [(abs(math.log(m / items)) + abs(math.log(n / devices)), m, n) for m in grid for n in grid[m]]
        _, m, n = min(cells)
        return grid[m][n]

    @staticmethod
    def _over_devices(row: dict[int, NDArray[np.float64]], devices: int) -> float:
        counts = np.array(sorted(row), dtype=float)
        means = np.array([row[int(n)].mean() for n in counts])
        if counts[0] <= devices <= counts[-1]:
            return float(np.exp(np.interp(math.log(devices), np.log(counts), np.log(means))))
        if len(counts) == 1:
            return float(means[0] * max(counts[0] / devices, 1.0))
        # Straight line over 1 / n through the two nearest counts, neither negative in slope nor in intercept.
        a, b = (0, 1) if devices < counts[0] else (-2, -1)
        slope = max((means[a] - means[b]) / (1 / counts[a] - 1 / counts[b]), 0.0)
        edge = 0 if devices < counts[0] else -1
        slope = min(slope, means[edge] * counts[edge])
        return float(means[edge] + slope * (1 / devices - 1 / counts[edge]))

    @staticmethod
    def _over_items(sizes: list[int], values: list[float], items: float) -> float:
        if len(sizes) == 1:
            return values[0] * items / sizes[0]
        if items < sizes[0]:
            slope = max((values[1] - values[0]) / (sizes[1] - sizes[0]), 0.0)
            return min(max(values[0] - slope * (sizes[0] - items), values[0] * items / sizes[0]), values[0])
        if items > sizes[-1]:
            slope = max((values[-1] - values[-2]) / (sizes[-1] - sizes[-2]), 0.0)
            return values[-1] + slope * (items - sizes[-1])
        return float(np.interp(items, sizes, values))

    def _step_costs(self, name: str, kind: str, replica: int) -> tuple[float, float, float]:
        """Ordinary least squares of a call's seconds on its longest item and its tokens per replica."""
        if (name, kind) not in self._costs:
            self._costs[name, kind] = self._regressed(name, kind, replica)
        return self._costs[name, kind]

    def _regressed(self, name: str, kind: str, replica: int) -> tuple[float, float, float]:
        measured = self._stage(name)
        lengths = np.sort(np.array(measured.lengths))
        rows, seconds = [], []
        for sample in measured.samples:
            if sample.device_kind == kind:
                replicas = max(sample.devices // replica, 1)
                rows.append((1.0, *_load(lengths, replicas, measured.slots, sample.items)))
                seconds.append(sample.seconds)
        design, target = np.array(rows), np.array(seconds)
        if len({tuple(np.round(row, 9)) for row in rows}) < 3:
            return 0.0, float(target.mean() / design[:, 1].mean()), 0.0
        # Steps that never vary cannot be told from a constant: they are taken for steps.
        active = [0, 1, 2] if np.std(design[:, 1]) > 0.01 * design[:, 1].mean() else [1, 2]
        weight = 1.0 / target
        while True:  # drop a column with a negative coefficient and fit again
            solved = np.linalg.lstsq(design[:, active] * weight[:, None], np.ones_like(target), rcond=None)[0]
            if solved.min() >= 0 or len(active) == 1:
                break
            active.pop(int(np.argmin(solved * design[:, active].max(axis=0))))
        costs = [0.0, 0.0, 0.0]
        for column, value in zip(active, solved, strict=True):
            costs[column] = max(float(value), 0.0)
        return costs[0], costs[1], costs[2]

    def _tail_scale(
        self, name: str, kind: str, devices: int, replicas: int, total: int, costs: tuple[float, float, float]
    ) -> float:
        """Match the measured time of the largest measured call, which the regression misses by its residual."""
        key = (name, kind, devices, total)
        if key not in self._scales:
            measured = self._stage(name)
            items = min(total, max(self._grid(name, kind)))
            rng = np.random.default_rng(20_260_102)
            modelled = costs[0] + np.mean(
                [
                    serve(
                        rng.choice(np.asarray(measured.lengths), size=items), replicas, measured.slots, *costs[1:]
                    ).max()
                    for _ in range(CALIBRATION)
                ]
            )
            self._scales[key] = self.mean(name, kind, devices, items) / float(modelled) if modelled > 0 else 1.0
        return self._scales[key]


def _load(ordered: NDArray[np.float64], replicas: int, slots: int, items: int) -> tuple[float, float]:
    """Expected steps, and tokens of the fullest replica, of a call: means over a fixed set of drawn batches."""
    rng = np.random.default_rng(20_260_101)
    batches = [rng.choice(ordered, size=items) for _ in range(max(2, min(16, 4096 // items)))]
    steps = [serve(batch, replicas, slots, 1.0, 0.0).max() for batch in batches]
    tokens = [max(batch[replica::replicas].sum() for replica in range(min(replicas, items))) for batch in batches]
    return float(np.mean(steps)), float(np.mean(tokens))


def serve(lengths: NDArray[np.float64], replicas: int, slots: int, step: float, token: float) -> NDArray[np.float64]:
    """Return when each item is finished: replicas with slots, one queue dealt in turn, steps slowed by the load."""
    finished = np.empty(len(lengths))
    for replica in range(replicas):
        mine = range(replica, len(lengths), replicas)
        if not slots or len(mine) <= slots:  # all are active from the start, and leave by length
            order = np.argsort(lengths[mine], kind="stable")
            gaps = np.diff(lengths[mine][order], prepend=0.0)
            finished[np.asarray(mine, dtype=np.int64)[order]] = np.cumsum(
                gaps * (step + token * np.arange(len(mine), 0, -1))
            )
            continue
        waiting = iter(mine)
        # Ordered by the number of steps at which each active item is finished.
        active = [(float(lengths[item]), item) for item in islice(waiting, slots or len(lengths))]
        heapq.heapify(active)
        clock, reached = 0.0, 0.0
        while active:
            ends, item = heapq.heappop(active)
            clock += (ends - reached) * (step + token * (len(active) + 1))
            reached = ends
            finished[item] = clock
            for new in islice(waiting, 1):
                heapq.heappush(active, (reached + float(lengths[new]), new))
    return finished
