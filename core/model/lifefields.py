"""The fields of a job file that say when the job takes part: array, depends_on, begin, deadline. Described for people in docs/jobfile.md."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final, cast, get_args

from gangline.core.model.arrays import RULE, array_text, parse_array
from gangline.core.model.fields import NAME, Reading, duration, duration_word
from gangline.core.model.nearest import nearest
from gangline.core.model.problems import show
from gangline.core.model.spec import ArraySpec, Condition, Dependency, JobSpec

MAX_DEPENDENCIES: Final = 100
_CONDITIONS: Final = get_args(Condition)
#: Slurm's words, for those whose fingers know them
_SLURM: Final = {"afterok": "after_ok", "afterany": "after_any", "afternotok": "after_not_ok", "after": "after_start"}
_DAY_S: Final = 86_400.0
#: far enough for every plan, near enough that a slip in the year is noticed
_FARTHEST: Final = datetime(2200, 1, 1, tzinfo=UTC)
_MOMENT_RULE: Final = '"2026-08-01T06:00:00+02:00" (RFC 3339, with its zone) or a duration from the submission, as "2h"'
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?([Zz]|[+-]\d\d:\d\d)?")
_while = duration(1.0, 366 * _DAY_S)


class Moment:
    """A time as it was written: unix time in ms, or seconds after the submission."""

    __slots__ = ("after_s", "at_ms")

    def __init__(self, at_ms: int = 0, after_s: float = 0.0) -> None:
        self.at_ms, self.after_s = at_ms, after_s


def read_array(reading: Reading, at: str, value: Any) -> ArraySpec | None:
    """Read the indices of an array."""
    if type(value) is int and value > 0:
        message = f"{value} is a number; needed is a text, {RULE}. Write the indices that are meant."
        reading.refuse(at, "GL-1102", message, f'"0-{value - 1}"')
        return None
    if type(value) is not str:
        reading.wrong(at, value, f"a text, {RULE}")
        return None
    if not value:
        return None
    try:
        return parse_array(value)
    except ValueError as e:
        reading.refuse(at, "GL-1105", f"{show(value)} is not what an array is: {e}; needed is {RULE}.")
        return None


def read_dependencies(reading: Reading, at: str, value: Any) -> tuple[Dependency, ...] | None:
    """Read a list of jobs, each with what is asked of it in front: after_ok:prepare."""
    items = value if type(value) is list else [value]
    if len(items) > MAX_DEPENDENCIES:
        reading.refuse(at, "GL-1110", f"{len(items):,} dependencies are more than the limit of {MAX_DEPENDENCIES}. An array counts as one.")
        return None
    found: list[Dependency] = []
    for i, item in enumerate(items):
        where = at if items is not value else f"{at}/{i}"
        if type(item) is not str:
            reading.wrong(where, item, "a text, as after_ok:JOB")
            continue
        word, colon, job = item.rpartition(":")
        word = word if colon else "after_ok"
        if word not in _CONDITIONS:
            near = _SLURM.get(word) or nearest(word, _CONDITIONS)
            what = f"{show(word)} is none of {', '.join(_CONDITIONS)}"
            reading.refuse(where, "GL-1106", f"{what}; a dependency is one of them, a colon and a job.", f"{near}:{job}" if near else "")
        elif not NAME.fullmatch(job):
            reading.refuse(where, "GL-1105", f"{show(job)} is neither an id nor a name of a job; a dependency is after_ok:JOB.")
        elif job in (other.job for other in found):
            reading.refuse(where, "GL-1108", f"{job} is named twice; one condition says what is asked of it.")
        else:
            found.append(Dependency(job, cast(Condition, word)))
    return tuple(found)


def read_moment(reading: Reading, at: str, value: Any) -> Moment | None:
    """Read a time with its zone, or a duration from the submission."""
    if type(value) is str and _RFC3339.fullmatch(value):
        try:
            moment = datetime.fromisoformat(value.upper().replace(" ", "T"))
        except ValueError as e:
            reading.refuse(at, "GL-1105", f"{show(value)} is not a time: {e}.")
            return None
        if moment.tzinfo is None:
            reading.refuse(at, "GL-1105", f"{show(value)} has no zone, and client and schedulers may be in different ones.", f"{value}Z")
            return None
        if not datetime(1971, 1, 1, tzinfo=UTC) < moment < _FARTHEST:
            reading.refuse(at, "GL-1104", f"{show(value)} is too far away.")
            return None
        return Moment(at_ms=round(moment.timestamp() * 1000))
    if type(value) is str and value and not value[0].isdecimal():
        reading.refuse(at, "GL-1105", f"{show(value)} is no time: needed is {_MOMENT_RULE}.")
        return None
    if type(value) is str and len(value) > 6 and value[4:5] == "-":
        reading.refuse(at, "GL-1105", f"{show(value)} is no whole time: needed is {_MOMENT_RULE}.")
        return None
    if type(value) not in (str, int, float):
        reading.wrong(at, value, f"a time: {_MOMENT_RULE}")
        return None
    seconds = _while(reading, at, value)
    return None if seconds is None else Moment(after_s=seconds)


def take_apart(reading: Reading, found: dict[str, Any]) -> None:
    """Put moments where the spec has them, and refuse those that contradict each other."""
    begin, deadline = found.pop("begin", None), found.pop("deadline", None)
    if begin is not None:
        found["begin_at_ms"], found["begin_after_s"] = begin.at_ms, begin.after_s
    if deadline is not None:
        found["deadline_ms"], found["deadline_after_s"] = deadline.at_ms, deadline.after_s
    if begin is None or deadline is None:
        return
    room_s = (deadline.at_ms - begin.at_ms) / 1000 if begin.at_ms and deadline.at_ms else deadline.after_s - begin.after_s
    comparable = bool(begin.at_ms) == bool(deadline.at_ms)
    if comparable and room_s <= found.get("time_limit_s", 0.0):
        limit = " with the time limit between them" if room_s > 0 else ""
        reading.refuse("/deadline", "GL-1108", f"The deadline is not behind the begin{limit}: the job could never run.")


def words(spec: JobSpec) -> dict[str, Any]:
    """Return these fields in the job file's words; empty where they are not given."""
    return {
        "array": array_text(spec.array) if spec.array is not None else "",
        "depends_on": [f"{each.when}:{each.job}" for each in spec.depends_on],
        "hold": spec.hold or "",
        "begin": _moment_word(spec.begin_at_ms, spec.begin_after_s),
        "deadline": _moment_word(spec.deadline_ms, spec.deadline_after_s),
    }


def _moment_word(at_ms: int, after_s: float) -> str | float:
    if at_ms:
        seconds, milli = divmod(at_ms, 1000)
        text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{text}.{milli:03d}Z" if milli else f"{text}Z"
    return duration_word(after_s) if after_s else ""
