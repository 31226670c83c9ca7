"""The fold, as far as it is about when a job takes part: arrays and their elements, dependencies, hold and release.

A job that ends, or starts, is looked up in `State.dependents`, so that only those that wait for it are looked at. What a dependency has come to
is settled there and then: whatever is forgotten later, nobody waits for it any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gangline.core.model import events as ev
from gangline.core.model.arrays import add_position, element_id, has_position, indices_from, position_of, size, split_element
from gangline.core.model.events import Outcome
from gangline.core.model.foldsteps import Handlers, IllegalTransition, enqueue, forget, live_job, queue_key, touch
from gangline.core.model.spec import Condition
from gangline.core.model.state import ELEMENTS_KEPT, Elements, Job, State

# ---------------------------------------------------------------- submission


def check_submitted(state: State, e: ev.JobSubmitted) -> None:
    """Raise IllegalTransition for a job that depends on one that is not known."""
    for dependency in e.spec.depends_on:
        if not known(state, dependency.job):
            raise IllegalTransition(e, f"{e.job} depends on {dependency.job}, which is not known")


def known(state: State, job_id: str) -> bool:
    """Whether there is such a job, or such an element of an array."""
    return job_id in state.jobs or _element(state, job_id) is not None


def submitted(state: State, job: Job, at_ms: int) -> None:
    """Put a new job where it waits."""
    spec = job.spec
    set_conditions(job, at_ms)
    state.scratch.moved[job.id] = None
    state.scratch.jobs[job.id] = None
    for dependency in spec.depends_on:
        job.waits_for[dependency.job] = dependency.when
        for waited_for in _indexed_under(state, dependency.job):
            state.dependents.setdefault(waited_for, {})[job.id] = None
    for waited_for in list(job.waits_for):
        _settle(state, job, waited_for, at_ms)
    if spec.array is not None:
        job.state, job.elements = "array", Elements()
        state.arrays[job.id] = None
    else:
        enqueue(state, job)


def set_conditions(job: Job, at_ms: int) -> None:
    """Take over from the spec when a job submitted now may run; what was given as a while from now becomes a time."""
    spec = job.spec
    job.held, job.held_by = spec.hold, job.user if spec.hold else ""
    job.held_reason = "submitted on hold" if spec.hold else ""
    job.begin_at_ms = spec.begin_at_ms or (at_ms + int(spec.begin_after_s * 1000) if spec.begin_after_s else 0)
    job.deadline_ms = spec.deadline_ms or (at_ms + int(spec.deadline_after_s * 1000) if spec.deadline_after_s else 0)


# ---------------------------------------------------------------- dependencies


def is_met(state: State, waited_for: str, condition: Condition) -> bool | None:
    """Whether a dependency is met; None: that is open."""
    outcome, has_started = how_far(state, waited_for)
    met: dict[Condition, bool] = {
        "after_start": has_started,
        "after_any": bool(outcome),
        "after_ok": outcome == "succeeded",
        "after_not_ok": outcome in ("failed", "cancelled"),
    }
    return met[condition] or (False if outcome else None)


def _indexed_under(state: State, job_id: str) -> Iterator[str]:
    """Ids whose change may settle a dependency on this one: its own, and that of its array, which may end without it."""
    yield job_id
    if (found := _element(state, job_id)) is not None:
        yield found[0].id


def _element(state: State, job_id: str) -> tuple[Job, int] | None:
    """Return the array and the position of an element, None when it is none."""
    split = split_element(job_id)
    array = state.jobs.get(split[0]) if split is not None else None
    if split is None or array is None or array.elements is None or array.spec.array is None:
        return None
    position = position_of(array.spec.array, split[1])
    return None if position is None else (array, position)


def how_far(state: State, job_id: str) -> tuple[Outcome | Literal[""], bool]:
    """Return the outcome of a job or an element, "" before it has ended, and whether it has started; of an array, whether all of it has."""
    job = state.jobs.get(job_id)
    if job is not None:
        if job.elements is not None and job.spec.array is not None:
            return job.outcome, job.elements.started == size(job.spec.array)
        return job.outcome, bool(job.started_at_ms)
    found = _element(state, job_id)
    elements = found[0].elements if found is not None else None
    if found is None or elements is None:
        return "", False
    array, position = found
    # Of an element that is forgotten it is no longer known whether it ran before it was cancelled.
    if has_position(elements.succeeded, position):
        return "succeeded", True
    if has_position(elements.failed, position):
        return "failed", True
    over = array.outcome or has_position(elements.cancelled, position)
    return ("cancelled" if over else ""), False


def _settle(state: State, job: Job, waited_for: str, at_ms: int) -> None:
    """Look at one dependency of a waiting job: take it out when it is met, and note when it never will be."""
    condition = job.waits_for[waited_for]
    met = is_met(state, waited_for, condition)
    if met:
        _take_out(state, job, waited_for)
        job.cleared_ms = at_ms
        job.deferral = None
    elif met is not None:
        wanted = {"after_ok": "to succeed", "after_not_ok": "not to succeed"}.get(condition, "to start")
        outcome = how_far(state, waited_for)[0]
        how = "ended without having started" if condition == "after_start" else f"was {outcome}" if outcome == "cancelled" else f"has {outcome}"
        job.dependency_failed = f"it waited for {called(state, waited_for)} {wanted}, and that {how}"
    else:
        return
    state.scratch.moved[job.id] = None
    state.scratch.jobs[job.id] = None
    state.scratch.queue_dirty = True


def called(state: State, job_id: str) -> str:
    """Return what to call a job to people who may know it by its name or by its id."""
    job = state.jobs.get(job_id)
    return f"{job.spec.name} ({job_id})" if job is not None and job.spec.name else job_id


def _take_out(state: State, job: Job, waited_for: str) -> None:
    del job.waits_for[waited_for]
    still = {under for other in job.waits_for for under in _indexed_under(state, other)}
    for under in _indexed_under(state, waited_for):
        if under not in still and under in state.dependents:
            state.dependents[under].pop(job.id, None)
            if not state.dependents[under]:
                del state.dependents[under]


def _settle_dependents(state: State, job: Job, at_ms: int) -> None:
    for dependent in list(state.dependents.get(job.id, ())):
        waiting = state.jobs[dependent]
        for waited_for in list(waiting.waits_for):
            if job.id in _indexed_under(state, waited_for):
                _settle(state, waiting, waited_for, at_ms)


def started(state: State, job: Job, index: int, at_ms: int) -> None:
    """All ranks of a job run for the first time."""
    _settle_dependents(state, job, at_ms)
    array = state.jobs.get(job.array) if job.array else None
    if array is not None and array.elements is not None:
        array.elements.started += 1
        array.started_at_ms = array.started_at_ms or at_ms
        touch(state, array, index)
        _settle_dependents(state, array, at_ms)


def ended(state: State, job: Job, index: int, at_ms: int) -> None:
    """A job is over: those that wait for it are told, and its array counts it."""
    for waited_for in list(job.waits_for):
        _take_out(state, job, waited_for)
    state.arrays.pop(job.id, None)
    if job.elements is not None:
        job.elements.kept = []
    if job.array:
        _count_ended(state, state.jobs[job.array], job, index)
    _settle_dependents(state, job, at_ms)


# ---------------------------------------------------------------- arrays


def elements_queued(state: State, e: ev.ElementsQueued, index: int, epoch: int, at_ms: int) -> None:
    """Make jobs of the next elements of an array."""
    array = live_job(state, e, e.job)
    elements, spec = array.elements, array.spec.array
    if elements is None or spec is None:
        raise IllegalTransition(e, f"{e.job} is no array")
    position = elements.opened
    positions: list[int] = []
    coming = indices_from(spec, position)
    for wanted in e.indices:
        found = -1
        for candidate in coming:
            position += 1
            if not has_position(elements.cancelled, position - 1):
                found = candidate
                break
        if found != wanted:
            raise IllegalTransition(e, f"{e.job}.{wanted} is not the next element")
        positions.append(position - 1)
    if not positions:
        raise IllegalTransition(e, "no elements")
    for place, number in zip(positions, e.indices, strict=True):
        job = Job(
            id=element_id(array.id, number), spec=array.spec, number=array.number, submitted_at_ms=array.submitted_at_ms, submitted_index=index,
            user=array.user, trace_id=array.trace_id, since_ms=at_ms, index=index, array=array.id, array_index=number, position=place,
            deadline_ms=array.deadline_ms,
        )  # fmt: skip
        state.jobs[job.id] = job
        elements.live[job.id] = None
        state.scratch.moved[job.id] = None
        state.scratch.jobs[job.id] = None
        enqueue(state, job)
    elements.opened = position
    _skip_cancelled(array)
    array.deferral = None
    touch(state, array, index)


def _skip_cancelled(array: Job) -> None:
    """Elements that were given up before their turn do not hold up the end of the array."""
    elements = array.elements
    assert elements is not None
    while has_position(elements.cancelled, elements.opened):
        elements.opened += 1


def cancel_unopened(state: State, e: ev.JobStopRequested, index: int, at_ms: int) -> bool:
    """Give up an element that is not a job yet; False when it is none."""
    if e.job in state.jobs or (found := _element(state, e.job)) is None:
        return False
    array, position = found
    elements = array.elements
    assert elements is not None
    if array.state == "finished" or position < elements.opened or has_position(elements.cancelled, position):
        raise IllegalTransition(e, f"element {e.job} has ended")
    add_position(elements.cancelled, position)
    _skip_cancelled(array)
    touch(state, array, index)
    for dependent in list(state.dependents.get(e.job, ())):
        _settle(state, state.jobs[dependent], e.job, at_ms)
    return True


def touch_elements(state: State, array: Job) -> None:
    """What was said of an array concerns its live elements."""
    if array.elements is not None:
        for element in array.elements.live:
            state.scratch.jobs[element] = None
            state.scratch.moved[element] = None
        state.scratch.queue_dirty = True


def _count_ended(state: State, array: Job, job: Job, index: int) -> None:
    elements = array.elements
    assert elements is not None
    del elements.live[job.id]
    runs = {"succeeded": elements.succeeded, "failed": elements.failed}.get(job.outcome, elements.cancelled)
    add_position(runs, job.position)
    if job.outcome == "failed":
        elements.exit_code = elements.exit_code or job.exit_code
    elements.kept.append(job.id)
    while len(elements.kept) > ELEMENTS_KEPT:
        oldest = state.jobs.get(elements.kept[0])
        if oldest is not None and oldest.held_nodes:
            break  # its last ranks are still dying
        if oldest is not None:
            forget(state, oldest.id)
        del elements.kept[0]
    touch(state, array, index)


# ---------------------------------------------------------------- hold and release


def job_held(state: State, e: ev.JobHeld, index: int, epoch: int, at_ms: int) -> None:
    """The job is not started any more."""
    job = live_job(state, e, e.job)
    job.held, job.held_by, job.held_reason = True, e.by, e.reason
    job.held_requeue = e.requeue and job.active
    if job.elements is not None and e.requeue:
        for element in job.elements.live:
            state.jobs[element].held_requeue = state.jobs[element].active
    _hold_changed(state, job, index)


def job_released(state: State, e: ev.JobReleased, index: int, epoch: int, at_ms: int) -> None:
    """The job may be started again."""
    job = live_job(state, e, e.job)
    if not job.held:
        raise IllegalTransition(e, f"job {job.id} is not held")
    job.held, job.held_by, job.held_reason, job.held_requeue = False, "", "", False
    job.cleared_ms = at_ms
    _hold_changed(state, job, index)
    for element in job.elements.live if job.elements is not None else ():
        state.jobs[element].cleared_ms = at_ms
        state.jobs[element].held_requeue = False


def _hold_changed(state: State, job: Job, index: int) -> None:
    job.deferral = None
    for element in job.elements.live if job.elements is not None else ():
        state.jobs[element].deferral = None
    state.scratch.moved[job.id] = None
    state.scratch.queue_dirty = True
    touch(state, job, index)
    touch_elements(state, job)


# ---------------------------------------------------------------- ageing


def count_wait(job: Job, at_ms: int) -> None:
    """A waiting job is placed: how long it waited counts for good (policy/ageing.py)."""
    job.waited_ms += max(0, at_ms - max(job.since_ms, job.cleared_ms, job.begin_at_ms))


# ---------------------------------------------------------------- what is derived


def index_jobs(state: State) -> None:
    """Make what is derived from the jobs anew, after they were loaded."""
    state.queue = sorted(queue_key(job) for job in state.jobs.values() if job.state == "queued")
    state.arrays = {job.id: None for job in state.jobs.values() if job.state == "array"}
    state.named = {job.spec.name: job.id for job in state.jobs.values() if job.spec.name and not job.array}
    state.dependents = {}
    for job in state.jobs.values():
        for waited_for in job.waits_for:
            for under in _indexed_under(state, waited_for):
                state.dependents.setdefault(under, {})[job.id] = None


#: by the event that each folds in
HANDLERS: Handlers = {
    ev.JobHeld: job_held,
    ev.JobReleased: job_released,
    ev.ElementsQueued: elements_queued,
}
