"""Earmarks: the room that evictions make goes to the job for which it is made.

Between the notice to a victim and the day when its last rank is gone, anybody may be submitted who would come first in the order. So the log
records for whom a gang makes room (`gang_preempting`, `gang_requeued`: beneficiary), the fold keeps it (`State.earmarks`), and each session
serves those jobs before all others: on what is idle, or as reservations on what is still leaving. An earmark ends when its job is placed, ends,
or is stopped, and at the latest a while after the victims must have gone: then the job waits in order, like everybody.

The gates of the queues hold for it as for any job (gates.py), and a queue that is on hold starts nothing.
"""

from __future__ import annotations

from gangline.core.model.state import State
from gangline.core.policy.gangs import next_chunk
from gangline.core.policy.gates import closed
from gangline.core.policy.placing import Placer, wait_together
from gangline.core.policy.world import World


def earmarked(state: State, now_ms: int) -> tuple[str, ...]:
    """Return the jobs that room is being made for, in the order in which that began."""
    return tuple(job for job, mark in state.earmarks.items() if now_ms < mark.until_ms)


def serve(world: World, placer: Placer) -> None:
    """Give the jobs in `World.first` their places before anybody else is looked at."""
    for name in world.first:
        job = world.jobs.get(name)
        chunk = next_chunk(job) if job is not None else []
        if job is None or not chunk or closed(world, job, chunk) is not None:
            continue
        admitting = world.let_in(job)
        mark = world.checkpoint()
        if placer.place(job, chunk, reserve_only=False):
            wait_together(world, job, mark)
        for hold in admitting:
            world.cover(hold)
