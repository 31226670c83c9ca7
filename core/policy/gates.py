"""What must hold before any node is looked at: the job's queue and all its ancestors allow the chunk.

    allocated + chunk <= limit, for every job
    allocated to non-preemptible work + chunk <= quota, for a job that cannot be preempted

A resource of which nothing is asked for is not looked at. Memory requests are counted on the largest devices here, as the most favourable
case; predicates.fit looks again when the node is known. Fair share is no gate: preemptible work may use whatever is idle.
"""

from __future__ import annotations

from gangline.core.policy.gangs import Job, Rank, charge_of
from gangline.core.policy.refusals import Refusal, over_bound
from gangline.core.policy.world import World


def closed(world: World, job: Job, chunk: list[Rank]) -> Refusal | None:
    """Return why the queues do not allow the chunk; None if they do."""
    if not world.options.quotas:
        return None
    need = charge_of(chunk, world.largest_device_mib)
    for queue in job.queue.path:
        for r in range(3):
            if need[r] and queue.allocated[r] + need[r] > queue.limit[r]:
                return over_bound("over_limit", queue.name, r, need[r], queue.limit[r] - queue.allocated[r])
            if need[r] and not job.preemptible and queue.nonpreemptible[r] + need[r] > queue.quota[r]:
                return over_bound("over_quota", queue.name, r, need[r], queue.quota[r] - queue.nonpreemptible[r])
    return None
