"""Consolidate: move running work together, so that a waiting job has room, at no one's cost.

For a preemptible job that waits while enough devices are idle or leaving in the cluster as a whole, but not where it could use them. Any other
preemptible job may be moved, of any queue and priority. Every victim must be placed again, or nothing is done. Work that cannot be preempted
never triggers this, and is never moved.

A move is a restart, so production asks for more (moves.py): what is moved must report checkpoints, and must not have been moved or evicted
lately; and what all of them would lose together must be less than what the waiting job gains, its GPUs times its wait.
"""

from __future__ import annotations

from gangline.core.policy import evicting
from gangline.core.policy.gangs import Job, Rank, RankState
from gangline.core.policy.gates import tightest_limit
from gangline.core.policy.moves import Moves
from gangline.core.policy.placing import Placer
from gangline.core.policy.report import Notes
from gangline.core.policy.requests import GPU, Vector, mig_gpus
from gangline.core.policy.victims import Validate
from gangline.core.policy.world import World


def consolidate(world: World, placer: Placer, notes: Notes) -> None:
    """Move what makes room for waiting jobs."""
    mig = sum(GPU * mig_gpus(p) * max(0, later) for n in world.nodes for p, later in n.mig_later.items())

    def hopeless(job: Job, need: Vector) -> bool:
        if not job.preemptible or need[0] > world.free_later()[0] + mig:
            return True
        return world.options.quotas and tightest_limit(job.queue, need) is not None

    def offer(job: Job, _chunk: list[Rank], need: Vector) -> tuple[list[Job], dict[Job, None], Validate] | None:
        if hopeless(job, need):
            return None
        if world.moves is not None:
            return _worth_it(world, world.moves, job, need)
        jobs = [j for root in world.roots() for j in root.working_below() if j.preemptible and j is not job]
        return jobs, {}, lambda lost, _need: not lost

    if world.moves is None or world.moves.movable:
        evicting.run(world, placer, notes, "consolidate", offer, hopeless)


def _worth_it(world: World, moves: Moves, job: Job, need: Vector) -> tuple[list[Job], dict[Job, None], Validate] | None:
    gain = moves.gain(job, need[0])
    if not gain:
        return None
    mark = world.checkpoint()

    def validate(lost: list[tuple[Job, Vector, dict[str, int]]], _need: Vector) -> bool:
        moved = {rank.job: None for rank in world.changes(mark) if rank.state is RankState.EVICTED}
        return not lost and sum(moves.cost(j) for j in moved) <= gain

    return [world.jobs[name] for name in moves.movable if name in world.jobs and name != job.name], {}, validate

