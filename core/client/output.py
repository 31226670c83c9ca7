"""Rows and objects on standard output: tables for people, and json, jsonl, yaml, csv and names for programs.

A table on a terminal is cut to its width; in a pipe nothing is cut and nothing is coloured.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from gangline.core.client.exits import USAGE, Exit
from gangline.core.model.nearest import nearest

FORMATS = ("table", "wide", "json", "jsonl", "yaml", "csv", "name")

Row = Mapping[str, Any]
#: heading, and what a row shows under it
Column = tuple[str, Callable[[Row], str]]

STATE_COLOURS = {
    "running": "blue", "succeeded": "green", "failed": "red", "lost": "red", "restarting": "yellow", "preempting": "yellow",
    "resizing": "yellow", "draining": "magenta", "cordoned": "magenta", "cancelled": "bright_black",
}  # fmt: skip


class Output:
    """How the user wants results: the format, the fields, and whether anything beside them is welcome."""

    def __init__(self, form: str, fields: str = "", header: bool = True, quiet: bool = False) -> None:
        self.form = "name" if quiet and form == "table" else form
        self.fields = [field.strip() for field in fields.split(",") if field.strip()]
        self.header = header
        self.quiet = quiet

    @property
    def for_people(self) -> bool:
        """True when words beside the result are welcome."""
        return self.form in ("table", "wide") and not self.quiet

    def rows(self, rows: Sequence[Row], columns: Sequence[Column], wide: Sequence[Column], word: str, name: str = "id") -> None:
        """Print a listing. `word` is what the API calls it, `name` the field that names a row."""
        rows = [self._picked(row) for row in rows]
        if self.form == "json":
            emit_json({word: rows})
        elif self.form == "jsonl":
            for row in rows:
                click.echo(json.dumps(row, ensure_ascii=False))
        elif self.form == "yaml":
            emit_yaml({word: rows})
        elif self.form == "name":
            for row in rows:
                click.echo(str(row.get(name, "")))
        elif self.form == "csv":
            self._csv(rows)
        else:
            if self.fields:
                columns, wide = [(field.upper(), _getter(field)) for field in self.fields], ()
            table([*columns, *(wide if self.form == "wide" else ())], rows, self.header)

    def one(self, value: Mapping[str, Any], name: str = "id") -> bool:
        """Print one object in a format for programs; False when people want it and the caller has to say it."""
        value = self._picked(value)
        if self.form == "json":
            emit_json(value)
        elif self.form == "jsonl":
            click.echo(json.dumps(value, ensure_ascii=False))
        elif self.form == "yaml":
            emit_yaml(value)
        elif self.form == "csv":
            self._csv([value])
        elif self.form == "name":
            click.echo(str(value.get(name, "")))
        elif self.fields:
            for field in self.fields:
                click.echo(f"{field}: {cell(value.get(field))}")
        else:
            return False
        return True

    def _picked(self, row: Row) -> Row:
        if not self.fields:
            return row
        for field in self.fields:
            if field not in row:
                near = nearest(field, row)
                hint = f"Did you mean {near}?" if near else f"There are {', '.join(row)}."
                click.echo(f'gangline: "{clean(field)}" is not a field of this. {hint} [GL-2010]', err=True)
                raise Exit(USAGE)
        return {field: row[field] for field in self.fields}

    def _csv(self, rows: Sequence[Row]) -> None:
        import csv

        names = list(rows[0]) if rows else self.fields
        writer = csv.writer(sys.stdout, lineterminator="\n")
        if self.header and names:
            writer.writerow(names)
        for row in rows:
            writer.writerow([_csv_cell(row.get(name)) for name in names])


def _getter(field: str) -> Callable[[Row], str]:
    return lambda row: cell(row.get(field))


def emit_json(value: Any) -> None:
    """Print an object as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def emit_yaml(value: Any) -> None:
    """Print an object as YAML, in the order it came."""
    import yaml

    click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120), nl=False)


def cell(value: Any) -> str:
    """Return a value as a cell of a table."""
    if value is None or value == "" or value == [] or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(cell(item) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{key}={cell(item)}" for key, item in value.items())
    return clean(str(value))


def clean(text: str) -> str:
    """Return a text with nothing in it that a terminal would obey, on one line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _csv_cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- tables


def table(columns: Sequence[Column], rows: Sequence[Row], header: bool = True) -> None:
    """Print rows under headings. The last column takes what the terminal has left, and the widest others give way to it."""
    cells = [[get(row) for _, get in columns] for row in rows]
    if header:
        cells.insert(0, [heading for heading, _ in columns])
    if not cells:
        return
    widths = [max(width_of(line[i]) for line in cells) for i in range(len(columns))]
    limit = terminal_width()
    if limit:
        widths = fit(widths, limit)
    colour = colours(sys.stdout)
    for number, line in enumerate(cells):
        parts = [_pad(text, width, cut=bool(limit)) for text, width in zip(line, widths, strict=True)]
        parts[-1] = parts[-1].rstrip()
        if colour:
            parts = [_tinted(part, bold=header and number == 0) for part in parts]
        click.echo("  ".join(parts).rstrip(), color=colour)


def fit(widths: list[int], limit: int) -> list[int]:
    """Return widths that fit the limit: the widest is narrowed first, none below 8."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > limit:
        widest = max(range(len(widths)), key=lambda i: (widths[i], i))
        if widths[widest] <= 8:
            break
        excess = sum(widths) + 2 * (len(widths) - 1) - limit
        others = [width for i, width in enumerate(widths) if i != widest]
        widths[widest] = max(8, max(others, default=8) - 1, widths[widest] - excess)
    return widths


def terminal_width() -> int:
    """Return the columns of the terminal that standard output goes to, 0 when it does not go to one."""
    if not sys.stdout.isatty():
        return 0
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except OSError:
        return 80


def colours(stream: Any) -> bool:
    """Return whether colours are wanted on this stream: NO_COLOR, CLICOLOR_FORCE, TERM=dumb, and terminals only."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") != "0":
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def width_of(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int, *, cut: bool) -> str:
    have = width_of(text)
    if have <= width or not cut:
        return text + " " * (width - have)
    mark = "…" if (sys.stdout.encoding or "").lower().startswith("utf") else "~"
    while text and width_of(text) > width - 1:
        text = text[:-1]
    return text + mark + " " * (width - 1 - width_of(text))


def _tinted(part: str, *, bold: bool) -> str:
    if bold:
        return click.style(part, bold=True)
    tint = STATE_COLOURS.get(part.strip())
    return click.style(part, fg=tint) if tint else part


def gpu_time(gpu_s: float | None) -> str:
    """Return GPU time as people say it: 45 GPU-s, 2.5 GPU-h."""
    if gpu_s is None:
        return "-"
    return f"{gpu_s:.0f} GPU-s" if gpu_s < 3600 else f"{gpu_s / 3600:.1f} GPU-h"
