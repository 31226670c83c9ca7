"""One session: the passes in order on a what-if world, and what they decided.

    world ─▶ fair shares ─▶ earmarks ─▶ allocate, backfill ─▶ consolidate ─▶ reclaim ─▶ preempt ─▶ evict stale gangs ─▶ Decisions

Each pass sees what those before it have decided. Evictions that would be in vain are not made (preview.py). The world keeps the decisions
until the caller settles it (`World.settle`) or takes them back (`World.rollback(0)`). Time is in the jobs, as seconds before the session;
nothing here reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.core.policy import fairshare, refusals
from gangline.core.policy.allocate import PLACED_TOGETHER, allocate
from gangline.core.policy.backfill import backfill
from gangline.core.policy.consolidate import consolidate
from gangline.core.policy.earmarks import serve
from gangline.core.policy.gangs import Job, RankState
from gangline.core.policy.grow import grow
from gangline.core.policy.placing import Placer
from gangline.core.policy.potential import turned
from gangline.core.policy.preempt import preempt
from gangline.core.policy.preview import in_vain
from gangline.core.policy.reclaim import reclaim
from gangline.core.policy.report import ACTIONS, Action, Decisions, Eviction, Notes, Placement, Reservation
from gangline.core.policy.stale import evict_stale_gangs
from gangline.core.policy.waiting import Tail
from gangline.core.policy.world import World

#: how often a session is run again without the jobs for which evictions would be in vain; after that it evicts for nobody
_TRIES = 4


def run_session(world: World, actions: Sequence[Action] = ACTIONS, placer: Placer | None = None) -> Decisions:
    """Run the passes and return what they decided. A caller that keeps its world keeps the placer too, for its index of nodes."""
    placer = placer or Placer(world)
    placer.begin()
    if world.options.quotas:
        fairshare.set_fair_shares(world)
    else:
        fairshare.no_fair_shares(world)
    start = world.checkpoint()
    barred: dict[Job, None] = {}
    for _ in range(_TRIES):
        notes = Notes(barred)
        _run(world, actions, placer, notes)
        if notes.cut:
            return _decisions(world, notes)
        vain = in_vain(world, placer, notes)
        if world.options.no_thrash:
            vain += turned(world, notes, notes.allocated)
        if not vain:
            return _decisions(world, notes)
        world.rollback(start)
        barred |= dict.fromkeys(vain)
    notes = Notes(barred)
    _run(world, [a for a in actions if a in ("allocate", "evict-stale-gangs", "grow")], placer, notes)
    return _decisions(world, notes)


def _run(world: World, actions: Sequence[Action], placer: Placer, notes: Notes) -> None:
    world.cover_reservations()
    serve(world, placer)
    for action in actions:
        if action == "allocate":
            allocate(world, placer, notes, PLACED_TOGETHER)
            if notes.cut:
                return  # nobody is evicted, and no room is kept, for those who may have a place without that
            backfill(world, placer)
            notes.allocated = world.checkpoint()
        elif action == "consolidate":
            consolidate(world, placer, notes)
        elif action == "reclaim":
            reclaim(world, placer, notes)
        elif action == "preempt":
            preempt(world, placer, notes)
        elif action == "grow":
            world.cover_for_those_who_wait()
            grow(world, placer, notes)
        else:
            evict_stale_gangs(world, notes)


def _decisions(world: World, notes: Notes) -> Decisions:
    out = Decisions(withheld=notes.withheld)
    for rank in world.changes():
        moved = rank.state is RankState.EVICTED
        if rank.state is RankState.BINDING and rank.place is not None:
            out.placements.append(Placement(rank, rank.place))
        if moved and rank.place is not None:
            action, beneficiary = notes.causes[rank]
            out.evictions.append(Eviction(rank, rank.place, action, beneficiary, rank.reservation is not None))
        if rank.reservation is not None:
            out.reservations.append(Reservation(rank, rank.reservation, moved))
    placed = {r.rank.job for r in out.reservations} | {p.rank.job for p in out.placements}
    out.refusals += [((job,), why) for job, why in notes.refusals.items() if job not in placed]
    # An elastic gang that has its minimum may have been passed over for more.
    out.refusals += [(Tail(tail.group, tail.start, placed), why) for tail, why in notes.skipped]
    out.refusals += [((job,), refusals.gang_incomplete(job)) for job in world.waiting.incomplete]
    return out
