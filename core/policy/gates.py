"""What must hold before any node is looked at: the job's queue and all its ancestors allow the chunk.

    allocated + chunk <= limit, for every job
    allocated to non-preemptible work + chunk <= quota, for a job that cannot be preempted

The same by GPU model where queues have such bounds (models.py): all models of the nodes that will do together must allow what is asked for.

A resource of which nothing is asked for is not looked at. Memory requests are counted on the largest devices here, as the most favourable
case; predicates.fit looks again when the node is known. Fair share is no gate: preemptible work may use whatever is idle.
"""

from __future__ import annotations

from gangline.core.policy.gangs import Job, Rank, charge_of, next_chunk
from gangline.core.policy.models import tightest
from gangline.core.policy.queues import Queue
from gangline.core.policy.refusals import Refusal, over_bound, over_model_bound
from gangline.core.policy.requests import Request, Vector
from gangline.core.policy.waiting import Group
from gangline.core.policy.world import World


def closed(world: World, job: Job, chunk: list[Rank]) -> Refusal | None:
    """Return why the queues do not allow the chunk; None if they do."""
    if not world.options.quotas:
        return None
    refusal = not_allowed(job, charge_of(chunk, world.largest_device_mib))
    if refusal is None and job.queue.models:
        refusal = _closed_by_model(world, job, chunk)
    return refusal


def closed_to_all(world: World, group: Group) -> Refusal | None:
    """Return why the queues do not allow the next chunk of any job of a group."""
    if not world.options.quotas:
        return None
    first = group.first
    refusal = not_allowed(first, group.vector(world.largest_device_mib))
    if refusal is None and first.queue.models:
        refusal = _closed_by_model(world, first, next_chunk(first))
    return refusal


def not_allowed(job: Job, need: Vector) -> Refusal | None:
    """Return which queue of the job's path does not allow so much, whatever the models; None if all do."""
    for queue in job.queue.path:
        for r in range(3):
            if need[r] and queue.allocated[r] + need[r] > queue.limit[r]:
                return over_bound("over_limit", queue.name, r, need[r], queue.limit[r] - queue.allocated[r])
            if need[r] and not job.preemptible and queue.nonpreemptible[r] + need[r] > queue.quota[r]:
                return over_bound("over_quota", queue.name, r, need[r], queue.quota[r] - queue.nonpreemptible[r])
    return None


def tightest_limit(queue: Queue, need: Vector) -> Queue | None:
    """Return the lowest queue of the path whose limit does not allow `need`; None if all do.

    Only what leaves that queue, or one below it, can help: what is evicted elsewhere, or moved, leaves it as full as it was.
    """
    for q in queue.path:
        if any(need[r] and q.allocated[r] + need[r] > q.limit[r] for r in range(3)):
            return q
    return None


def _closed_by_model(world: World, job: Job, chunk: list[Rank]) -> Refusal | None:
    """Return which queue has too little left of the models that will do, for ranks that ask for the same."""
    need: dict[Request, int] = {}
    for rank in chunk:
        need[rank.request] = need.get(rank.request, 0) + rank.request.vector(world.largest_device_mib)[0]
    for request, gpus in need.items():
        models = world.models_of(request)
        if not gpus or not models or any(model not in job.queue.models for model in models):
            continue
        queue, left = tightest(job, models)
        if sum(left.values()) < gpus:
            return over_model_bound(queue, gpus, left)
    return None
