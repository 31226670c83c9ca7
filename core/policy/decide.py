"""`decide`: what the scheduler wants to happen, each decision with its reason.

One cycle calls it until it returns nothing, folding its answer in between: so each pass sees what the one before it decided, and the whole
cycle still becomes one log entry.
"""

from __future__ import annotations

from heapq import heappop, heappush

from gangline.core.model import events as ev
from gangline.core.model.state import Job, State
from gangline.core.policy import health, recovery, resize, service, windows
from gangline.core.policy.schedule import LOOK_AGAIN_MS, schedule


def decide(state: State, now_ms: int) -> list[ev.LogEvent]:
    """Return the next decisions; an empty list when nothing is left to decide at `now_ms`.

    First what starts and ends by the clock (windows.py), then which devices and nodes can be used (health.py), then what placed gangs need
    (recovery.py), then the passes over the queues (schedule.py).
    """
    return windows.step(state, now_ms) or health.step(state, now_ms) or recover(state, now_ms) or schedule(state, now_ms)


def recover(state: State, now_ms: int) -> list[ev.LogEvent]:
    """One step for every gang whose situation calls for it, in order of submission."""
    jobs = sorted((state.jobs[j] for j in state.scratch.jobs if j in state.jobs), key=lambda j: j.order)
    steps = (_step(state, job, now_ms) for job in jobs)
    return [s for s in steps if s is not None]


def _step(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    try:
        return recovery.next_step(state, job, now_ms)
    except Exception as e:  # noqa: BLE001 - a job that the rules trip over must not stop all the others
        state.scratch.faults[job.id] = f"{type(e).__name__}: {e}"
        return None


# ---------------------------------------------------------------- what to look at


def attend_to_all(state: State) -> None:
    """Look at every job in the next cycle: after taking over, when nobody knows what has been looked at."""
    state.scratch.jobs = dict.fromkeys(j.id for j in state.jobs.values() if j.state != "finished")
    state.scratch.nodes = dict.fromkeys(state.nodes)
    state.scratch.timers = []
    state.scratch.queue_dirty = True
    state.scratch.everything_moved = True
    state.scratch.poison = {}
    health.attend_to_all(state)


def wake(state: State, now_ms: int) -> None:
    """Look again at the jobs whose time has come."""
    if state.queue and now_ms - state.scratch.looked_ms >= LOOK_AGAIN_MS:
        state.scratch.queue_dirty = True
    health.wake(state, now_ms)
    timers = state.scratch.timers
    while timers and timers[0][0] <= now_ms:
        job = state.jobs.get(heappop(timers)[1])
        if job is not None:
            state.scratch.jobs[job.id] = None
            if job.state == "queued" or resize.may_grow(job, now_ms) or service.worsens(state, job):
                state.scratch.queue_dirty = True
                state.scratch.moved[job.id] = None


def settle(state: State, now_ms: int) -> int | None:
    """Everything has been looked at as of `now_ms`: note when each job must be looked at again. Returns the log time of the next timer."""
    timers = state.scratch.timers
    for job_id in state.scratch.jobs:
        job = state.jobs.get(job_id)
        due = recovery.due_ms(state, job, now_ms) if job is not None else None
        if due is not None:
            heappush(timers, (due, job_id))
    state.scratch.jobs.clear()
    state.scratch.queue_dirty = False
    moments = [timers[0][0] if timers else None, windows.due_ms(state, now_ms), health.settle(state, now_ms)]
    return min((at for at in moments if at is not None), default=None)
