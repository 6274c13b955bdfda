"""What the rewards said about a step: success, return, length, or whatever the reward function reports."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def reward_info_metrics(
    keys: Sequence[str], tags: Sequence[Mapping[str, Any]], infos: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """Average the numbers of ``reward_extra_info`` over trajectories.

    A trajectory may have several rows (turns, action chunks); its last row counts, rows added as padding do not.

    Args:
        keys: TransferQueue keys ``{uid}_{session}_{index}`` of the rows.
        tags: Their tags.
        infos: Their ``reward_extra_info``.

    Returns:
        ``rollout/{name}/mean`` for each name, over the trajectories that report it.
    """
    last: dict[str, tuple[int, Mapping[str, Any]]] = {}
    for key, tag, info in zip(keys, tags, infos, strict=True):
        if tag.get("is_padding", False):
            continue
        trajectory, _, index = key.rpartition("_")
        if trajectory not in last or int(index) > last[trajectory][0]:
            last[trajectory] = (int(index), info)
    values: dict[str, list[float]] = defaultdict(list)
    for _, info in last.values():
        for name, value in info.items():
            if isinstance(value, int | float):
                values[name].append(float(value))
    return {f"rollout/{name}/mean": sum(numbers) / len(numbers) for name, numbers in values.items()}
