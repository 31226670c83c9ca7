"""What can be wrong with a job file: one problem with its place, and all of them at once."""

from __future__ import annotations

import msgspec

#: a file with more problems than this is another kind of file; the rest is counted only
MAX_PROBLEMS = 100


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong, in the user's words, with the rule it breaks."""

    #: JSON Pointer (RFC 6901) of the field; "" is the whole document
    pointer: str
    #: value, rule and limit in one sentence
    message: str
    #: stable, explained in `codes.py`
    code: str
    #: what was probably meant, "" when nothing is near
    nearest: str = ""
    #: place in the file, from 1; None when there is no file
    line: int | None = None
    column: int | None = None


class BadJob(Exception):
    """A job that cannot be accepted as it is written; `problems` holds everything that is wrong, never empty."""

    def __init__(self, problems: list[Problem], filename: str = "") -> None:
        self.problems = problems
        self.filename = filename
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """Return one line a problem: `job.yaml:4:9: /gang/ranks: message [GL-1104]`."""
        return [_line(problem, self.filename) for problem in self.problems]


def _line(problem: Problem, filename: str) -> str:
    place = filename
    if problem.line is not None:
        place = f"{filename}:{problem.line}:{problem.column}" if filename else f"line {problem.line}, column {problem.column}"
    parts = [part for part in (place, problem.pointer) if part]
    hint = f" Did you mean {problem.nearest}?" if problem.nearest else ""
    return f"{': '.join([*parts, problem.message])}{hint} [{problem.code}]"


class Odd:
    """A plain scalar that YAML readers disagree on: what was written, and what YAML 1.1 takes it for."""

    __slots__ = ("kind", "text")

    def __init__(self, text: str, kind: str) -> None:
        self.text = text
        self.kind = kind


def show(value: object) -> str:
    """Return a value as it may stand in a message: short, and with nothing in it that a terminal or a page would obey."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if value.bit_length() < 128 else f"a number of about {int(value.bit_length() * 0.30103)} digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return f'"{show_text(value)}"'
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, Odd):
        return show_text(value.text)
    return f"a {type(value).__name__}"


def child_pointer(parent: str, key: str) -> str:
    """Return the JSON Pointer of a key in a mapping (RFC 6901: ~ and / escaped)."""
    if "~" in key or "/" in key:
        key = key.replace("~", "~0").replace("/", "~1")
    return f"{parent}/{key}"


def show_text(text: str) -> str:
    """Return a text cut to 60 characters, with control, invisible and bidirectional characters written as escapes."""
    short = text if len(text) <= 60 else f"{text[:57]}..."
    if short.isprintable() and '"' not in short and "\\" not in short:
        return short
    return "".join(_escape(c) for c in short)


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else character.encode("unicode_escape").decode()
