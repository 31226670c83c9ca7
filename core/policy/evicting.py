"""The loop that consolidate, reclaim and preempt share: every waiting job in order, and for each whom that pass may evict."""

from __future__ import annotations

from collections.abc import Callable

from gangline.core.policy.gangs import Job, Rank, RankState, charge_of, has_minimum, next_chunk
from gangline.core.policy.gates import closed
from gangline.core.policy.order import victims_in_order, waiting_order
from gangline.core.policy.placing import Placer
from gangline.core.policy.potential import rises
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.report import Action, Notes
from gangline.core.policy.requests import Vector
from gangline.core.policy.victims import Validate, VictimSearch
from gangline.core.policy.world import World

#: (preemptor, its chunk, what it asks for) → whom it may evict, of whom only the surplus, and the last word; None: nobody
Offer = Callable[[Job, list[Rank], Vector], "tuple[list[Job], dict[Job, None], Validate] | None"]

#: (a waiting job, what it asks for) → whether the pass can say at a glance that nobody may be evicted for it, or for any that is placed alike
Hopeless = Callable[[Job, Vector], bool]

#: jobs that are looked at although one that is placed alike has failed, in one pass
_APART = 50
_FAILED = Refusal("no_victims", "nobody may be evicted for it")


def run(world: World, placer: Placer, notes: Notes, action: Action, offer: Offer, hopeless: Hopeless) -> None:
    """Go through the waiting jobs; each gets its next chunk if victims are found for it.

    Shapes that are hopeless as the pass begins are left out of the order, until their own queue has lost something in this pass.
    """
    for hold in world.holds.of_gangs():
        world.lift(hold)
    smallest = world.smallest_device_mib
    order = waiting_order(world, passed_over=lambda first, group: _FAILED if hopeless(first, group.vector(smallest)) else None)
    apart = _APART
    while (popped := order.pop()) is not None:
        job, signature = popped
        chunk = next_chunk(job)
        if not chunk:
            continue
        mark = world.checkpoint()
        if _evict_for(world, placer, notes, action, offer, job, chunk):
            for loser in dict.fromkeys(rank.job.queue for rank in world.changes(mark) if rank.state is RankState.EVICTED):
                order.take_in(loser)
            continue
        if signature is not None and not _passed_over(world, notes, job):
            if apart and world.holds.closed_to(job):
                apart -= 1  # another that is placed alike may end before the reservation that keeps this one off
            else:
                order.fail(signature, _FAILED, job.queue)
        own = world.holds.of(job)
        if own is not None:
            world.cover(own)


def _passed_over(world: World, notes: Notes, job: Job) -> bool:
    """Whether nobody is evicted for the job, whoever there is."""
    return delayed(job) or job in notes.barred or job in notes.withheld or (not world.options.evict_for_surplus and has_minimum(job))


def _evict_for(world: World, placer: Placer, notes: Notes, action: Action, offer: Offer, job: Job, chunk: list[Rank]) -> bool:
    """Find victims for one job; True when it has its place."""
    if _passed_over(world, notes, job):
        return False
    offered = offer(job, chunk, charge_of(chunk, world.smallest_device_mib))
    if offered is None or not offered[0]:
        return False
    jobs, protected, validate = offered
    kept = world.holds.closed_to(job)
    if kept:
        # What they would leave is kept for somebody else.
        jobs = [j for j in jobs if not any(r.place is not None and r.place.node.name in kept for r in j.ranks)]
    mark = world.checkpoint()
    admitting = world.let_in(job)
    moves_count = world.options.no_thrash and action != "consolidate"
    anywhere = not kept and not job.queue.models and fits(world, placer, job, chunk)
    if anywhere and closed(world, job, chunk) is None:
        # Those who were evicted before in this pass leave room for it, too.
        placer.place(job, chunk, reserve_only=True)
        for hold in admitting:
            world.cover(hold)
        return True
    if not VictimSearch(world, placer, job, victims_in_order(world, jobs, protected), validate, moves_count, anywhere).run(chunk):
        world.rollback(mark)
        return False
    wrong = rises(world, job, mark, action)
    if wrong:
        world.rollback(mark)
        notes.withheld[job] = wrong
        return False
    for hold in admitting:
        world.cover(hold)
    notes.serve(job, world.waiting.group_of(job))
    _note_causes(world, notes, action, job, mark)
    return True


def fits(world: World, placer: Placer, job: Job, chunk: list[Rank]) -> bool:
    """Whether the chunk has a place as it is, so that only the limit of a queue can keep it from there: then nobody has to be moved."""
    if not world.options.quotas:
        return False
    mark = world.checkpoint()
    found = placer.place(job, chunk, reserve_only=True)
    world.rollback(mark)
    return found


def _note_causes(world: World, notes: Notes, action: Action, job: Job, mark: int) -> None:
    """Note for whose sake the changes since `mark` were made; who takes another's reservation takes over what had been evicted for that.

    Not so when the other has found a reservation again: then each has a part of what came free.
    """
    changed = world.changes(mark)
    withdrawn = {rank.job.name: None for rank in changed if rank.state is RankState.WITHDRAWN and rank.reservation is None}
    if withdrawn:
        for rank, (why, other) in notes.causes.items():
            if other in withdrawn:
                kind: Action = "preempt" if rank.job.queue is job.queue else "reclaim"
                notes.causes[rank] = (why if why == "consolidate" else kind, job.name)
    notes.causes |= {rank: (action, job.name) for rank in changed if rank.state is RankState.EVICTED}


def delayed(job: Job) -> bool:
    """Whether the job is too young, or was evicted too recently, to evict others."""
    times = [t for t in (job.age_s, job.evicted_s_ago) if t is not None]
    return bool(times) and min(times) < job.preemption_delay_s
