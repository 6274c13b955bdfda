"""Mini-batches when a trajectory has several rows (action chunks, turns).

veRL counts ``ppo_mini_batch_size`` prompts times ``rollout.n`` trajectories as rows. Where a trajectory is many rows
that would turn one intended update into dozens, so the number of updates a step is kept instead:
``data.train_batch_size / ppo_mini_batch_size``, as with one row a trajectory.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig, open_dict


def rows_per_update(rows: int, *, updates: int, multiple: int) -> int:
    """Return the rows of one mini-batch: an even share of ``rows``, rounded up to ``multiple``."""
    return math.ceil(math.ceil(rows / updates) / multiple) * multiple


@contextmanager
def sized_for(config: DictConfig, rows: int, devices: int) -> Iterator[None]:
    """Let veRL's arithmetic inside the block make the intended number of updates out of ``rows`` rows.

    Args:
        config: veRL's whole configuration; ``actor.ppo_mini_batch_size`` is changed for the block where there are more
            rows than trajectories. With a separate critic nothing is changed: its own mini-batches must divide too.
        rows: Rows of the step, before padding.
        devices: Data-parallel size of the actor.
    """
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    original = actor.ppo_mini_batch_size
    if rows > prompts * n and not config.critic.enable:
        micro = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
        share = rows_per_update(rows, updates=prompts // original, multiple=math.lcm(n, micro * devices))
        with open_dict(config):
            actor.ppo_mini_batch_size = share // n
    try:
        yield
    finally:
        with open_dict(config):
            actor.ppo_mini_batch_size = original
