"""Plots as SVG that stands in a page: no script, nothing fetched. Lines over time, bars, and a map of nodes.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 10, 40
Points = Sequence[tuple[float, float]]


def lines(series: Sequence[tuple[str, Points]], x_title: str, y_title: str, most: float | None = None, log_x: bool = False) -> str:
    """Return lines, each with its name; `most` is the top of the y axis where it is known. Points of one line ascend in x."""
    every = [p for _, points in series for p in points]
    if not every:
        return '<p class="none">nothing to show</p>'
    x_low = max(1.0, min(x for x, _ in every)) if log_x else 0.0
    x_high, y_high = max(max(x for x, _ in every), x_low * 1.001, 1e-9), most or max(max(y for _, y in every), 1e-9) * 1.05

    def across(x: float) -> float:
        part = math.log(max(x, x_low) / x_low) / math.log(x_high / x_low) if log_x else x / x_high
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    def up(y: float) -> float:
        return _HEIGHT - _BOTTOM - min(1.0, y / y_high) * (_HEIGHT - _TOP - _BOTTOM)

    out = _frame(x_title, y_title)
    x_ticks = _decades(x_low, x_high) if log_x else ticks(x_high)
    out += [_text(across(x), _HEIGHT - _BOTTOM + 16, number(x), "middle") for x in x_ticks]
    for y in ticks(y_high, 4):
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}"/>')
        out.append(_text(_LEFT - 6, up(y) + 4, number(y), "end"))
    for at, (_, points) in enumerate(series):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        out.append(f'<polyline fill="none" stroke="{COLOURS[at % len(COLOURS)]}" stroke-width="1.5" points="{path}"/>')
    return _whole(out, _HEIGHT, f"{y_title} by {x_title}") + legend([name for name, _ in series])


def bars(classes: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], y_title: str) -> str:
    """Return bars side by side for each class, one of each series."""
    most = max((v for _, values in series for v in values), default=0.0)
    if not classes or most <= 0:
        return '<p class="none">nothing to show</p>'
    y_high = most * 1.05
    each = (_WIDTH - _LEFT - _RIGHT) / len(classes)
    width = each * 0.8 / max(1, len(series))
    out = _frame("", y_title)
    for y in ticks(y_high, 4):
        at_y = _HEIGHT - _BOTTOM - y / y_high * (_HEIGHT - _TOP - _BOTTOM)
        out.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at_y:.1f}" y2="{at_y:.1f}"/>')
        out.append(_text(_LEFT - 6, at_y + 4, number(y), "end"))
    for place, name in enumerate(classes):
        out.append(_text(_LEFT + each * (place + 0.5), _HEIGHT - _BOTTOM + 16, name, "middle"))
        for at, (run, values) in enumerate(series):
            high = values[place] / y_high * (_HEIGHT - _TOP - _BOTTOM)
            x = _LEFT + each * (place + 0.1) + at * width
            title = f"<title>{escape(run)}, {escape(name)}: {number(values[place])}</title>"
            out.append(
                f'<rect x="{x:.1f}" y="{_HEIGHT - _BOTTOM - high:.1f}" width="{max(1.0, width - 1):.1f}" height="{high:.1f}"'
                f' fill="{COLOURS[at % len(COLOURS)]}">{title}</rect>'
            )
    return _whole(out, _HEIGHT, f"{y_title} by class") + legend([run for run, _ in series])


def node_map(nodes: Sequence[tuple[str, int, Sequence[tuple[str, int]]]], most: int = 4_096) -> str:
    """Return a map: a row of cells for each node, a cell for each GPU, racks apart; jobs that span nodes keep their colour, idle is white."""
    shown = nodes[:most]
    if not shown:
        return '<p class="none">nothing to show</p>'
    per_row = 8
    cell = 9 if len(shown) <= 512 else 4
    widest = min(max(gpus for _, gpus, _ in shown), 256)
    columns = max(1, min(len(shown), int(1000 / (widest * cell + 8))))
    columns = max(1, columns // per_row * per_row or columns)
    out = []
    gap = 6
    for place, (node, gpus, jobs) in enumerate(shown):
        x0, y0 = (place % columns) * (widest * cell + gap), (place // columns) * (cell + 3)
        at = 0
        for name, held in jobs:
            colour = f"hsl({_hue(name)},65%,{45 + _hue(name) % 25}%)"
            wide = min(held, widest - at)
            if wide > 0:
                title = f"<title>{escape(node)}: job {escape(name)}, {held} GPUs</title>"
                out.append(f'<rect x="{x0 + at * cell}" y="{y0}" width="{wide * cell}" height="{cell}" fill="{colour}">{title}</rect>')
            at += held
        wide = min(gpus, widest) * cell
        out.append(f'<rect class="node" x="{x0}" y="{y0}" width="{wide}" height="{cell}"><title>{escape(node)}</title></rect>')
    height = -(-len(shown) // columns) * (cell + 3) + 4
    width = columns * (widest * cell + gap)
    more = f"<p>{len(nodes) - most:,} more nodes are not shown.</p>" if len(nodes) > most else ""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="GPUs by node">{"".join(out)}</svg>{more}'


def legend(names: Sequence[str]) -> str:
    """Return the names with their colours."""
    if len(names) < 2:
        return ""
    marks = (f'<span><i style="background:{COLOURS[at % len(COLOURS)]}"></i>{escape(name)}</span>' for at, name in enumerate(names))
    return f'<p class="legend">{"".join(marks)}</p>'


def ticks(high: float, about: int = 6) -> list[float]:
    """Return round values from 0 to `high`."""
    raw = high / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    return [i * step for i in range(int(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Return a number for an axis."""
    for limit, word in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if word == 'k' else limit):.3g}{word}"
    return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _decades(low: float, high: float) -> list[float]:
    return [10.0**e for e in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]


def _hue(name: str) -> int:
    return sum((at + 1) * ord(c) * 37 for at, c in enumerate(name)) % 360


def _frame(x_title: str, y_title: str) -> list[str]:
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    return [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM}"/>',
        _text((_WIDTH + _LEFT) / 2, _HEIGHT - 6, x_title, "middle"),
        f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle">{escape(y_title)}</text>',
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _whole(parts: list[str], height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
