"""Small steps that the handlers of the fold share."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from gangline.core.model import events as ev
from gangline.core.model.state import FINISHED_KEPT, Job, Node, Part, State

#: what folds an event in: (state, event, index, epoch, log time in ms)
Handlers = dict[type[ev.LogEvent], Callable[[State, Any, int, int, int], None]]


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


def forget_oldest(state: State) -> None:
    """Forget finished jobs beyond those that are kept, unless ranks of theirs are still dying."""
    while len(state.finished) > FINISHED_KEPT:
        old = next(iter(state.finished))
        if state.jobs[old].held_nodes:
            return  # its last ranks are still dying: it is known until they are gone
        forget(state, old)


def current_job(state: State, e: ev.LogEvent, job_id: str, generation: int) -> Job:
    """Return a live job that is at this generation. Raises IllegalTransition."""
    job = live_job(state, e, job_id)
    if job.generation != generation:
        raise IllegalTransition(e, f"job {job_id} is at generation {job.generation}, not {generation}")
    return job


def part_on(job: Job, e: ev.LogEvent, node: str) -> Part:
    """Return what of the job is on the node. Raises IllegalTransition when nothing is."""
    if node not in job.parts:
        raise IllegalTransition(e, f"job {job.id} has nothing on {node}")
    return job.parts[node]


def known_node(state: State, e: ev.LogEvent, node: str) -> Node:
    """Return a node. Raises IllegalTransition when there is none of that name."""
    if node not in state.nodes:
        raise IllegalTransition(e, f"no node {node}")
    return state.nodes[node]


def enter(state: State, job: Job, to: Any, index: int, at_ms: int) -> None:
    """The job is in another state from now on."""
    job.state = to
    job.since_ms = at_ms
    state.scratch.moved[job.id] = None
    touch(state, job, index)
    touch_nodes(state, job)


def touch_nodes(state: State, job: Job) -> None:
    """All nodes of the job are to be looked at."""
    for node in job.parts:
        state.scratch.nodes[node] = None


def touch_node(state: State, node: Node, index: int) -> None:
    """The node has changed and is to be looked at."""
    node.index = index
    state.scratch.nodes[node.id] = None
    state.scratch.moved_nodes[node.id] = None
