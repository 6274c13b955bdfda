"""Group filter: leave out groups whose episodes say too little, the all-failed and the all-solved ones.

What is left out leaves the loss's denominator too, so the gradient is the mean over what was kept, however many that
are. To collect further groups until the batch is full use veRL's own ``algorithm.filter_groups`` instead.
"""

from collections import defaultdict
from collections.abc import Sequence

from rlinf_plugins.core.errors import ConfigError


def check_bounds(bounds: Sequence[float], where: str) -> None:
    """Refuse bounds that no mean can meet.

    Raises:
        ConfigError: Not two numbers in order.
    """
    if len(bounds) != 2 or not bounds[0] <= bounds[1]:
        raise ConfigError(f"{where} must be [lowest, highest] mean return of a group, got {list(bounds)}")


def groups_to_drop(keys: Sequence[str], returns: Sequence[float], bounds: Sequence[float]) -> set[str]:
    """Return the ``uid`` of every group whose mean episode return lies outside ``bounds``.

    Where all would go none does: their advantages are near zero by themselves, and a step over nothing has no mean.

    Args:
        keys: ``{uid}_{session}_{index}`` of each row.
        returns: Of each row's episode.
        bounds: Lowest and highest mean return that is kept.
    """
    episodes: dict[str, dict[str, float]] = defaultdict(dict)
    for key, value in zip(keys, returns, strict=True):
        uid, session, _ = key.rsplit("_", 2)
        episodes[uid][session] = value
    means = {uid: sum(one.values()) / len(one) for uid, one in episodes.items()}
    outside = {uid for uid, mean in means.items() if not bounds[0] <= mean <= bounds[1]}
    return set() if len(outside) == len(means) else outside
