"""Orders of a queue by service: who has least left to do, or has had least, is first. docs/queues.md, "Order by service".

    shortest_remaining           by the time left, time limit − time run                               (SRTF)
    shortest_remaining_service   by that times the GPUs                                                (SRSF)
    least_attained               by GPU time had so far; nothing has to be known beforehand            (Tiresias' 2D-LAS, NSDI 2019)

A job's *standing* is a whole number from 0 to STEPS - 1, larger is first. It comes after the priority of the job, and before its age:
the passes see `priority × STEPS + standing` as the priority of the job, so what holds for priorities (order, preempt, the potential that
falls with each eviction) holds for standings, without a word about them anywhere else. Ageing counts whole priorities, as always.

Standings are coarse on purpose. Both quantities are looked at by their logarithm: a job goes before another, and takes its place, only if it is
better by a step; in between the older one is first. While a job waits nothing changes. While it runs its standing changes at known times, a few
dozen in its life: the mirror takes it in again then, and for `least_attained`, where it gets worse, the queue is looked at.
"""

from __future__ import annotations

import math

from gangline.core.model.gpushares import GPU
from gangline.core.model.queues import QueueOrder
from gangline.core.model.state import Job, State
from gangline.core.policy import ageing

#: standings below one point of priority
STEPS = 1024
#: what is left differs by a step if it differs by so much
FINER = 1.05
#: what was had differs by a step if it is 20 times as much; below two GPU hours all jobs are alike. Finer steps make jobs of equal length
#: take turns, which delays all of them: with steps of 2 the mean of Muri's testbed trace is half as long again
COARSER = 20.0
FIRST_GPU_S = 7_200.0


def priority(state: State, job: Job, now_ms: int) -> int:
    """Return the priority of a job as the passes see it, without what it gained by waiting: on the scale of `scale`."""
    order = state.queues.order(state.queues.leaf_of(job.spec.queue))
    return job.spec.priority if order == "priority" else job.spec.priority * STEPS + STEPS - 1 - level(job, order, now_ms)


def scale(state: State, job: Job) -> int:
    """Return what one point of priority is, on the scale of the job's queue."""
    return 1 if state.queues.order(state.queues.leaf_of(job.spec.queue)) == "priority" else STEPS


def waiting_key(state: State, job: Job, now_ms: int) -> tuple[int, int]:
    """Return the place of a waiting job in its queue, the smallest first: what World.job_key makes of whole gangs that wait."""
    return (-priority(state, job, now_ms) - scale(state, job) * ageing.points(state, job, now_ms), job.order)


def level(job: Job, order: QueueOrder, now_ms: int) -> int:
    """Return how far down a job is in an order of its queue, 0 the first; the last one if its order cannot tell."""
    measure = _measure(job, order, now_ms)
    return STEPS - 1 if measure is None else _level(measure, *_steps(order))


def next_change_ms(job: Job, order: QueueOrder, now_ms: int) -> int | None:
    """Return the log time, after now, at which a job that runs has another level; None: it has not as long as it runs."""
    measure = _measure(job, order, now_ms)
    if order == "priority" or measure is None or not job.running_since_ms:
        return None
    first, factor = _steps(order)
    per_ms = (_gpus(job) if order != "shortest_remaining" else 1.0) / 1000
    at = _level(measure, first, factor)
    if order == "least_attained":
        way = first * factor**at - measure
    elif at == 0:
        return None
    else:
        way = measure - first * factor ** (at - 1)
    return now_ms + max(1, math.ceil(way / per_ms + 1e-6))


def worsens(state: State, job: Job) -> bool:
    """Whether others may come to stand before a job because it runs."""
    return bool(job.running_since_ms) and state.queues.order(state.queues.leaf_of(job.spec.queue)) == "least_attained"


def _level(measure: float, first: float, factor: float) -> int:
    if measure < first:
        return 0
    # A hair more, so that the next level is there when its time has come.
    return min(STEPS - 2, 1 + int(math.log(measure / first) / math.log(factor) + 1e-9))


def _steps(order: QueueOrder) -> tuple[float, float]:
    return (FIRST_GPU_S, COARSER) if order == "least_attained" else (1.0, FINER)


def _measure(job: Job, order: QueueOrder, now_ms: int) -> float | None:
    """Return seconds, or GPU seconds."""
    ran_s = (job.ran_ms + (now_ms - job.running_since_ms if job.running_since_ms else 0)) / 1000
    if order == "least_attained":
        return ran_s * _gpus(job)
    if not job.spec.time_limit_s:
        return None
    left = max(0.0, job.spec.time_limit_s - ran_s)
    return left * _gpus(job) if order == "shortest_remaining_service" else left


def _gpus(job: Job) -> float:
    """GPUs of the size that it has, or had; a job without any counts as one."""
    return max(job.holds().gpus_milli / GPU, 0.001) if job.spec.resources.wants_gpus or job.spec.roles else 1.0
