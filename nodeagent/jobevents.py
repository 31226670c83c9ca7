"""What ranks are told: one JSON object for each event, the same in the file GANGLINE_EVENTS and on the socket."""

from __future__ import annotations

import contextlib
import json
import os
import stat

import msgspec

from gangline.core.model.documents import DesiredGang, StopNotice

#: causes of a stop notice that are events of their own; every other one is a preemption
_EVENT_OF_CAUSE = {"drain": "drain", "resize": "resize", "migration": "migration", "health": "drain", "straggler": "drain"}

_EVENTS_BYTES_MAX = 1 << 18


def start_event(gang: DesiredGang, at_ms: int) -> dict[str, object]:
    """Return the first event of a generation: "start", or "restart" with everything that is known of the reason."""
    head = _head("restart" if gang.restart else "start", gang.job, gang.generation, at_ms)
    fields = _fields(gang.restart) if gang.restart else {}
    return head | {"world_size": gang.world_size} | fields


def stop_event(gang: DesiredGang, generation: int, notice: StopNotice, at_ms: int) -> dict[str, object]:
    """Return the event of a stop notice for the ranks of one generation."""
    fields = _fields(notice)
    if not notice.new_world_size:
        del fields["new_world_size"]
    return _head(_EVENT_OF_CAUSE.get(notice.cause, "preemption"), gang.job, generation, at_ms) | fields


def health_event(gang: DesiredGang, generation: int, at_ms: int) -> dict[str, object]:
    """Return the event that says what is not well of what the ranks on this node have; nothing any more is an empty list."""
    devices = [{"gpu": each.device if each.device >= 0 else None, "state": each.state, "message": each.message} for each in gang.health]
    return _head("health", gang.job, generation, at_ms) | {"devices": devices}


def append_event(path: str, event: dict[str, object]) -> None:
    """Append to an events file. No space is no reason not to start or stop a rank."""
    line = msgspec.json.encode(event) + b"\n"
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def read_events(path: str) -> list[dict[str, object]]:
    """Return the events in a file. The job could have written there, so what is no event is left out, and what is too much."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    with os.fdopen(fd, "rb") as f:
        data = f.read(_EVENTS_BYTES_MAX) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    events = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line, parse_constant=_refuse_constant)
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
    return events


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _head(name: str, job: str, generation: int, at_ms: int) -> dict[str, object]:
    return {"event": name, "job": job, "generation": generation, "at_ms": at_ms}


def _fields(struct: msgspec.Struct) -> dict[str, object]:
    # Every field, defaults too: who reads the line should not have to know them.
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
