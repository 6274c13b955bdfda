"""Gantt charts of a simulated step: text for the terminal, a self-contained HTML page for the browser."""

import html
from collections import defaultdict

from rlinf_plugins.core.spans import Span
from rlinf_plugins.scheduler.planning.plan import Plan

SHADES = "█▓▒░▞▚▙▟"

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d")


def text_gantt(plan: Plan, spans: tuple[Span, ...], seconds: float, columns: int = 100) -> str:
    """Return one line of at most ``columns`` characters per pool; each stage has a shade, explained below."""
    shade = {name: SHADES[i % len(SHADES)] for i, name in enumerate(plan.stages())}
    label = max((len(_label(plan, pool)) for pool in _pools(plan)), default=0)
    width = max(columns - label - 2, 20)
    lines = []
    for pool in _pools(plan):
        cells: list[dict[str, float]] = [defaultdict(float) for _ in range(width)]
        for span in spans:
            if span.actor == pool:
                _fill(cells, span, seconds, width)
        row = "".join(shade[max(sorted(cell), key=cell.__getitem__)] if cell else "·" for cell in cells)
        lines.append(f"{_label(plan, pool):>{label}} {row}")
    lines.append(f"{'':>{label}} 0 s{seconds:>{width - 5}.4g} s")
    lines.append(f"{'':>{label}} " + "  ".join(f"{shade[name]} {name}" for name in plan.stages()))
    return "\n".join(lines)


def html_gantt(plan: Plan, spans: tuple[Span, ...], seconds: float) -> str:
    """Return a page with the chart, the plan's table and its reasons; nothing is loaded from elsewhere."""
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(plan.stages())}
    pools = _pools(plan)
    left, row, scale = 220, 30, 900 / seconds if seconds else 0.0
    bars = []
    for index, pool in enumerate(pools):
        top = 10 + index * row
        bars.append(f'<text x="{left - 8}" y="{top + 17}" text-anchor="end">{html.escape(_label(plan, pool))}</text>')
        for span in spans:
            if span.actor == pool:
                words = f"{span.name}, {span.start:.4g} s to {span.end:.4g} s, {_details(span)}"
                bars.append(
                    f'<rect x="{left + span.start * scale:.2f}" y="{top}" width="{max(span.seconds * scale, 0.3):.2f}" '
                    f'height="{row - 6}" fill="{colour[span.name]}"><title>{html.escape(words)}</title></rect>'
                )
    bottom = 10 + len(pools) * row
    for tick in range(11):
        x = left + tick * 90
        bars.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{seconds * tick / 10:.4g}</text>')
    legend = " ".join(
        f'<span style="color:{colour[name]}">&#9632;</span> {html.escape(name)}' for name in plan.stages()
    )
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in r) + "</tr>" for r in plan.rows())
    notes = "".join(f"<li>{html.escape(line)}</li>" for line in (*plan.reasons, *plan.warnings))
    others = "".join(
        f"<tr><td>{html.escape(a.summary)}</td><td>{a.seconds:.4g} s</td><td>{html.escape(a.reason)}</td></tr>"
        for a in plan.alternatives
    )
    return (
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(plan.flow)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}"
        "svg text{font-size:12px}</style>"
        f"<h1>{html.escape(plan.flow)}: {plan.seconds:.4g} s a step, {plan.mode}</h1><p>{legend}</p>"
        f'<svg width="{left + 940}" height="{bottom + 24}">{"".join(bars)}</svg>'
        "<table><tr><th>phase<th>stage<th>devices<th>numbers<th>shares with<th>micro-batch<th>remark</tr>"
        f"{rows}</table><ul>{notes}</ul><h2>Alternatives</h2><table>{others}</table>"
    )


def _pools(plan: Plan) -> list[str]:
    return ["+".join(pool.stages) for phase in plan.phases for pool in phase.pools]


def _label(plan: Plan, name: str) -> str:
    for phase in plan.phases:
        for pool in phase.pools:
            if "+".join(pool.stages) == name:
                return f"{name} ({pool.devices})"
    return name


def _fill(cells: list[dict[str, float]], span: Span, seconds: float, width: int) -> None:
    start, end = span.start / seconds * width, span.end / seconds * width
    for cell in range(max(int(start), 0), min(int(end) + 1, width)):
        overlap = min(end, cell + 1) - max(start, cell)
        if overlap > 0.05:
            cells[cell][span.name] += overlap


def _details(span: Span) -> str:
    return f"phase {span.attributes['phase']}, micro-batch {span.attributes['micro_batch']}"
