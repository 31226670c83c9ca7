"""A log as it would have been with another clock: all of its times moved by the same. Pure.

Clocks of nodes are not in the log: what nodes say of times is turned into log time when it is taken in (leader/ingest.py).
"""

from __future__ import annotations

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.spec import JobSpec

#: log time is moved by so much: some years, and not a whole number of anything
SHIFT_MS = 123_456_789_123

_replace = msgspec.structs.replace


def moved(event: ev.LogEvent) -> ev.LogEvent:
    """Return the event with its times moved. Sentences for people may have times in them, so they are left out."""
    match event:
        case ev.JobSubmitted():
            return _replace(event, spec=_spec(event.spec))
        case ev.RanksExited():
            return _replace(event, exits=tuple(_replace(x, at_ms=_time(x.at_ms)) for x in event.exits))
        case ev.GangReserved():
            return _replace(event, start_ms=_time(event.start_ms), message="")
        case ev.GangRestarting():
            return _replace(event, not_before_ms=_time(event.not_before_ms), message="")
        case ev.GangPreempting():
            return _replace(event, deadline_ms=_time(event.deadline_ms), message="")
        case ev.GangResizing():
            return _replace(event, deadline_ms=_time(event.deadline_ms), avoid=_avoid(event.avoid), message="")
        case ev.GangRequeued():
            times = {"not_before_ms": _time(event.not_before_ms), "failed_at_ms": _time(event.failed_at_ms)}
            return _replace(event, avoid=_avoid(event.avoid), message="", **times)
        case ev.HealthReported():
            return _replace(event, symptoms=tuple(_replace(s, at_ms=_time(s.at_ms)) for s in event.symptoms))
        case ev.HealthChanged():
            return _replace(event, until_ms=_time(event.until_ms), message="")
        case ev.ReservationDeclared():
            kept = event.reservation
            return _replace(event, reservation=_replace(kept, start_ms=_time(kept.start_ms), end_ms=_time(kept.end_ms)))
        case ev.GangPlaced():
            return _replace(event, reason="")
        case ev.GangsDeferred() | ev.GangFinished() | ev.RankRestarting():
            return _replace(event, message="")
    return event


def without_words(event: ev.LogEvent) -> ev.LogEvent:
    """Return an event that the policy has decided on a moved log, as `moved` would have made it of the one in the log."""
    match event:
        case ev.GangPlaced():
            return _replace(event, reason="")
        case (
            ev.GangReserved() | ev.GangRestarting() | ev.GangPreempting() | ev.GangResizing() | ev.GangRequeued() | ev.GangsDeferred()
            | ev.GangFinished() | ev.RankRestarting() | ev.HealthChanged()
        ):
            return _replace(event, message="")
    return event


def _spec(spec: JobSpec) -> JobSpec:
    if not spec.begin_at_ms and not spec.deadline_ms:
        return spec
    return _replace(spec, begin_at_ms=_time(spec.begin_at_ms), deadline_ms=_time(spec.deadline_ms))


def _time(at_ms: int) -> int:
    """0 is no time."""
    return at_ms + SHIFT_MS if at_ms else 0


def _avoid(avoid: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    return tuple((node, _time(until)) for node, until in avoid)
