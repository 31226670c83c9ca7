"""Reclaim: between queues, what is above its share gives back to what is below its own.

Victims are preemptible jobs of other leaf queues, of any priority. A reclaimer R with a chunk c may take the lost slices l1, l2, … if

1. its own leaf is not over its fair share afterwards: allocated + c <= fair share in every resource; and if R cannot be preempted,
   allocated to non-preemptible work + c <= quota;
2. for each slice, before it is subtracted, comparing the two queues at the highest level where the paths of reclaimer and victim differ:
   a. the victim's side is above its allocatable share, max(quota, fair share) capped by its limit, in some resource, or
   b. the reclaimer's side stays within quota in every resource with c added, and the victim's side is above its quota in some;
3. afterwards, at each level of the reclaimer's path and for every sibling that lost something: the reclaimer's side is not over its fair
   share at a ratio (allocated / fair share) that is at least the sibling's. At or below the fair share always passes, and siblings without a
   fair share are not looked at. So the order of who is furthest over is never turned round, and A cannot take from B what B then takes back;
4. R's quota for non-preemptible work holds at every level (gates.py);
5. no victim is within its minimum runtime. That of the victim's side just below the common ancestor counts, else that of the next queue
   upwards that has one. An elastic job within it may still lose its surplus.

As 2 looks before it subtracts, the last slice may push the victim's side below its share: a gang of four may go for the one GPU that it is over.
Victims that are moved lose nothing, and do not count.
"""

from __future__ import annotations

from gangline.core.policy import evicting
from gangline.core.policy.gangs import Job, Rank
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import Queue, path_split
from gangline.core.policy.report import Notes
from gangline.core.policy.requests import UNLIMITED, Vector, add, subtract, within
from gangline.core.policy.victims import Validate
from gangline.core.policy.world import World


def reclaim(world: World, placer: Placer, notes: Notes) -> None:
    """Evict work of queues that have more than their share for waiting jobs of queues that have less."""

    def offer(job: Job, chunk: list[Rank], need: Vector) -> tuple[list[Job], dict[Job, None], Validate] | None:
        queue = job.queue
        if not within(add(queue.allocated, need), queue.fair_share):
            return None
        if not job.preemptible and not within(add(queue.nonpreemptible, need), queue.quota):
            return None
        jobs = _candidates(world, queue, need, any(r.request.mig for r in chunk))
        if not jobs:
            return None
        protected = {j: None for j in jobs if _within_min_runtime(queue, j)}
        start = {q: q.allocated for q in world.queues.values()}
        return jobs, protected, lambda lost, part: _fair(queue, start, lost, part)

    evicting.run(world, placer, notes, "reclaim", offer)


def _candidates(world: World, reclaimer: Queue, need: Vector, mig: bool) -> list[Job]:
    """Return the preemptible jobs of other queues that can be of any help.

    Those below a sibling, at any level of the path, that has nothing to give by rule 2 can only be moved. That helps no one when nothing is
    idle, nor, if nobody else can lose anything, when less is idle in all than is asked for. (What is asked for and what is idle compare only
    where devices are counted: MIG instances are charged for more than the part of a device that they take.)
    """
    gives: list[Queue] = []
    moves: list[Queue] = []
    for mine in reclaimer.path:
        for other in mine.parent.children if mine.parent is not None else world.roots():
            if other is not mine:
                (gives if may_take(mine, other, other.allocated, mine.allocated, need) else moves).append(other)
    free = world.free_later()
    short = any(need[r] > free[r] for r in range(3)) if not gives else bool(need[0]) and free[0] == 0
    queues = gives if short and not (mig or world.has_mig) else [*gives, *moves]
    return [j for q in queues for j in q.working_below() if j.preemptible]


def _within_min_runtime(reclaimer: Queue, victim: Job) -> bool:
    split = path_split(reclaimer, victim.queue)
    if split is None or victim.started_s_ago is None:
        return False
    least = next((q.reclaim_min_runtime_s for q in split[1].path if q.reclaim_min_runtime_s is not None), 0.0)
    return victim.started_s_ago < least


def _fair(reclaimer: Queue, start: dict[Queue, Vector], lost: list[tuple[Job, Vector]], need: Vector) -> bool:
    """Rules 2 and 3, on what the queues were allocated before."""
    left = dict(start)
    losers: dict[Queue, None] = {}
    for job, vector in lost:
        split = path_split(reclaimer, job.queue)
        if split is None or not may_take(split[0], split[1], left[split[1]], start[split[0]], need):
            return False
        for queue in job.queue.path:
            left[queue] = subtract(left[queue], vector)
            losers[queue] = None
    involved = [r for r in range(3) if need[r] or any(v[r] for _, v in lost)]
    for mine in reclaimer.path:
        siblings = [q for q in losers if q.parent is mine.parent and q is not mine]
        after = add(left[mine], need)
        if any(_turned_round(mine, after, other, left[other], involved) for other in siblings):
            return False
    return True


def may_take(mine: Queue, other: Queue, has: Vector, allocated: Vector, need: Vector) -> bool:
    """Whether rule 2 holds, for a victim's side that has `has` left and a reclaimer's side that was allocated `allocated`."""
    if not within(has, other.allocatable):
        return True
    return within(add(allocated, need), mine.quota) and not within(has, other.quota)


def _turned_round(mine: Queue, after: Vector, other: Queue, left: Vector, involved: list[int]) -> bool:
    for r in involved:
        share, theirs = mine.fair_share[r], other.fair_share[r]
        if after[r] <= share or theirs <= 0 or theirs >= UNLIMITED:
            continue
        if share == 0 or after[r] * theirs >= left[r] * share:
            return True
    return False
