"""A Lagrangian bound on the split of devices over pools, and the rows it rules out.

A phase's time is a maximum of linear functions of its pools' costs. Any convex mixture of them, with a price on every
device, is a separable lower bound; the mixture is improved by fictitious play between the pieces that bind and the
rows that answer them. A row whose reduced cost exceeds the gap between the best plan known and the bound cannot be in
a better plan.
"""

import math

import numpy as np

from rlinf_plugins.scheduler.planning.cost import Floats, Ints
from rlinf_plugins.scheduler.planning.phase import Phase
from rlinf_plugins.scheduler.planning.pools import PoolTable

TINY = 1e-12
"""Relative difference below which two times count as equal."""


def priced_rows(
    phase: Phase,
    tables: list[PoolTable],
    kinds: list[tuple[int, list[int]]],
    switch: bool,
    survivors: list[Ints],
    upper: float,
) -> tuple[list[Ints], list[Floats], float]:
    """Remove rows by reduced cost under a Lagrangian bound.

    Args:
        phase: The phase.
        tables: Its pools' tables.
        kinds: Devices of each kind and the pools that share them.
        switch: Whether switching counts.
        survivors: Rows of each pool that are still possible.
        upper: Seconds to stay below.

    Returns:
        The rows left of each pool, their reduced costs, and the bound they add to.
    """
    columns = [np.stack([t.first[r], t.busy[r], t.switch[r]]) for t, r in zip(tables, survivors, strict=True)]
    devices = [t.devices[r].astype(float) for t, r in zip(tables, survivors, strict=True)]
    picks = [len(rows) - 1 for rows in survivors]
    best_bound, best_costs = -math.inf, [np.zeros(len(rows)) for rows in survivors]
    weights, constant = np.zeros((3, len(tables))), 0.0
    prices = [upper / total for total, _ in kinds]
    for round_ in range(60):
        chosen = [column[:, pick] for column, pick in zip(columns, picks, strict=True)]
        entering = [float(c[2]) for c in chosen] if switch else None
        piece, offset = phase.active([float(c[0]) for c in chosen], [float(c[1]) for c in chosen], entering)
        share = 2.0 / (round_ + 2.0)
        weights, constant = (1 - share) * weights + share * piece, (1 - share) * constant + share * offset
        values = [weights[:, i] @ columns[i] for i in range(len(tables))]
        bound, costs = constant, [np.zeros(0)] * len(tables)
        for number, (total, pools) in enumerate(kinds):
            prices[number] = _price(values, devices, pools, total, prices[number])
            bound -= prices[number] * total
            for i in pools:
                cost = values[i] + prices[number] * devices[i]
                picks[i] = int(np.argmin(cost))
                bound += float(cost[picks[i]])
                costs[i] = cost - cost[picks[i]]
        if bound > best_bound:
            best_bound, best_costs = bound, costs
    slack = upper * (1 + TINY) - best_bound + 1e-9 * abs(upper)
    kept = [np.flatnonzero(cost <= slack) for cost in best_costs]
    return (
        [rows[keep] for rows, keep in zip(survivors, kept, strict=True)],
        [cost[keep] for cost, keep in zip(best_costs, kept, strict=True)],
        best_bound,
    )


def _price(values: list[Floats], devices: list[Floats], pools: list[int], total: int, guess: float) -> float:
    """Return the smallest price (within a few per cent) at which the pools together want at most ``total`` devices."""

    def wanted(price: float) -> float:
        return sum(float(devices[i][int(np.argmin(values[i] + price * devices[i]))]) for i in pools)

    low, high = 0.0, max(guess, TINY)
    while wanted(high) > total and high < 1e300:
        low, high = high, 4 * high
    for _ in range(10):
        middle = (low + high) / 2 if low == 0.0 else math.sqrt(low * high)
        if wanted(middle) > total:
            low = middle
        else:
            high = middle
    return high
