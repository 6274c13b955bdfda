"""What a step's trajectories searched, from the fields that the agent loops leave in their rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlinf_plugins.core.errors import RolloutFailedError

_MEANS = ("calls", "invalid_actions", "cut_observations", "wait_s")


def search_metrics(
    tags: Sequence[Mapping[str, Any]], fields: Iterable[Mapping[str, Any]], max_failed_fraction: float
) -> dict[str, float]:
    """Average the searches of a step; rows added as padding, and trajectories that cannot search, do not count.

    Args:
        tags: TransferQueue's tags of the rows.
        fields: Their ``extra_fields``.
        max_failed_fraction: Share of trajectories whose search may fail.

    Returns:
        ``search/{calls,invalid_actions,cut_observations,wait_s}/{mean,max}``, ``search/failed_fraction``,
        ``search/failed/{kind}`` (trajectories) and ``search/end/{reason}`` (share).

    Raises:
        RolloutFailedError: More trajectories failed, and were masked, than allowed: such a step trains on nothing.
    """
    rows = [
        row
        for tag, row in zip(tags, fields, strict=True)
        if "search_failure" in row and not tag.get("is_padding", False)
    ]
    if not rows:
        return {}
    total = len(rows)
    metrics = {}
    for name in _MEANS:
        # The native tool reports failures only.
        values = [row[f"search_{name}"] for row in rows if f"search_{name}" in row]
        if values:
            metrics[f"search/{name}/mean"] = sum(values) / len(values)
            metrics[f"search/{name}/max"] = float(max(values))
    ends = Counter(row["search_end"] for row in rows if "search_end" in row)
    metrics.update({f"search/end/{end}": count / total for end, count in ends.items()})
    kinds = Counter(row["search_failure"] for row in rows if row["search_failure"])
    metrics.update({f"search/failed/{kind}": float(count) for kind, count in kinds.items()})
    metrics["search/failed_fraction"] = kinds.total() / total
    if kinds.total() > max_failed_fraction * total:
        causes = ", ".join(f"{kind} ({count})" for kind, count in kinds.most_common())
        raise RolloutFailedError(
            f"the search of {kinds.total()} of {total} trajectories failed, more than "
            f"trainer.v1.m2flow.max_failed_fraction={max_failed_fraction:g} allows: {causes}; look at the retrieval "
            "server's log and health"
        )
    return metrics
