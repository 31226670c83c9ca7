"""Backfill: what ends in time may use room that is kept for others.

After the allocation, jobs that were refused are looked at once more, in order: each without the holds (holds.py) that it will be out of the way
of, because it will have ended, by its time limit or by what jobs like it took, before they need the room. It starts now, or not at all: a job
that had to wait for something would end later. How far down the order this goes, and how much is tried, is bounded.
"""

from __future__ import annotations

from gangline.core.policy.gangs import Job, Rank, charge_of, next_chunk
from gangline.core.policy.gates import closed
from gangline.core.policy.holds import Hold
from gangline.core.policy.nodes import Place
from gangline.core.policy.order import waiting_order
from gangline.core.policy.placing import Placer
from gangline.core.policy.waiting import placed_alike
from gangline.core.policy.world import World

#: jobs looked at, and jobs for which a place is sought in vain, in one session
_LOOKED_AT = 1_000
_TRIED = 50


def backfill(world: World, placer: Placer) -> None:
    """Place what ends before those start that the room is kept for."""
    holds = [hold for hold in world.holds.on() if any(_idle(place) for place in hold.covers.values())]
    if not holds:
        return
    order = waiting_order(world)
    failed: dict[object, None] = {}
    looked_at = 0
    while looked_at < _LOOKED_AT and len(failed) < _TRIED and (popped := order.pop()) is not None:
        looked_at += 1
        job, signature = popped
        chunk = next_chunk(job)
        lifted = [hold for hold in holds if hold.name != job.name and world.holds.leaves(job, hold)] if chunk else []
        key = (signature is not None and placed_alike(signature), job.queue, tuple(hold.name for hold in lifted))
        if not lifted or (signature is not None and key in failed):
            continue
        if not _place(world, placer, job, chunk, lifted):
            failed[key] = None
            continue
        more = next_chunk(job)
        if more:
            order.push(job, charge_of(more, world.smallest_device_mib))


def _idle(place: Place) -> bool:
    """Whether something that is covered could be used now."""
    node = place.node
    return not place.devices or any(node.dev_idle[d] == node.full for d in place.devices)


def _place(world: World, placer: Placer, job: Job, chunk: list[Rank], lifted: list[Hold]) -> bool:
    mark = world.checkpoint()
    for hold in lifted:
        world.lift(hold)
    # A gang whose minimum waits for what is leaving does not start what it could have beyond that.
    if closed(world, job, chunk) is None and placer.place(job, chunk, reserve_only=False) and all(r.reservation is None for r in job.ranks):
        for hold in lifted:
            world.cover(hold)
        return True
    world.rollback(mark)
    return False
