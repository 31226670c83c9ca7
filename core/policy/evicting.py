"""The loop that consolidate, reclaim and preempt share: every waiting job in order, and for each whom that pass may evict."""

from __future__ import annotations

from collections.abc import Callable

from gangline.core.policy.gangs import Job, Rank, RankState, charge_of, next_chunk
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

_FAILED = Refusal("no_victims", "nobody may be evicted for it")


def run(world: World, placer: Placer, notes: Notes, action: Action, offer: Offer) -> None:
    """Go through the waiting jobs; each gets its next chunk if victims are found for it."""
    order = waiting_order(world)
    while (popped := order.pop()) is not None:
        job, signature = popped
        chunk = next_chunk(job)
        if not chunk or delayed(job) or job in notes.barred or (job.standing and not world.options.evict_for_surplus):
            continue
        offered = offer(job, chunk, charge_of(chunk, world.smallest_device_mib))
        mark = world.checkpoint()
        if offered is not None and offered[0]:
            jobs, protected, validate = offered
            if VictimSearch(world, placer, job, victims_in_order(world, jobs, protected), validate).run(chunk):
                wrong = rises(world, job, mark, action)
                if wrong:
                    world.rollback(mark)
                    notes.withheld[job] = wrong
                    continue
                notes.served[job] = None
                _note_causes(world, notes, action, job, mark)
                continue
        if signature is not None:
            order.fail(signature, _FAILED, job.queue)


def _note_causes(world: World, notes: Notes, action: Action, job: Job, mark: int) -> None:
    """Note for whose sake the changes since `mark` were made; who takes another's reservation takes over what had been evicted for that."""
    changed = world.changes(mark)
    withdrawn = {rank.job.name: None for rank in changed if rank.state is RankState.WITHDRAWN}
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
