"""Bounded ageing: a job that waits gains priority within its queue, a point at a time and never more than so many.

    boost(t) = min(ageing_most, floor(ageing_per_hour × waited(t) / 1 h))          (whole points; both amounts are the queue's, docs/queues.md)

`waited(t)` is the time since which the job could have been placed as far as it is concerned itself: not held, its dependencies met, its begin
reached. It stops while the job is placed and goes on when it is queued again; while it waits, it is looked at in whole minutes of log time.

The order must stay cheap. A job's place changes at most `ageing_most` times in its life, each time by one insertion into its group
(waiting.py): its next point is one of the timers of decide.py, and nothing else is looked at. Since points come on the minute, all of one
minute share a session. Between two points the key is constant, so nothing is ever sorted anew.

What is gained counts in the order of jobs in one queue, and against being preempted while it runs: whoever overtook by it is not preempted by
those that it overtook. It does not count for preempting: waiting is no reason to end the work of others.
"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.core.model.state import Job, State

_HOUR_MS = 3_600_000
_MINUTE_MS = 60_000


def points(state: State, job: Job, now_ms: int) -> int:
    """Return how many points of priority the job has gained by waiting."""
    if not state.queues.ages:
        return 0
    per_hour, most = state.queues.ageing(state.queues.leaf_of(job.spec.queue))
    if not per_hour:
        return 0
    waited_ms = job.waited_ms
    if job.state == "queued":
        waited_ms += max(0, now_ms - now_ms % _MINUTE_MS - _since_ms(job))
    return min(most, int(per_hour * waited_ms / _HOUR_MS + 1e-9))  # a hair more, so that a point is there when its timer is due


def next_point_ms(state: State, job: Job) -> Iterator[int]:
    """Yield the log times at which a waiting job gains its points; `due_ms` takes the next one."""
    per_hour, most = state.queues.ageing(state.queues.leaf_of(job.spec.queue))
    if not per_hour:
        return
    for point in range(1, most + 1):
        at_ms = _since_ms(job) - job.waited_ms + int(-(-point * _HOUR_MS // per_hour))
        yield -(-at_ms // _MINUTE_MS) * _MINUTE_MS


def _since_ms(job: Job) -> int:
    return max(job.since_ms, job.cleared_ms, job.begin_at_ms)
