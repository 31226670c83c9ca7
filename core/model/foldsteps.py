"""Small steps that the handlers of the fold share."""

from __future__ import annotations

from bisect import bisect_left, insort

from gangline.core.model import events as ev
from gangline.core.model.state import Job, State


class IllegalTransition(Exception):
    """The event cannot happen in this state. In a log that is a fault of whoever wrote it; before an append it stops the writer."""

    def __init__(self, event: ev.LogEvent, why: str) -> None:
        super().__init__(f"{event.NAME}: {why}")
        self.event = event
        self.why = why


def queue_key(job: Job) -> tuple[int, int, str]:
    """Order of the queue: highest priority first, then order of submission."""
    return (-job.spec.priority, job.order, job.id)


def enqueue(state: State, job: Job) -> None:
    """The job waits in the queue."""
    insort(state.queue, queue_key(job))
    state.scratch.queue_dirty = True
    _count_queued(state, job, 1)


def dequeue(state: State, job: Job) -> None:
    """The job no longer waits in the queue."""
    key = queue_key(job)
    at = bisect_left(state.queue, key)
    if at < len(state.queue) and state.queue[at] == key:
        del state.queue[at]
    _count_queued(state, job, -1)


def _count_queued(state: State, job: Job, by: int) -> None:
    if job.array and (elements := state.jobs[job.array].elements) is not None:
        elements.queued += by
        state.scratch.jobs[job.array] = None


def capacity(state: State) -> None:
    """Something that could help a waiting gang has changed."""
    state.capacity_version += 1
    state.scratch.queue_dirty = True


def live_job(state: State, e: ev.LogEvent, job_id: str) -> Job:
    """Return a job that is not over. Raises IllegalTransition when there is none."""
    job = state.jobs.get(job_id)
    if job is None:
        raise IllegalTransition(e, f"no job {job_id}")
    if job.state == "finished":
        raise IllegalTransition(e, f"job {job_id} has {job.outcome} and stays so")
    return job


def touch(state: State, job: Job, index: int) -> None:
    """The job has changed in a way that may ask for a decision."""
    job.index = index
    state.scratch.jobs[job.id] = None


def forget(state: State, job_id: str) -> None:
    """A finished job of which nothing is left is only in the log from now on."""
    del state.finished[job_id]
    job = state.jobs.pop(job_id)
    state.keys.pop(job.idempotency_key, None)
    if state.named.get(job.spec.name) == job_id:
        del state.named[job.spec.name]
