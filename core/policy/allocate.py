"""Allocate: place waiting work on what is idle, in order, one chunk at a time.

The next job of the order (order.py) gets its next chunk: what it lacks to reach its gang minimum, all at once, or one rank more if it has that.
Then the order is found anew, so elastic jobs grow rank by rank and fairly against the others. Before any node is looked at, the limits and the
quotas for non-preemptible work must allow the chunk (gates.py). Fair share decides the order only: preemptible work may fill whatever is idle.

Ranks may go onto what is idle or onto what is leaving. If some of a gang must wait, all of it waits together. Nothing is ever evicted.

Where room is kept for a gang (reserve.py), it is free for all who come before that gang in the order, and for itself; once it has been refused,
its room is covered for those who come after it (holds.py).

Nothing becomes free in this pass, so what failed once fails for all jobs that are placed alike: each shape is tried in vain once, not per job.
"""

from __future__ import annotations

from gangline.core.policy.gangs import Job, Rank, charge_of, next_chunk
from gangline.core.policy.gates import closed, closed_to_all
from gangline.core.policy.order import JobOrder, waiting_order
from gangline.core.policy.placing import Placer, wait_together
from gangline.core.policy.queues import Queue
from gangline.core.policy.refusals import Refusal, none_fit, reserved_for
from gangline.core.policy.report import Notes
from gangline.core.policy.requests import Request
from gangline.core.policy.scoring import best_place
from gangline.core.policy.waiting import Signature
from gangline.core.policy.world import World

#: chunks that one session places: a scheduler that takes over a long queue must not be busy for so long that its lease ends
PLACED_TOGETHER = 2_000


def allocate(world: World, placer: Placer, notes: Notes, at_most: int = 0) -> None:
    """Place what fits; at most so many chunks, if that is given, and then `notes.cut` says that there may be more."""
    for hold in world.holds.of_gangs():
        world.lift(hold)
    # Nothing becomes free in this pass: what a queue does not allow now, it allows later no more.
    order = waiting_order(world, passed_over=lambda _, group: closed_to_all(world, group))
    _rule_out(world, placer, order)
    placed = 0
    while (popped := order.pop()) is not None:
        job, signature = popped
        chunk = next_chunk(job)
        placed += bool(chunk) and _try(world, placer, notes, order, job, chunk, signature)
        if placed == at_most > 0:
            notes.cut = True
            break
    notes.skipped += order.skipped


def _try(world: World, placer: Placer, notes: Notes, order: JobOrder, job: Job, chunk: list[Rank], signature: Signature | None) -> bool:
    """Place one chunk; False when it was refused."""
    refusal = closed(world, job, chunk)
    if refusal is not None:
        notes.refusals[job] = refusal
        if signature is not None:
            order.fail(signature, refusal, job.queue)
        return False
    mark = world.checkpoint()
    if not placer.place(job, chunk, reserve_only=False):
        assert placer.refusal is not None
        notes.refusals[job] = refusal = without_holds(world, placer, job, chunk)
        if signature is not None and not any(r.request.affinity or r.request.memory_mib for r in chunk):
            order.fail(signature, refusal, job.queue if job.queue.models else None)
        hold = world.holds.of(job)
        if hold is not None:
            world.cover(hold)
        return False
    wait_together(world, job, mark)
    more = next_chunk(job)
    if more:
        order.push(job, charge_of(more, world.smallest_device_mib))
    return True


def without_holds(world: World, placer: Placer, job: Job, chunk: list[Rank]) -> Refusal:
    """Return why a chunk that was refused has no place: for whom the room is kept, or what is short although nothing were kept."""
    holds, refusal, mark = world.holds.on(), placer.refusal, world.checkpoint()
    assert refusal is not None, f"{job.name} was not refused"
    if not holds:
        return refusal
    for hold in holds:
        world.lift(hold)
    fits = placer.place(job, chunk, reserve_only=False)
    world.rollback(mark)
    return reserved_for(holds) if fits else placer.refusal or refusal


def _rule_out(world: World, placer: Placer, order: JobOrder) -> None:
    """Pass over the shapes of which not even one rank fits anywhere, without putting their queues in order."""
    # Where queues have amounts by GPU model, what fits for one does not for another.
    tried: dict[tuple[int, Queue | None, bool], bool] = {}
    for queue, signature, group in order.groups:
        if order.failed(queue, signature):
            continue
        first = group.first
        only = queue if queue.models else None
        for request in group.requests():
            key = (request.number, only, first.preemptible if only else True)
            if key not in tried:
                tried[key] = not request.plain or best_place(world, _rank_of(first, request), placer.index) is not None
            if not tried[key]:
                placer.refusal = none_fit(world, first, request, group.vector(world.smallest_device_mib))
                order.fail(signature, without_holds(world, placer, first, next_chunk(first)), only)
                break


def _rank_of(job: Job, request: Request) -> Rank:
    return next(r for r in job.ranks if r.request is request)
