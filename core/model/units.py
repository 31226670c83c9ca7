"""Durations and sizes as people write them, and back: "1h30m", "64GiB"."""

from __future__ import annotations

import re

#: seconds of each unit, in the order in which they are written
DURATION_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
#: MiB of each unit
SIZE_UNITS = {"MiB": 1, "GiB": 1024, "TiB": 1024 * 1024}

_DURATION = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,6})?(?:ms|[wdhms])")
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,8})")


def parse_duration(text: str) -> float | None:
    """Return the seconds of "90m", "1h30m" or "1.5s", None when it is none. Units go from large to small, each at most once."""
    if not 0 < len(text) <= 64:
        return None
    total, at, smallest = 0.0, 0, 1e18
    while at < len(text):
        match = _DURATION.match(text, at)
        if match is None:
            return None
        part = match.group()
        unit = "ms" if part.endswith("ms") else part[-1]
        seconds = DURATION_UNITS[unit]
        if seconds >= smallest:
            return None
        total, at, smallest = total + float(part[: -len(unit)]) * seconds, match.end(), seconds
    return total


def format_duration(seconds: float) -> str:
    """Return what `parse_duration` reads back as these seconds to the millisecond: "1h30m", "0s"."""
    left, parts = round(seconds * 1000), []
    for unit, size in DURATION_UNITS.items():
        if unit == "w":
            continue
        count, left = divmod(left, round(size * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_size(text: str) -> int | None:
    """Return the MiB of "512MiB" or "1.5GiB" (rounded up), None when it is none or its unit is another."""
    match = _SIZE.fullmatch(text)
    if match is None or match.group(2) not in SIZE_UNITS:
        return None
    return -int(-float(match.group(1)) * SIZE_UNITS[match.group(2)] // 1)


def format_size(mib: int) -> str:
    """Return the size in the largest unit that divides it: "64GiB"."""
    for unit, size in reversed(SIZE_UNITS.items()):
        if mib and mib % size == 0:
            return f"{mib // size}{unit}"
    return f"{mib}MiB"


def nearest_size(text: str) -> str:
    """Return what was probably meant by a size with a unit of another kind ("64G", "64gb"), "" when unclear."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return ""
    for unit in SIZE_UNITS:
        letter = unit[0].lower()
        if match.group(2).lower() in (letter, f"{letter}b", f"{letter}i", f"{letter}ib"):
            return f"{match.group(1)}{unit}"
    return ""
