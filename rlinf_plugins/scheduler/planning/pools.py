"""What a pool costs on each allotment, by the memory it may use."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PoolTable:
    """Costs of one pool over its device counts, ascending; rows that gain nothing are left out.

    Attributes:
        devices: Device counts of the pool; more of them than a row's need stay idle.
        first: Seconds to the first micro-batch; for a pool of a cycle, seconds of one turn of one sub-batch.
        busy: Seconds for the rest; zero for a pool of a cycle.
        switch: Seconds to bring the pool's stages in and put them away once.
        memory: Parts of a device's memory in use.
        resident: Whether the pool's stages stay loaded together; otherwise each micro-batch swaps them.
    """

    devices: Ints
    first: Floats
    busy: Floats
    switch: Floats
    memory: Ints
    resident: Bools


@dataclass(frozen=True, slots=True)
class PoolDraft:
    """A pool's costs before a memory limit says which allotments fit, and which stages stay loaded together.

    Attributes:
        devices: Device counts, ascending.
        first: Seconds to the first micro-batch, without swapping.
        busy: Seconds for the rest, without swapping.
        switch: Seconds to bring the pool's stages in and put them away once.
        together: Parts of a device's memory that all stages take.
        apart: Parts that the largest takes.
        swaps: Micro-batches; each swaps the stages where they do not stay loaded together.
    """

    devices: Ints
    first: Floats
    busy: Floats
    switch: Floats
    together: Ints
    apart: Ints
    swaps: int
    _tables: dict[int, PoolTable] = field(default_factory=dict)

    def table(self, limit: int) -> PoolTable:
        """Return the table under ``limit`` parts of a device; limits that allow the same share one table."""
        if limit not in self._tables:
            level = max(int(parts[parts <= limit].max(initial=-1)) for parts in (self.together, self.apart))
            if level not in self._tables:
                self._tables[level] = self._build(level)
            self._tables[limit] = self._tables[level]
        return self._tables[limit]

    def _build(self, limit: int) -> PoolTable:
        resident = self.together <= limit
        swap = np.where(resident, 0.0, self.switch)
        first, busy = self.first + swap, self.busy + (self.swaps - 1) * swap
        kept = _gains(self.apart <= limit, (first, busy, self.switch))
        return PoolTable(
            devices=self.devices[kept],
            first=first[kept],
            busy=busy[kept],
            switch=self.switch[kept],
            memory=np.where(resident, self.together, self.apart)[kept],
            resident=resident[kept],
        )


def _gains(allowed: Bools, columns: tuple[Floats, ...]) -> Ints:
    """Return the allowed rows at which some (non-increasing) column is below its value in all earlier allowed rows."""
    rows = np.flatnonzero(allowed)
    if len(rows) < 2:
        return rows
    better = np.zeros(len(rows), dtype=bool)
    better[0] = True
    for column in columns:
        values = column[rows]
        better[1:] |= values[1:] < np.minimum.accumulate(values)[:-1]
    return rows[better]
