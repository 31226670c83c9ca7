"""Evict stale gangs: what is left of a gang that has fallen below its minimum goes, after a grace period.

A job is stale when at least one of its ranks holds something, none has succeeded, and some podset has fewer ranks that hold something than its
minimum; podsets that their set could do without count as well. If it has been stale for its grace (its own, else the default; infinite: for
ever), all its ranks that work are evicted, whatever its priority and whether or not it can be preempted.
"""

from __future__ import annotations

from gangline.core.policy.gangs import ACTIVE, HOLDING, Job, RankState
from gangline.core.policy.report import Notes
from gangline.core.policy.world import World


def evict_stale_gangs(world: World, notes: Notes) -> None:
    """Evict the gangs that have been stale for too long."""
    short = [j for root in world.roots() for j in root.working_below() if any(not p.satisfied for p in j.podsets) and is_stale(j)]
    for job in sorted(short, key=lambda j: (j.order, j.name)):
        grace = world.options.staleness_grace_s if job.staleness_grace_s is None else job.staleness_grace_s
        if (job.stale_for_s or 0.0) < grace:
            continue
        for rank in job.ranks:
            if rank.state in ACTIVE:
                world.evict(rank)
                notes.causes[rank] = ("evict-stale-gangs", "")


def is_stale(job: Job) -> bool:
    """Whether the gang has started and has too few ranks left."""
    if any(r.state is RankState.SUCCEEDED for r in job.ranks):
        return False
    holding = [sum(1 for r in p.ranks if r.state in HOLDING or r.reservation is not None) for p in job.podsets]
    return any(holding) and any(have < p.min_ranks for have, p in zip(holding, job.podsets, strict=True))
