"""`decide`: what the scheduler wants to happen, each decision with its reason.

One cycle calls it until it returns nothing, folding its answer in between: so each pass sees what the one before it decided, and the whole
cycle still becomes one log entry.
"""

from __future__ import annotations

from heapq import heappop, heappush

from gangline.core.model import events as ev
from gangline.core.model.state import Job, State
from gangline.core.policy import placement, recovery

#: jobs named in one gangs_deferred event, which keeps the event small
_DEFERRED_TOGETHER = 500
#: GPUs and ranks placed in one call, which keeps the frame small
_RANKS_AT_ONCE = 20_000


def decide(state: State, now_ms: int) -> list[ev.LogEvent]:
    """Return the next decisions; an empty list when nothing is left to decide at `now_ms`.

    Passes, in order: what placed gangs need, then placing queued ones.
    """
    return recover(state, now_ms) or allocate(state, now_ms)


def recover(state: State, now_ms: int) -> list[ev.LogEvent]:
    """One step for every gang whose situation calls for it, in order of submission."""
    jobs = sorted((state.jobs[j] for j in state.scratch.jobs if j in state.jobs), key=lambda j: j.number)
    steps = (_step(state, job, now_ms) for job in jobs)
    return [s for s in steps if s is not None]


def _step(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    try:
        return recovery.next_step(state, job, now_ms)
    except Exception as e:  # noqa: BLE001 - a job that the rules trip over must not stop all the others
        state.scratch.faults[job.id] = f"{type(e).__name__}: {e}"
        return None


def allocate(state: State, now_ms: int) -> list[ev.LogEvent]:
    """Place what fits, in order of the queue; give the rest its reason."""
    if not state.scratch.queue_dirty:
        return []
    free = placement.FreeView(state)
    failed: dict[tuple[object, ...], placement.Refusal] = {}
    placed: list[ev.LogEvent] = []
    deferred: dict[tuple[str, str], list[Job]] = {}
    reasons: dict[tuple[str, str], placement.Refusal] = {}
    ranks = 0
    for _, _, job_id in state.queue:
        job = state.jobs[job_id]
        if job.not_before_ms > now_ms:
            continue
        answer = _try(state, job, free, failed, now_ms)
        if isinstance(answer, placement.Refusal):
            if job.deferral is None or job.deferral.code != answer.code:
                key = (answer.code, answer.message)
                reasons[key] = answer
                deferred.setdefault(key, []).append(job)
            continue
        free.take(job, answer)
        placed.append(ev.GangPlaced(job=job.id, generation=job.generation + 1, parts=answer, reason=_why(job)))
        ranks += sum(len(p.ranks) for p in answer)
        if ranks >= _RANKS_AT_ONCE:
            break
    return placed or _deferrals(deferred, reasons)


def _try(
    state: State, job: Job, free: placement.FreeView, failed: dict[tuple[object, ...], placement.Refusal], now_ms: int
) -> tuple[ev.PlacedPart, ...] | placement.Refusal:
    """Place one gang; shapes that have failed in this pass are not tried again."""
    away = [n for n in job.held_nodes if state.nodes[n].status == "lost"]
    if away:
        message = f"its ranks may still run on {', '.join(away)}, which cannot be reached, and it says on_disconnect: keep"
        return placement.Refusal("ranks_may_run", message)
    special = bool(job.avoid or job.previous_nodes)
    key = placement.shape(job)
    if not special and key in failed:
        return failed[key]
    try:
        answer = placement.place(job, free.for_job(job, now_ms))
    except Exception as e:  # noqa: BLE001 - a job that the rules trip over must not stop all the others
        return placement.Refusal("policy_error", f"the scheduler's rules failed on this job: {type(e).__name__}: {e}")
    if not special and isinstance(answer, placement.Refusal):
        failed[key] = answer
    return answer


def _why(job: Job) -> str:
    return "first that fits in order of the queue" if job.restart is None else f"placed again after {job.restart.cause}"


def _deferrals(deferred: dict[tuple[str, str], list[Job]], reasons: dict[tuple[str, str], placement.Refusal]) -> list[ev.LogEvent]:
    out: list[ev.LogEvent] = []
    for key, jobs in deferred.items():
        r = reasons[key]
        for at in range(0, len(jobs), _DEFERRED_TOGETHER):
            some = tuple(j.id for j in jobs[at : at + _DEFERRED_TOGETHER])
            out.append(ev.GangsDeferred(jobs=some, code=r.code, message=r.message, need=r.need, have=r.have))
    return out


# ---------------------------------------------------------------- what to look at


def attend_to_all(state: State) -> None:
    """Look at every job in the next cycle: after taking over, when nobody knows what has been looked at."""
    state.scratch.jobs = dict.fromkeys(j.id for j in state.jobs.values() if j.state != "finished")
    state.scratch.nodes = dict.fromkeys(state.nodes)
    state.scratch.timers = []
    state.scratch.queue_dirty = True


def wake(state: State, now_ms: int) -> None:
    """Look again at the jobs whose time has come."""
    timers = state.scratch.timers
    while timers and timers[0][0] <= now_ms:
        job = state.jobs.get(heappop(timers)[1])
        if job is not None:
            state.scratch.jobs[job.id] = None
            state.scratch.queue_dirty = state.scratch.queue_dirty or job.state == "queued"


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
    return timers[0][0] if timers else None
