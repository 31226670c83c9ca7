"""Grow: gangs that run below their largest size get what nobody else has a use for.

A gang that grows restarts, so this is not part of allocate: it comes after all other passes, in the order of the queues, one chunk at a time
(a unit of ranks, or a replica), and only onto what is idle now. Only jobs marked `Job.grows` take part. A gang does not grow while one waits for
room that

- is in the same queue, and not less important: it would be next for the room that comes free, and
- could take the room back at once: in a queue that would stay within its fair share, from one that then has more than may be left to it.

Those that no room would help (a limit, a quota, more than the whole cluster has), or that have a place reserved, are in nobody's way.
"""

from __future__ import annotations

from gangline.core.policy.gangs import Job, Rank, RankState, charge_of, next_chunk
from gangline.core.policy.gates import closed
from gangline.core.policy.order import waiting_order
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import Queue, path_split
from gangline.core.policy.reclaim import may_take
from gangline.core.policy.refusals import ROOM
from gangline.core.policy.report import Notes
from gangline.core.policy.requests import Vector, add, within
from gangline.core.policy.world import World


def grow(world: World, placer: Placer, notes: Notes) -> None:
    """Let gangs that run grow onto what is idle."""
    order = waiting_order(world, growth=True)
    popped = order.pop()
    first = _first_in_need(world, notes) if popped is not None else {}
    while popped is not None:
        job, signature = popped
        chunk = next_chunk(job)
        if chunk and not _shrinks(job) and not _in_the_way(job, charge_of(chunk, world.largest_device_mib), first):
            if _place(world, placer, job, chunk):
                more = next_chunk(job)
                if more:
                    order.push(job, charge_of(more, world.smallest_device_mib))
            elif signature is not None and placer.refusal is not None:
                order.fail(signature, placer.refusal, job.queue)
        popped = order.pop()


def _place(world: World, placer: Placer, job: Job, chunk: list[Rank]) -> bool:
    """Place the chunk where all of it fits now; what is leaving is looked at again when it has left."""
    placer.refusal = closed(world, job, chunk)
    if placer.refusal is not None:
        return False
    mark = world.checkpoint()
    if placer.place(job, chunk, reserve_only=False) and all(r.reservation is None for r in chunk):
        return True
    world.rollback(mark)
    return False


def _shrinks(job: Job) -> bool:
    return any(r.state is RankState.EVICTED for r in job.ranks)


class _Need:
    """The most important gang of a queue that waits for room, and what the first of them asks for."""

    def __init__(self, priority: int, vector: Vector) -> None:
        self.priority = priority
        self.vector = vector


def _first_in_need(world: World, notes: Notes) -> dict[Queue, _Need]:
    found: dict[Queue, _Need] = {}
    refused = [*notes.refusals.items(), *((job, why) for jobs, why in notes.skipped if (job := next(iter(jobs), None)) is not None)]
    for job, why in refused:
        chunk = next_chunk(job) if why.code in ROOM and not job.active else []
        if not chunk:
            continue
        vector = charge_of(chunk, world.largest_device_mib)
        if not within(vector, world.total):
            continue
        known = found.get(job.queue)
        if known is None:
            found[job.queue] = _Need(job.priority, vector)
        else:
            known.priority = max(known.priority, job.priority)
            known.vector = min(known.vector, vector)
    return found


def _in_the_way(job: Job, vector: Vector, first: dict[Queue, _Need]) -> bool:
    for queue, need in first.items():
        if queue is job.queue:
            if need.priority >= job.priority:
                return True
            continue
        split = path_split(queue, job.queue)
        if split is None or not within(add(queue.allocated, need.vector), queue.fair_share):
            continue
        if may_take(split[0], split[1], add(split[1].allocated, vector), split[0].allocated, need.vector):
            return True
    return False
