"""The switches of a step as numbers for its metrics and as lines for people."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlinf_plugins.core.spans import Span

ASKED_TO_LEAVE = "asked to leave"
"""Reason of an eviction that makes room for nobody in particular."""


def switch_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """Count the switches among ``spans``.

    Returns:
        ``sharing/switches``; ``sharing/switch_s``, ``sharing/onload_s`` and ``sharing/offload_s`` in seconds;
        ``sharing/bytes_in`` and ``sharing/bytes_out``; ``sharing/waiters``, the most that waited at a switch;
        ``sharing/{resident}/onloads`` and ``/offloads`` of those that moved, their seconds ``/onload_s`` and
        ``/offload_s``; and why: how often somebody left so that another could come, as
        ``sharing/{resident}/left_for/{other}``.
    """
    found = _switches(spans)
    moves = {move: [span for span in spans if span.name == move] for move in ("onload", "offload")}
    metrics = {
        "sharing/switches": float(len(found)),
        "sharing/switch_s": sum(span.seconds for span in found),
        "sharing/bytes_in": float(sum(span.attributes["bytes"] for span in moves["onload"])),
        "sharing/bytes_out": float(sum(span.attributes["bytes"] for span in moves["offload"])),
        "sharing/waiters": float(max((span.attributes.get("waiters", 0) for span in found), default=0)),
    }
    for move, done in moves.items():
        metrics[f"sharing/{move}_s"] = sum(span.seconds for span in done)
        for resident, count in Counter(span.attributes["resident"] for span in done).items():
            mine = [span.seconds for span in done if span.attributes["resident"] == resident]
            metrics[f"sharing/{resident}/{move}s"] = float(count)
            metrics[f"sharing/{resident}/{move}_s"] = sum(mine)
    reasons = Counter(
        (gone, span.attributes["resident"]) for span in found for gone in span.attributes.get("evicted", ())
    )
    for (gone, other), count in reasons.items():
        metrics[f"sharing/{gone}/left_for/{other}"] = float(count)
    return metrics


def switch_lines(spans: Sequence[Span]) -> list[str]:
    """Describe each switch among ``spans``: who came, who left for it, why, bytes and seconds."""
    return [_line(span) for span in _switches(spans)]


def _switches(spans: Sequence[Span]) -> list[Span]:
    """Switches, and evictions that are no part of one."""
    return [
        span
        for span in spans
        if span.name == "switch" or (span.name == "evict" and span.attributes["reason"] == ASKED_TO_LEAVE)
    ]


def _line(span: Span) -> str:
    of: dict[str, Any] = span.attributes
    if span.name == "evict":
        return f"{of['resident']} left ({of['reason']}) in {span.seconds:.3f} s"
    gone = f", {' and '.join(of['evicted'])} left" if of.get("evicted") else ""
    return (
        f"{of['resident']} came{gone} ({of['reason']}; {of.get('bytes_in', 0)} bytes in, {of.get('bytes_out', 0)} out, "
        f"{of['waiters']} waiting) in {span.seconds:.3f} s"
    )
