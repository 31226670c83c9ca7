"""Would the room that evictions make go to those for whom it is made?

A reservation is not remembered from one session to the next: when the victims have left, everybody who waits competes for the room in the order
of that day, the victims too. If somebody else would get it, the evictions are in vain, and the next session would evict anew, and so on for
ever. So before a session with evictions ends, the allocation of the next one is played through, as if all that it evicts had left. Jobs that
would not get what they have a reservation for now evict nobody: the session is run again without them.
"""

from __future__ import annotations

from gangline.core.policy import fairshare
from gangline.core.policy.allocate import allocate
from gangline.core.policy.backfill import backfill
from gangline.core.policy.earmarks import serve
from gangline.core.policy.gangs import Job, RankState
from gangline.core.policy.placing import Placer
from gangline.core.policy.report import Notes
from gangline.core.policy.world import World


def _due(job: Job) -> int:
    """How many of its ranks must have a place afterwards. What a gang that grows (grow.py) loses beyond its minimum, it may lose for good."""
    if not job.grows:
        return job.active
    return sum(min(p.active, p.min_ranks) for p in job.podsets)


def in_vain(world: World, placer: Placer, notes: Notes) -> list[Job]:
    """Return the jobs for which evictions of this session would be in vain, or would cost one its place who was to be moved only."""
    if not notes.served:
        return []
    changed = world.changes()
    moved = [(r.job, world.jobs[notes.causes[r][1]]) for r in changed if r.state is RankState.EVICTED and r.reservation is not None]
    had = {job: _due(job) for job in [*notes.served, *(job for job, _ in moved)]}
    shares = [(q, q.fair_share) for q in world.queues.values()]
    by_model = [(account, account.fair_share) for q in world.queues.values() for account in q.models.values()]
    mark = world.checkpoint()
    for rank in changed:
        if rank.reservation is not None:
            world.withdraw(rank)
        if rank.state in (RankState.EVICTED, RankState.WITHDRAWN):
            world.vanish(rank)
    if world.options.quotas:
        fairshare.set_fair_shares(world)
    for hold in world.holds.on():
        world.lift(hold)
    world.cover_reservations()
    serve(world, placer)
    allocate(world, placer, Notes())
    backfill(world, placer)
    worse = {job: None for job, active in had.items() if job.active < active}
    world.rollback(mark)
    for queue, share in shares:
        queue.set_fair_share(share)
    for account, part in by_model:
        account.set_fair_share(part)
    return list(dict.fromkeys([*(job for job in notes.served if job in worse), *(served for job, served in moved if job in worse)]))
