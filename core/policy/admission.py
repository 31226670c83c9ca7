"""Whether a job takes part yet, when it is over before its ranks are, and which elements of an array become jobs. Pure.

    depends_on ─▶ held ─▶ before its begin ─▶ takes part in the passes            why: dependency, held, before_begin
    a dependency that can never be met, a deadline that cannot be kept ─▶ over     cause: dependency_failed, deadline

An array is never placed. Its elements become jobs a window at a time, so that an array of a million costs what runs and what is next; when the
last has ended, the array has.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from gangline.core.model import events as ev
from gangline.core.model.arrays import has_position, indices_from, indices_text, size
from gangline.core.model.foldlife import called
from gangline.core.model.state import Elements, Job, State
from gangline.core.policy.refusals import Refusal

#: elements of one array that wait as jobs; when half of them have been placed, the next ones come
WINDOW = 1_000
#: dependencies named in one sentence
_NAMED = 3

_WANTED = {"after_ok": "to succeed", "after_any": "to end", "after_not_ok": "to fail", "after_start": "to start"}


def gate(state: State, job: Job, now_ms: int) -> Refusal | None:
    """Return why a job does not take part yet, None when it does; an element is bound by what is said of its array, too."""
    if job.waits_for:
        named = [f"{called(state, other)} {_WANTED[when]}" for other, when in list(job.waits_for.items())[:_NAMED]]
        more = f" and {len(job.waits_for) - _NAMED} more" if len(job.waits_for) > _NAMED else ""
        return Refusal("dependency", f"waits for {', for '.join(named)}{more}")
    for held in (job, state.jobs.get(job.array)):
        if held is not None and held.held:
            by = f" by {held.held_by}" if held.held_by else ""
            what = "its array is held" if held is not job else "held"
            return Refusal("held", f"{what}{by}{f': {held.held_reason}' if held.held_reason else ''}")
    if now_ms < job.begin_at_ms:
        return Refusal("before_begin", f"not before {utc(job.begin_at_ms)}")
    return None


def ends(state: State, job: Job, now_ms: int) -> ev.GangFinished | None:
    """Return the end of a job that was stopped, that waits for something that cannot come, or that waits and does not make its deadline."""
    if job.state == "finished":
        return None
    array = state.jobs.get(job.array) if job.array else None
    for stopped in (job, array):
        if stopped is not None and stopped.stop:
            by = f" by {stopped.stop_by}" if stopped.stop_by else ""
            return ev.GangFinished(job=job.id, outcome="cancelled", cause="stopped", message=f"stopped{by}: {stopped.stop}")
    if job.dependency_failed:
        return ev.GangFinished(job=job.id, outcome="cancelled", cause="dependency_failed", message=job.dependency_failed)
    return None if job.active else late(job, now_ms)


def late(job: Job, now_ms: int) -> ev.GangFinished | None:
    """Return the end of a job that has not made its deadline, or cannot make it any more."""
    if not job.deadline_ms or now_ms < _latest_ms(job):
        return None
    why = f"its deadline, {utc(job.deadline_ms)}, has passed"
    if now_ms < job.deadline_ms:
        why = f"with its time limit of {job.spec.time_limit_s:g} s it could no longer end by its deadline, {utc(job.deadline_ms)}"
    return ev.GangFinished(job=job.id, outcome="failed", cause="deadline", message=why)


def moments(job: Job) -> Iterator[int]:
    """Yield the log times at which `gate` or `ends` may answer otherwise although nothing happens."""
    if job.state in ("queued", "array"):
        yield job.begin_at_ms
    if job.deadline_ms and job.state != "finished":
        yield _latest_ms(job)
        yield job.deadline_ms


def _latest_ms(job: Job) -> int:
    """Return from when on a deadline is missed: a gang that waits needs what is left of its time limit, and an array that of one element."""
    if job.active:
        return job.deadline_ms
    needed_ms = max(0, int(job.spec.time_limit_s * 1000) - job.ran_ms) if job.spec.time_limit_s else 0
    if job.begin_at_ms + needed_ms > job.deadline_ms:
        return 0  # it may not even begin in time
    return job.deadline_ms - needed_ms + (1 if needed_ms else 0)


# ---------------------------------------------------------------- arrays


def array_step(state: State, array: Job, now_ms: int) -> ev.LogEvent | None:
    """Return what is to be decided about an array now: its end, its next elements, or why there are none."""
    elements, spec = array.elements, array.spec.array
    if elements is None or spec is None or array.state == "finished":
        return None
    if not elements.live and elements.opened == size(spec):
        return _outcome(array, elements)
    over = ends(state, array, now_ms)
    if over is not None:
        return None if elements.live else over  # they end for the same reason, and then the array does
    count = _room(array, elements)
    if count <= 0:
        return None
    closed = gate(state, array, now_ms)
    if closed is not None:
        same = array.deferral is not None and array.deferral.code == closed.code
        return None if same else ev.GangsDeferred(jobs=(array.id,), code=closed.code, message=closed.message)
    indices: list[int] = []
    for position, index in enumerate(indices_from(spec, elements.opened), elements.opened):
        if len(indices) == count:
            break
        if not has_position(elements.cancelled, position):
            indices.append(index)
    return ev.ElementsQueued(job=array.id, indices=tuple(indices))


def _room(array: Job, elements: Elements) -> int:
    """Return how many elements may become jobs now, beyond what is left of them."""
    spec = array.spec.array
    assert spec is not None
    # Where very many run, very many may end at once: the window grows with them.
    window = max(WINDOW, (len(elements.live) - elements.queued) // 4)
    if elements.opened == size(spec) or elements.queued > window // 2:
        return 0
    room = window - elements.queued
    return min(room, spec.at_most - len(elements.live)) if spec.at_most else room


def _outcome(array: Job, elements: Elements) -> ev.GangFinished:
    spec = array.spec.array
    assert spec is not None
    total = size(spec)
    for outcome, runs in (("failed", elements.failed), ("cancelled", elements.cancelled)):
        if runs:
            message = f"{sum(b - a + 1 for a, b in runs)} of {total} elements {'failed' if outcome == 'failed' else 'were cancelled'}"
            return ev.GangFinished(
                job=array.id, outcome="failed" if outcome == "failed" else "cancelled", cause=f"elements_{outcome}",
                message=f"{message}: {indices_text(spec, runs)}", exit_code=elements.exit_code if outcome == "failed" else 0,
            )  # fmt: skip
    return ev.GangFinished(job=array.id, outcome="succeeded", cause="completed", message=f"all {total} elements succeeded")


# ---------------------------------------------------------------- words


def utc(at_ms: int) -> str:
    """Return a time as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

