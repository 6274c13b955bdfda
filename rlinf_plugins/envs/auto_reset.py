"""Environments whose episode ended start the next one within the same call."""

from collections.abc import Callable, Collection
from typing import TypeAlias

from rlinf_plugins.envs.protocol import InitialState
from rlinf_plugins.envs.results import Batch

NextInitial: TypeAlias = Callable[[int], InitialState]
"""Given a slot, returns where its next episode starts."""


def auto_reset(
    batch: Batch,
    running: Collection[int],
    next_initial: NextInitial,
    reset: Callable[[list[InitialState], list[int]], Batch],
) -> None:
    """Start the next episode of the rows that are done and put its first observation into the batch.

    A row whose process is still being replaced stays frozen, so that it does not hold up the others; it is reset by
    the first call that finds it running.

    Args:
        batch: What a chunk gave; changed in place.
        running: Slots whose process is up.
        next_initial: Where the next episode of a slot starts.
        reset: The pool's reset.
    """
    rows = [row for row, slot in enumerate(batch.slots) if batch.done[row] and slot in running]
    slots = [batch.slots[row] for row in rows]
    if not slots:
        return
    for row, slot in zip(rows, slots, strict=True):
        batch.final_observation[slot] = {name: array[row].copy() for name, array in batch.observation.items()}
    first = reset([next_initial(slot) for slot in slots], slots)
    for position, row in enumerate(rows):
        for name, array in batch.observation.items():
            array[row] = first.observation[name][position]
        batch.task_descriptions[row] = first.task_descriptions[position]
