"""Job arrays: the notation of their indices, the ids of their elements, and sets of positions. Pure.

    0-99%10         indices 0 to 99, at most 10 of them live at once
    0-15:4,100      0, 4, 8, 12 and 100

An element is a job of its own; its id is that of the array, a dot and its index: `jk3m9xqa.17`. What is said of many elements is said of their
*positions*, which count from 0 in the order of the indices.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from gangline.core.model.spec import ArraySpec
from gangline.core.model.state import ELEMENT_BITS, Job, Runs

#: elements of one array; positions have to fit into the order of the queue
MAX_ELEMENTS: Final = 1_000_000
assert MAX_ELEMENTS <= 1 << ELEMENT_BITS
MAX_INDEX: Final = 10**9
MAX_RANGES: Final = 1_000
MAX_TEXT: Final = 16_384

RULE: Final = '"0-99", "0-15:4" (every fourth), "1,3,5-7", each with "%N" behind it for at most N at once'
_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")


def parse_array(text: str) -> ArraySpec:
    """Return the indices that a notation means, in ascending order. Raises ValueError with a sentence."""
    listed, found, limit = text.replace(" ", "").partition("%")
    if len(text) > MAX_TEXT or listed.count(",") >= MAX_RANGES:
        raise ValueError(f"more than {MAX_RANGES:,} ranges")
    if found and (not re.fullmatch(r"[0-9]{1,7}", limit) or not 1 <= int(limit) <= MAX_ELEMENTS):
        raise ValueError(f'behind "%" stands how many are live at once, from 1 to {MAX_ELEMENTS:,}')
    ranges: list[tuple[int, int, int]] = []
    for part in listed.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f'"{part[:40]}" is no range of indices')
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[3] or 1)
        if first > last or not step or last > MAX_INDEX:
            raise ValueError(f'"{part[:40]}" goes from a lower to a higher index, up to {MAX_INDEX:,}, in steps of at least 1')
        last -= (last - first) % step
        ranges.append((first, last, 1 if first == last else step))
    ranges.sort()
    for one, next_one in pairwise(ranges):
        if next_one[0] <= one[1]:
            raise ValueError(f"{_range_text(one)} and {_range_text(next_one)} overlap; write ranges that do not reach into each other")
    spec = ArraySpec(tuple(ranges), int(limit) if found else 0)
    if size(spec) > MAX_ELEMENTS:
        raise ValueError(f"{size(spec):,} elements are more than the limit of {MAX_ELEMENTS:,}")
    return spec


def array_text(spec: ArraySpec) -> str:
    """Return the notation that `parse_array` reads back."""
    return ",".join(map(_range_text, spec.ranges)) + (f"%{spec.at_most}" if spec.at_most else "")


def _range_text(each: tuple[int, int, int]) -> str:
    first, last, step = each
    return f"{first}" if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else "")


def size(spec: ArraySpec) -> int:
    """Return how many elements there are."""
    return sum((last - first) // step + 1 for first, last, step in spec.ranges)


def indices_from(spec: ArraySpec, position: int) -> Iterator[int]:
    """Yield the indices from a position on."""
    for first, last, step in spec.ranges:
        count = (last - first) // step + 1
        if position < count:
            yield from range(first + position * step, last + 1, step)
        position = max(0, position - count)


def position_of(spec: ArraySpec, index: int) -> int | None:
    """Return the position of an index, None when the array has no such element."""
    before = 0
    for first, last, step in spec.ranges:
        if first <= index <= last:
            return before + (index - first) // step if (index - first) % step == 0 else None
        before += (last - first) // step + 1
    return None


# ---------------------------------------------------------------- ids of elements


def element_id(array: str, index: int) -> str:
    """Return the id of an element."""
    return f"{array}.{index}"


def split_element(job: str) -> tuple[str, int] | None:
    """Return array and index of an element's id, or of a name with an index behind it; None when it does not look like one."""
    array, dot, index = job.rpartition(".")
    return (array, int(index)) if dot and array and index.isascii() and index.isdecimal() and len(index) <= 10 else None


def to_come(array: Job) -> int:
    """Return how many elements of an array are not jobs yet and will be, as long as nothing is stopped."""
    if array.elements is None or array.spec.array is None or array.state == "finished":
        return 0
    given_up = sum(last - max(first, array.elements.opened) + 1 for first, last in array.elements.cancelled if last >= array.elements.opened)
    return size(array.spec.array) - array.elements.opened - given_up


# ---------------------------------------------------------------- sets of positions


def add_position(runs: Runs, position: int) -> None:
    """Add a position that is not in the set."""
    at = bisect_left(runs, (position, position))
    first = last = position
    if at < len(runs) and runs[at][0] == position + 1:
        last = runs.pop(at)[1]
    if at and runs[at - 1][1] == position - 1:
        at -= 1
        first = runs.pop(at)[0]
    runs.insert(at, (first, last))


def has_position(runs: Runs, position: int) -> bool:
    """Whether a position is in the set."""
    at = bisect_left(runs, (position + 1, 0))
    return at > 0 and runs[at - 1][1] >= position


def count(runs: Runs) -> int:
    """Return how many positions are in the set."""
    return sum(last - first + 1 for first, last in runs)


def indices_text(spec: ArraySpec, runs: Runs, most: int = 20) -> str:
    """Return the indices at these positions for people: "3, 17-19"; at most so many ranges are written out."""
    whole = array_text(ArraySpec(spec.ranges))
    if runs == [(0, size(spec) - 1)]:
        return whole
    shown = []
    step = spec.ranges[0][2] if len(spec.ranges) == 1 else 1
    for first, last in runs[:most]:
        a, b = next(indices_from(spec, first)), next(indices_from(spec, last))
        shown.append(_range_text((a, b, step)))
    return ", ".join(shown) + (f" and {len(runs) - most} more ranges" if len(runs) > most else "")
