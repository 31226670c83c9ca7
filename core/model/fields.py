"""Reading what people write, field by field: the parts that the job file and the cluster file are read with.

A reader is a function (reading, pointer, value) → the value as it is kept, or None after it has reported what is wrong. Nothing is guessed and
nothing is passed over; a null is a field that was not given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from gangline.core.model.nearest import nearest
from gangline.core.model.problems import MAX_PROBLEMS, BadJob, Odd, Problem, child_pointer, show, show_text
from gangline.core.model.units import format_duration, format_size, nearest_size, parse_duration, parse_size

Places = Mapping[str, tuple[int, int]]


class Reading:
    """The problems of one document, and where its values stand."""

    __slots__ = ("_key_places", "_places", "problems", "subject")

    def __init__(self, places: Places, key_places: Places, subject: str = "a job") -> None:
        self.problems: list[Problem] = []
        #: what the document describes, in words
        self.subject = subject
        self._places = places
        self._key_places = key_places

    def refuse(self, at: str, code: str, message: str, near: str = "", *, key: bool = False) -> None:
        """Note a problem with the value at a pointer, or with its key."""
        if len(self.problems) >= MAX_PROBLEMS:
            return
        place = (self._key_places if key else self._places).get(at) or self._places.get(at) or self._places.get("")
        line, column = place or (None, None)
        self.problems.append(Problem(at, message, code, near, line, column))

    def wrong(self, at: str, value: object, rule: str) -> None:
        """Note that a value is of another type than the field's."""
        if isinstance(value, Odd):
            self.refuse(at, "GL-1102", f"{show(value)} is {value.kind}; needed is {rule}. Put a text in quotes, write a number in plain digits.")
        elif rule.startswith("a text") and isinstance(value, bool | int | float):
            kind = "true or false" if isinstance(value, bool) else "a number"
            self.refuse(at, "GL-1102", f"{show(value)} is {kind}; needed is {rule}. Put it in quotes.", f'"{show(value)}"')
        elif isinstance(value, str) and rule.startswith(("a whole number", "a number", "true")) and _UNQUOTABLE.fullmatch(value):
            self.refuse(at, "GL-1102", f"{show(value)} is a text; needed is {rule}. Leave the quotes out.", value)
        else:
            self.refuse(at, "GL-1102", f"{show(value)} is not {rule}.")


_UNQUOTABLE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?|true|false")

Reader = Callable[[Reading, str, Any], Any]
#: word in the file → (attribute of the spec, reader)
Fields = Mapping[str, tuple[str, Reader]]
#: word of a field that this version does not have → what to say
Later = Mapping[str, str]
NOTHING_LATER: Later = {}


def read_mapping(reading: Reading, at: str, value: Any, fields: Fields, later: Later = NOTHING_LATER) -> dict[str, Any] | None:
    """Read a mapping by a table of fields; return the attributes that were given and are right."""
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of fields")
        return None
    found: dict[str, Any] = {}
    for word, item in value.items():
        field = fields.get(word)
        if field is None:
            _no_such_field(reading, at, word, item, fields, later)
        elif item is not None:
            attribute, reader = field
            result = reader(reading, f"{at}/{word}", item)
            if result is not None:
                found[attribute] = result
    return found


def _no_such_field(reading: Reading, at: str, word: object, item: object, fields: Fields, later: Later) -> None:
    text = word if isinstance(word, str) else str(type(word).__name__)
    pointer = child_pointer(at, text if len(text) <= 100 else f"{text[:100]}...")
    if text in later:
        if item is not None and item != [] and item != {} and item != "":
            reading.refuse(pointer, "GL-1109", later[text], key=True)
        return
    where = f"`{at[1:].replace('/', '.')}`" if at else reading.subject
    near = nearest(text, fields)
    known = "" if near else f"; its fields are {', '.join(fields)}"
    reading.refuse(pointer, "GL-1101", f'"{show_text(text)}" is not a field of {where}{known}.', near, key=True)


def section(make: Callable[..., Any], fields: Fields, later: Later = NOTHING_LATER) -> Reader:
    """Read a mapping by a table of fields and make something of it."""

    def read(reading: Reading, at: str, value: Any) -> Any:
        found = read_mapping(reading, at, value, fields, later)
        return None if found is None else make(**found)

    return read


def whole(low: int, high: int, note: str = "") -> Reader:
    """Read a whole number within bounds; `note` is said of a 0."""
    rule = f"a whole number from {low:,} to {high:,}"

    def read(reading: Reading, at: str, value: Any) -> int | None:
        if type(value) is not int:
            reading.wrong(at, value, rule)
            return None
        if low <= value <= high:
            return value
        hint = f" {note}" if note and value == 0 else ""
        reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.{hint}")
        return None

    return read


def boolean(reading: Reading, at: str, value: Any) -> bool | None:
    """Read true or false."""
    if type(value) is bool:
        return value
    reading.wrong(at, value, "true or false")
    return None


def one_of(*words: str) -> Reader:
    """Read one of a few words."""
    rule = f"a text, one of {', '.join(words)}"

    def read(reading: Reading, at: str, value: Any) -> str | None:
        if type(value) is not str:
            reading.wrong(at, value, rule)
        elif value in words:
            return value
        else:
            reading.refuse(at, "GL-1106", f"{show(value)} is not one of {', '.join(words)}.", nearest(value, words))
        return None

    return read


def read_text(reading: Reading, at: str, value: Any, rule: str, limit: int) -> str | None:
    """Read a text that the kernel can take: no NUL, encodable, bounded in bytes."""
    if type(value) is not str:
        reading.wrong(at, value, rule)
        return None
    if "\0" in value:
        reading.refuse(at, "GL-1111", f"{show(value)} has a NUL character, which no program can be given.")
        return None
    size = len(value)
    if not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            reading.refuse(at, "GL-1111", f"{show(value)} has half of a surrogate pair and cannot be written as UTF-8.")
            return None
    if size > limit:
        reading.refuse(at, "GL-1110", f"A text of {size:,} bytes is longer than the limit of {limit:,}.")
        return None
    return value


NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
NAME_RULE = "1 to 64 of a-z, 0-9, dot, underscore and hyphen, first and last a letter or digit"


def read_name(reading: Reading, at: str, value: Any) -> str | None:
    """Read a name of people's choice; an empty one is none."""
    if type(value) is not str:
        reading.wrong(at, value, "a text")
    elif not value or NAME.fullmatch(value):
        return value
    else:
        reading.refuse(at, "GL-1105", f"{show(value)} is not a name: {NAME_RULE}.", _nearest_name(value))
    return None


LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,253}[A-Za-z0-9])?")


def read_label(reading: Reading, at: str, value: Any) -> str | None:
    """Read the name of a node label; an empty one is none."""
    if type(value) is not str:
        reading.wrong(at, value, "a text, the name of a node label")
    elif not value or LABEL.fullmatch(value):
        return value
    else:
        reading.refuse(at, "GL-1105", f"{show(value)} is not the name of a node label: letters, digits, dots, hyphens, slashes, up to 255.")
    return None


def _nearest_name(value: str) -> str:
    guess = re.sub(r"[^a-z0-9._-]+", "-", value[:64].lower()).strip("-._")
    return guess if len(value) <= 64 and guess and "/" not in value else ""


def duration(low: float, high: float, *, zero: str = "") -> Reader:
    """Read a duration. `zero` says what a 0 means; without it, a 0 is refused unless `low` is 0."""
    rule = f'"24h", "90m", "1h30m" or a number of seconds, from {format_duration(low)} to {format_duration(high)}'
    if zero:
        rule = f"{rule}, or 0 {zero}"

    def read(reading: Reading, at: str, value: Any) -> float | None:
        if type(value) is str:
            if not value:
                return None
            seconds = parse_duration(value)
            if seconds is None:
                lower = value.lower().replace(" ", "")
                near = lower if lower != value and parse_duration(lower) is not None else ""
                reading.refuse(at, "GL-1105", f"{show(value)} is not a duration: needed is {rule}.", near)
                return None
        elif type(value) is int or (type(value) is float and math.isfinite(value)):
            seconds = float(value) if -(10**15) < value < 10**15 else math.inf
        else:
            reading.wrong(at, value, f"a duration: {rule}")
            return None
        if low <= seconds <= high or (zero and seconds == 0):
            return seconds
        hint = "" if seconds else " Leave the field out for none."
        reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.{hint}")
        return None

    return read


def number(low: float, high: int) -> Reader:
    """Read a number within bounds."""
    rule = f"a number from {low:g} to {high:,}"

    def read(reading: Reading, at: str, value: Any) -> float | None:
        if type(value) is not int and type(value) is not float:
            reading.wrong(at, value, rule)
        elif low <= value <= high:
            return float(value)
        else:
            reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.")
        return None

    return read


def hundredths(low: float, high: float) -> Reader:
    """Read a number to the hundredth; return its thousandths."""
    rule = f"a number from {low:g} to {high:,}, to the hundredth"

    def read(reading: Reading, at: str, value: Any) -> int | None:
        if type(value) is not int and type(value) is not float:
            reading.wrong(at, value, rule)
            return None
        if not low <= value <= high:
            reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.")
            return None
        milli = round(value * 1000)
        if milli % 10 or abs(milli - value * 1000) > max(1e-6, value * 1e-9):
            reading.refuse(at, "GL-1104", f"{show(value)} is too fine: needed is {rule}.", f"{max(low, round(value, 2)):g}")
            return None
        return milli

    return read


def size(low_mib: int, high_mib: int) -> Reader:
    """Read a size with its unit; return MiB."""
    rule = f'a size with its unit MiB, GiB or TiB, as "64GiB", from {format_size(low_mib)} to {format_size(high_mib)}'

    def read(reading: Reading, at: str, value: Any) -> int | None:
        if type(value) is not str:
            if type(value) is int and 0 < value < 10**9:
                reading.refuse(at, "GL-1105", f"{value} has no unit: needed is {rule}.", f"{value}GiB" if value <= 4096 else f"{value}MiB")
            else:
                reading.wrong(at, value, rule)
            return None
        if not value:
            return None
        mib = parse_size(value)
        if mib is None:
            reading.refuse(at, "GL-1105", f"{show(value)} is not a size: needed is {rule}.", nearest_size(value))
        elif low_mib <= mib <= high_mib:
            return mib
        else:
            reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.")
        return None

    return read


MODEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?")


def list_of(item_reader: Reader, rule: str, limit: int) -> Reader:
    """Read a list of up to `limit` items; doubles are taken once."""

    def read(reading: Reading, at: str, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not list:
            reading.wrong(at, value, rule)
            return None
        if len(value) > limit:
            reading.refuse(at, "GL-1110", f"{len(value):,} entries are more than the limit of {limit}.")
            return None
        items = [item_reader(reading, f"{at}/{i}", item) for i, item in enumerate(value)]
        return tuple(dict.fromkeys(items)) if None not in items else None

    return read


def decode(text: bytes | str, limit: int) -> str:
    """Return the text of a file: UTF-8 with or without a byte order mark, bounded before anything looks at it. Raises BadJob."""
    if len(text) > limit:
        raise BadJob([Problem("", f"{len(text):,} bytes are more than the limit of {limit:,} ({limit // 1024} KiB).", "GL-1002")])
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise BadJob([Problem("", f"Not UTF-8: byte {error.start} cannot be decoded.", "GL-1001", line=line, column=1)]) from None


def duration_word(seconds: float) -> str | float:
    """Return the duration as `duration` reads it back exactly."""
    text = format_duration(seconds)
    return text if parse_duration(text) == seconds else seconds


def thousandths_word(milli: int) -> int | float:
    """Return the number of which these are the thousandths."""
    return milli // 1000 if milli % 1000 == 0 else milli / 1000
