"""What people call jobs: ids, names, and elements of arrays by index. Pure, and no slower when there are more jobs."""

from __future__ import annotations

from gangline.core.model.arrays import element_id, has_position, position_of, split_element
from gangline.core.model.foldlife import how_far
from gangline.core.model.state import Deferral, Job, State


def find_id(state: State, ref: str) -> str | None:
    """Return the id that an id means, or a name (its newest job), or either with a dot and an index; None for none that is known."""
    if ref in state.jobs:
        return ref
    if ref in state.named:
        return state.named[ref]
    split = split_element(ref)
    array = state.jobs.get(find_id(state, split[0]) or "") if split is not None else None
    if split is None or array is None or array.elements is None or array.spec.array is None:
        return None
    return element_id(array.id, split[1]) if position_of(array.spec.array, split[1]) is not None else None


def as_job(state: State, job_id: str) -> Job | None:
    """Return the job of an id. Of an element that is not a job, what its array knows of it stands in for that: it waits, or it has ended."""
    if job_id in state.jobs:
        return state.jobs[job_id]
    split = split_element(job_id)
    array = state.jobs.get(split[0]) if split is not None else None
    if split is None or array is None or array.elements is None or array.spec.array is None:
        return None
    position = position_of(array.spec.array, split[1])
    if position is None:
        return None
    element = Job(
        id=job_id, spec=array.spec, number=array.number, submitted_at_ms=array.submitted_at_ms, submitted_index=array.submitted_index,
        user=array.user, trace_id=array.trace_id, since_ms=array.submitted_at_ms, index=array.index, array=array.id, array_index=split[1],
        position=position, deadline_ms=array.deadline_ms,
    )  # fmt: skip
    outcome, _ = how_far(state, job_id)
    if outcome:
        element.state, element.outcome = "finished", outcome
        element.message = "it is only in the log any more" if position < array.elements.opened else "it was given up before its turn came"
        if has_position(array.elements.cancelled, position) or outcome == "cancelled":
            element.cause = "stopped"
    else:
        element.deferral = array.deferral or Deferral("array_turn", _turn(array), index=array.index)
    return element


def _turn(array: Job) -> str:
    limit = array.spec.array.at_most if array.spec.array is not None else 0
    live = len(array.elements.live) if array.elements is not None else 0
    most = f", at most {limit} at once" if limit else ""
    return f"its turn has not come: {live} elements of its array are live{most}, and they go in order"
