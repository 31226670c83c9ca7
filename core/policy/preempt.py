"""Preempt: within one queue, what is more important takes the place of what is less.

Victims are preemptible jobs of the same leaf queue with a strictly lower priority. No fair share is looked at: a preemptible job may preempt
while its queue is over quota. A job that cannot be preempted must fit into quota at every level, as always (gates.py).
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

    def offer(job: Job, _chunk: list[Rank], _need: Vector) -> tuple[list[Job], dict[Job, None], Validate] | None:
        if not world.options.priorities:
            return None
        jobs = [j for j in job.queue.working if j.preemptible and j.priority < job.priority]
        return jobs, {}, lambda _lost, _need: True

    evicting.run(world, placer, notes, "preempt", offer)
