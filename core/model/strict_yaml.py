"""YAML without surprises, with the place of every value.

Built from the parser's events, so nothing is ever constructed: no tags, no aliases or anchors (bombs), no merge keys, no duplicate keys, a
bounded depth. Plain scalars are read as YAML 1.2's core schema has them (null, true/false, decimal numbers, text). What YAML 1.1 readers take
for something else (`no`, `0x10`, `1_000`, `12:30:45`, a date) becomes an `Odd`, which no field accepts.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from gangline.core.model.problems import MAX_PROBLEMS, BadJob, Odd, Problem, child_pointer, show_text
from gangline.core.model.strict_json import MAX_DIGITS

MAX_DEPTH = 16

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"-?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]{1,3})?")
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_KINDS = {"bool": "a boolean", "int": "a number", "float": "a number", "timestamp": "a date", "merge": "a merge key", "value": "a default key"}


class Document:
    """One YAML document as plain objects, with the places (line and column from 1) of values and of keys by JSON Pointer."""

    __slots__ = ("key_places", "places", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.places: dict[str, tuple[int, int]] = {}
        self.key_places: dict[str, tuple[int, int]] = {}


def load_yaml(text: str, problems: list[Problem], max_depth: int = MAX_DEPTH) -> list[Document]:
    """Return the documents that are not empty. Faults that can be passed over are added to `problems`, others raise BadJob."""
    loader = _LOADER(text)
    try:
        builder = _Builder(loader, problems, max_depth)
        while True:
            event = loader.get_event()
            if event is None or isinstance(event, yaml.StreamEndEvent):
                return builder.documents
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        message = f"Not YAML: {error.problem or error.context}."
        raise BadJob([*problems, Problem("", message, "GL-1001", line=line, column=column)]) from None
    except (yaml.YAMLError, UnicodeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise BadJob([*problems, Problem("", f"Not YAML: {show_text(first_line)}.", "GL-1001")]) from None
    finally:
        loader.dispose()


class _Frame:
    """A list or mapping that is being filled. `key` is the mapping's key that waits for its value."""

    __slots__ = ("items", "key", "pointer")

    def __init__(self, items: dict[str, Any] | list[Any], pointer: str) -> None:
        self.items = items
        self.pointer = pointer
        self.key: str | None = None


class _Builder:
    """Turns the events of a stream into documents."""

    def __init__(self, loader: Any, problems: list[Problem], max_depth: int) -> None:
        self.documents: list[Document] = []
        self._loader = loader
        self._problems = problems
        self._max_depth = max_depth
        self._document = Document()
        self._stack: list[_Frame] = []

    def take(self, event: Any) -> None:
        """Consume the next event."""
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.MappingStartEvent):
            self._open({}, event)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._open([], event)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._stack.pop()
        elif isinstance(event, yaml.AliasEvent):
            self._refuse(event, "GL-1003", f"The alias *{show_text(event.anchor or '')} is refused: write the value out.")
            self._put(None, event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._document = Document()
            if event.tags:
                self._refuse(event, "GL-1003", "%TAG directives are refused: write the value without it.")
        elif isinstance(event, yaml.DocumentEndEvent) and self._document.value is not None:
            self.documents.append(self._document)

    def _scalar(self, event: Any) -> None:
        self._plain_node(event)
        frame = self._stack[-1] if self._stack else None
        if frame is not None and isinstance(frame.items, dict) and frame.key is None:
            self._key(frame, event)
        elif event.implicit[0] and event.style in (None, ""):
            self._put(_resolve(event.value, self._loader), event)
        else:
            self._put(event.value, event)

    def _key(self, frame: _Frame, event: Any) -> None:
        frame.key = event.value
        pointer = child_pointer(frame.pointer, event.value)
        place = (event.start_mark.line + 1, event.start_mark.column + 1)
        first = self._document.key_places.setdefault(pointer, place)
        if first is not place:
            word = show_text(event.value)
            self._refuse(event, "GL-1005", f'The key "{word}" is given twice in one mapping, first in line {first[0]}.', pointer)

    def _open(self, items: dict[str, Any] | list[Any], event: Any) -> None:
        self._plain_node(event)
        if len(self._stack) >= self._max_depth:
            raise self._fatal(event, "GL-1004", f"Nested deeper than {self._max_depth} levels, which nothing here needs.")
        pointer = self._put(items, event)
        self._stack.append(_Frame(items, pointer))

    def _put(self, value: Any, event: Any) -> str:
        """Store a value where it belongs and return its pointer."""
        if not self._stack:
            self._document.value, pointer = value, ""
        else:
            frame = self._stack[-1]
            if isinstance(frame.items, list):
                pointer = f"{frame.pointer}/{len(frame.items)}"
                frame.items.append(value)
            elif frame.key is None:
                raise self._fatal(event, "GL-1006", "A key must be a plain word, not a list, a mapping or an alias.")
            else:
                pointer = child_pointer(frame.pointer, frame.key)
                frame.items.setdefault(frame.key, value)
                frame.key = None
        self._document.places.setdefault(pointer, (event.start_mark.line + 1, event.start_mark.column + 1))
        return pointer

    def _plain_node(self, event: Any) -> None:
        if event.anchor is not None:
            self._refuse(event, "GL-1003", f"The anchor &{show_text(event.anchor)} is refused: write the value out where it is needed.")
        if event.tag is not None:
            self._refuse(event, "GL-1003", f"The tag {show_text(event.tag)} is refused: write the value without it.")

    def _refuse(self, event: Any, code: str, message: str, pointer: str = "") -> None:
        if len(self._problems) >= MAX_PROBLEMS:
            raise BadJob(self._problems)
        self._problems.append(self._problem(event, code, message, pointer))

    def _fatal(self, event: Any, code: str, message: str) -> BadJob:
        return BadJob([*self._problems, self._problem(event, code, message, self._stack[-1].pointer if self._stack else "")])

    @staticmethod
    def _problem(event: Any, code: str, message: str, pointer: str) -> Problem:
        return Problem(pointer, message, code, line=event.start_mark.line + 1, column=event.start_mark.column + 1)


def _resolve(text: str, loader: Any) -> Any:
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else Odd(text, "a number beyond every limit")
    if _FLOAT.fullmatch(text):
        value = float(text) if len(text) <= 400 else math.inf
        return value if math.isfinite(value) else Odd(text, "a number beyond every limit")
    tag: str = loader.resolve(yaml.ScalarNode, text, (True, False))
    kind = tag.rpartition(":")[2]
    return text if kind == "str" else Odd(text, f"{_KINDS.get(kind, kind)} to YAML 1.1 and a text to YAML 1.2")
