"""Preempt: within one queue, what is more important takes the place of what is less.

Victims are preemptible jobs of the same leaf queue with a strictly lower priority. No fair share is looked at: a preemptible job may preempt
while its queue is over quota. A job that cannot be preempted must fit into quota at every level, as always (gates.py). No victim is within the
minimum runtime of the queue (its own, else that of the next queue upwards that has one); an elastic job within it may still lose its surplus.
"""

from __future__ import annotations

from gangline.core.policy import evicting
from gangline.core.policy.gangs import Job, Rank
from gangline.core.policy.placing import Placer
from gangline.core.policy.report import Notes
from gangline.core.policy.requests import Vector
from gangline.core.policy.victims import Validate
from gangline.core.policy.world import World


def preempt(world: World, placer: Placer, notes: Notes) -> None:
    """Evict less important work of the same queue for waiting jobs."""

    def hopeless(job: Job, _need: Vector) -> bool:
        return not world.options.priorities or all(priority >= job.priority for priority in job.queue.yielding)

    def offer(job: Job, _chunk: list[Rank], need: Vector) -> tuple[list[Job], dict[Job, None], Validate] | None:
        if hopeless(job, need):
            return None
        lower = [some for priority, some in job.queue.yielding.items() if priority < job.priority]
        jobs = [j for some in lower for j in some]
        least = next((q.preempt_min_runtime_s for q in job.queue.path if q.preempt_min_runtime_s is not None), 0.0)
        protected = {j: None for j in jobs if j.started_s_ago is not None and j.started_s_ago < least} if least > 0 else {}
        return jobs, protected, lambda _lost, _need: True

    evicting.run(world, placer, notes, "preempt", offer, hopeless)
