"""Traces as they are in files: text, or text under gzip; tables with a line of names above; and everything that is wrong with one, by place.

A file that is read line by line costs the memory of one line. A fault does not end the reading: up to MAX_PROBLEMS are gathered, each with line
and column, and raised together when the file ends (`Table.finish`).
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

from gangline.core.model.problems import MAX_PROBLEMS, BadJob, Problem, show


class BadTrace(BadJob):
    """A trace that cannot be read; `problems` holds everything that is wrong with it, never empty."""


def open_text(path: Path) -> IO[str]:
    """Open a file of text, compressed if its first bytes say so. Raises BadTrace when it cannot be opened."""
    try:
        raw = path.open("rb")
        if raw.peek(2)[:2] == b"\x1f\x8b":
            return io.TextIOWrapper(gzip.GzipFile(fileobj=raw), encoding="utf-8-sig", newline="")
        return io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise BadTrace([Problem("", f"Cannot be opened: {error.strerror or error}.", "GL-1201")], str(path)) from error


class Table:
    """A table with a line of names above it: CSV as RFC 4180 has it. Iterate over its rows, then call `finish`.

    `needed` names the columns that must be there; others may be missing, and more may be there.
    """

    def __init__(self, path: Path, needed: Sequence[str], known: Sequence[str] = (), delimiter: str = ",") -> None:
        self.path, self.delimiter = path, delimiter
        self.problems: list[Problem] = []
        self._needed, self._known = tuple(needed), (*needed, *known)
        self._starts: dict[str, int] = {}

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows that have a cell for each name. Raises BadTrace at once if the names are wrong, or the text cannot be read."""
        with open_text(self.path) as file:
            lines = _Lines(file)
            reader = csv.reader(lines, strict=True, delimiter=self.delimiter)
            try:
                names = next(reader, None)
                if not names:
                    self._give_up("Empty: the first line must name the columns.", "GL-1202", 1)
                self._check_names(names)
                line = reader.line_num + 1
                for cells in reader:
                    if len(cells) == len(names):
                        yield Row(self, line, lines.last, dict(zip(names, cells, strict=True)))
                    elif cells:
                        self.note(f"{len(cells)} cells, where the first line names {len(names)} columns.", "GL-1203", line, 1)
                    if len(self.problems) >= MAX_PROBLEMS:
                        break
                    line = reader.line_num + 1
            except csv.Error as error:
                self._give_up(f"Not CSV: {error}.", "GL-1203", max(1, reader.line_num))
            except UnicodeDecodeError:
                self._give_up("Not UTF-8 after this line.", "GL-1201", max(1, reader.line_num))
            except (OSError, EOFError) as error:
                self._give_up(f"Cannot be read further: {error}.", "GL-1201", max(1, reader.line_num))

    def finish(self) -> None:
        """Raise BadTrace with all problems that were noted, if there are any."""
        if self.problems:
            raise BadTrace(self.problems[:MAX_PROBLEMS], str(self.path))

    def note(self, message: str, code: str, line: int, column: int) -> None:
        """Note a problem at a place, both counted from 1."""
        self.problems.append(Problem("", message, code, line=line, column=column))

    def _check_names(self, names: list[str]) -> None:
        at = 1
        for number, name in enumerate(names):
            if name in names[:number]:
                self.note(f"Two columns are named {show(name)}.", "GL-1202", 1, at)
            at += len(name) + 1
        for name in self._needed:
            if name not in names:
                self.note(f"There is no column {show(name)}; needed are {', '.join(self._needed)}.", "GL-1202", 1, 1)
        self.finish()

    def _give_up(self, message: str, code: str, line: int) -> NoReturn:
        self.note(message, code, line, 1)
        self.finish()
        raise AssertionError("a noted problem is raised")


class Row:
    """One row of a table: cells by name. What cannot be understood is noted, and a harmless value returned instead."""

    __slots__ = ("cells", "line", "table", "text")

    def __init__(self, table: Table, line: int, text: str, cells: dict[str, str]) -> None:
        self.table, self.line, self.text, self.cells = table, line, text, cells

    def string(self, name: str, default: str | None = None) -> str:
        """Return a text; `default` where it is empty or its column missing, without which it must be there."""
        found = self.cells.get(name, "").strip()
        if found:
            return found
        if default is None:
            self.bad(name, "is missing")
        return default or ""

    def integer(self, name: str, least: int = 0, most: int | None = None, default: int | None = None) -> int:
        """Return a whole number within bounds."""
        found = self.number(name, least, most, default)
        if found != int(found):
            self.bad(name, "must be a whole number")
        return int(found)

    def number(self, name: str, least: float = 0, most: float | None = None, default: float | None = None) -> float:
        """Return a finite number within bounds."""
        text = self.cells.get(name, "").strip()
        if not text and default is not None:
            return default
        try:
            found = float(text)
        except ValueError:
            self.bad(name, "must be a number")
            return least
        if not (least <= found and (found <= most if most is not None else found < float("inf"))):
            self.bad(name, f"must be {f'from {least:,} to {most:,}' if most is not None else f'at least {least:,}'}")
            return least
        return found

    def bad(self, name: str, rule: str) -> None:
        """Note that a cell breaks a rule: `column NAME: VALUE must be ...`."""
        value = self.cells.get(name)
        said = f"{show(value)} {rule}" if value else f"it {rule}"
        self.table.note(f"Column {name}: {said}.", "GL-1204", self.line, self._column(name))

    def _column(self, name: str) -> int:
        """Return where a cell begins in the line, from 1; cells in quotes count as they are written."""
        at = list(self.cells).index(name) if name in self.cells else 0
        column, quoted = 1, False
        for place, character in enumerate(self.text, 1):
            if at == 0:
                return column
            if character == '"':
                quoted = not quoted
            elif character == self.table.delimiter and not quoted:
                at, column = at - 1, place + 1
        return column


class _Lines:
    """The lines of a file, with the last one kept for messages."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.last = ""

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self.last = line
            yield line
