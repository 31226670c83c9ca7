"""The report of runs as one HTML page, that is read without a network: tables, and plots as SVG inside it (svg.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gangline.core.model.units import format_duration
from gangline.core.simulate import svg
from gangline.core.simulate.measures import Measures

Run = tuple[str, Measures, Mapping[str, Any]]

_STYLE = """
:root{color-scheme:light}body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1080px;padding:0 1rem;color:#1a1a1a}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}table{border-collapse:collapse;margin:.5rem 0}
th,td{padding:.25rem .7rem;text-align:right;border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}
svg{max-width:100%;height:auto;display:block}svg text{font-size:11px;fill:#333}
.grid{stroke:#e4e4e4}.axis{stroke:#555}.node{fill:none;stroke:#999;stroke-width:.6}
.legend span{margin-right:1.2rem;white-space:nowrap}
.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.35rem}.none,.note{color:#666}td.best{font-weight:600}
"""
#: figure → (title, how it is written, whether less is better; None: neither)
_FIGURES: tuple[tuple[str, str, str, bool | None], ...] = (
    ("mean_jct_s", "mean completion time", "time", True),
    ("p50_jct_s", "median completion time", "time", True),
    ("p99_jct_s", "p99 completion time", "time", True),
    ("mean_wait_s", "mean wait", "time", True),
    ("max_wait_s", "longest wait", "time", True),
    ("mean_slowdown", "mean slowdown", "number", True),
    ("makespan_s", "makespan", "time", True),
    ("utilisation", "GPUs held", "percent", False),
    ("fragmentation", "idle on partly used nodes", "percent", True),
    ("fairness", "fairness (Jain)", "number", False),
    ("preemptions", "preemptions", "count", True),
    ("starts_per_job", "starts a job", "number", None),
    ("cut_off", "stopped at their limits", "count", True),
)
_HOUR = 3600.0


def page_of(title: str, nodes: Sequence[int], runs: Sequence[Run]) -> str:
    """Return the page for runs of one trace."""
    total = sum(nodes)
    parts = [
        f"<h1>{escape(title)}</h1><p>{runs[0][2]['jobs']:,} jobs, {len(nodes):,} nodes, {total:,} GPUs. Simulated with gangline.</p>",
        "<h2>Compared</h2>", _table(runs),
        "<h2>GPUs in use</h2>", svg.lines([(n, _hours(m.allocation.points())) for n, m, _ in runs], "hours", "GPUs held", float(total)),
        "<h2>Queue</h2>", svg.lines([(n, _hours(m.waiting.points())) for n, m, _ in runs], "hours", "jobs that wait"),
        "<h2>Fragmentation</h2><p class=note>Idle GPUs on nodes that are partly used.</p>",
        svg.lines([(n, _hours(m.fragmentation.points())) for n, m, _ in runs], "hours", "idle GPUs"),
        "<h2>Completion times</h2>", svg.lines([(n, _distribution(m)) for n, m, _ in runs], "seconds", "share of jobs", 1.0, log_x=True),
        "<h2>Waits by size</h2><p class=note>GPUs of a job; hours.</p>", _by_class(runs, "waits_by_size", "mean_s", "mean wait"),
        _by_class(runs, "waits_by_size", "max_s", "longest wait"),
    ]  # fmt: skip
    if any(len(f["waits_by_queue"]) > 1 for _, _, f in runs):
        parts += ["<h2>Waits by queue</h2>", _by_class(runs, "waits_by_queue", "mean_s", "mean wait")]
        for name, measures, figures in runs:
            parts += [f"<h2>What queues held: {escape(name)}</h2>", _queues(measures, figures)]
    parts += ["<h2>Preemptions</h2>", _evictions(runs)]
    for name, measures, _ in runs:
        when = format_duration(round(measures.map_at_s))
        parts += [f"<h2>Placements: {escape(name)}</h2><p class=note>After {when}, when most jobs waited. A cell is a GPU, a colour a job.</p>"]
        parts.append(svg.node_map(measures.map()))
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"{head}<body>{''.join(parts)}</body></html>\n"


def _table(runs: Sequence[Run]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name, _, _ in runs)
    rows = []
    for key, title, how, less in _FIGURES:
        values = [figures[key] for _, _, figures in runs]
        best = None if less is None or len(runs) < 2 or len(set(values)) < 2 else (min if less else max)(values)
        cells = "".join(f"<td{' class=best' if value == best else ''}>{_word(value, how)}</td>" for value in values)
        rows.append(f"<tr><td>{title}</td>{cells}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _word(value: float, how: str) -> str:
    if how == "time":
        return format_duration(round(value))
    if how == "percent":
        return f"{100 * value:.1f} %"
    return f"{value:,}" if how == "count" else f"{value:,.2f}"


def _by_class(runs: Sequence[Run], key: str, what: str, title: str) -> str:
    classes = list(dict.fromkeys(name for _, _, figures in runs for name in figures[key]))
    series = [(name, [figures[key].get(c, {}).get(what, 0.0) / _HOUR for c in classes]) for name, _, figures in runs]
    return svg.bars(classes, series, f"{title}, h")


def _queues(measures: Measures, figures: Mapping[str, Any]) -> str:
    quotas = figures.get("quotas", {})
    largest = sorted(measures.of_queue, key=lambda q: -measures.of_queue[q].total())[: len(svg.COLOURS)]
    if quotas:
        drawn = [(q, [(x, y / quotas[q]) for x, y in _hours(measures.of_queue[q].points())]) for q in largest if quotas.get(q)]
        return svg.lines(drawn, "hours", "GPUs held / quota")
    return svg.lines([(q, _hours(measures.of_queue[q].points())) for q in largest], "hours", "GPUs held")


def _evictions(runs: Sequence[Run]) -> str:
    causes = sorted({cause for _, measures, _ in runs for cause in measures.evictions})
    if not causes:
        return '<p class="none">none</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name, _, _ in runs)
    rows = "".join(
        f"<tr><td>{escape(cause)}</td>{''.join(f'<td>{m.evictions.get(cause, 0):,}</td>' for _, m, _ in runs)}</tr>" for cause in causes
    )
    return f"<table><tr><th>cause</th>{head}</tr>{rows}</table>"


def _distribution(measures: Measures, points: int = 200) -> list[tuple[float, float]]:
    ordered = sorted(measures.completion_s)
    count = len(ordered)
    return [(max(1.0, ordered[min(count - 1, at * count // points)]), at / points) for at in range(points + 1)] if count else []


def _hours(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x / _HOUR, y) for x, y in points]
