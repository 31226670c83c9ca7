"""No thrash: what must fall with every eviction, looked at before the eviction is made.

**Reclaim.** Each queue has a rank among its siblings, for what it is allocated of all resources and of the GPU models that are taken:

    2  above its allocatable share, max(quota, fair share) capped by its limit, in some resource
    1  not so, but above its quota in some
    0  within quota

and, among equals, by its ratio, the largest allocated / fair share over the resources. The potential is the list of these of all siblings,
largest first, where the paths of reclaimer and victim part. A reclaim takes from a victim's side with a rank of 1 or 2, and leaves the
reclaimer's side lower than the victim's was. So of the two that change the larger falls, and the list falls, compared place by place. What is
within quota has rank 0 and is never taken.

**Preempt.** The potential is the list of the priorities of those who wait in the queue, largest first. One leaves it, and only smaller ones
come in.

**Consolidate.** The potential is the number of those who wait: one fewer, and nobody loses a place.

These lists are finite, so with nothing new in the cluster evictions end. What they do not cover is a circle over several kinds: *a* is preempted
for *b*, *b* reclaimed for *c*, and *c* makes room for *a*. So, besides, nobody is evicted for a job that was itself evicted for it a short while
ago, over whatever others (ledger.py).

An eviction that would break this is a fault of the passes: it is not made, is counted (`gangline_evictions_withheld_total`), and is logged.
"""

from __future__ import annotations

import math

from gangline.core.policy.gangs import Job, RankState, put_back
from gangline.core.policy.queues import Queue, path_split
from gangline.core.policy.report import Action, Notes
from gangline.core.policy.requests import UNLIMITED, Vector, add, subtract, within
from gangline.core.policy.world import World


def rises(world: World, job: Job, mark: int, action: Action) -> str:
    """Return what is wrong with the evictions made since `mark` for the sake of a job, which has its place now; "" if nothing is."""
    changed = world.charged_before(mark)
    moves = not world.options.no_thrash or action == "consolidate"
    lost = [r for r in changed if r.job is not job and (put_back(r) or (not moves and r.state is RankState.EVICTED))]
    losers = list(dict.fromkeys(rank.job for rank in lost))
    if action == "consolidate":
        return f"{losers[0].name} would lose its place" if losers else ""
    before = _before(world, mark)
    wrong = (_circle(world, job, loser) or _wrong(job, loser, before, action) for loser in losers)
    return next((why for why in wrong if why), "")


def turned(world: World, notes: Notes, mark: int) -> list[Job]:
    """Return the jobs that got room in the end which was made for others, and would not have been made for them.

    Within a session a reservation can be taken over by who may evict its holder. What had been evicted for the holder is then evicted for the
    other one, and the potential must have fallen between these two as well. `mark` is where the evictions of the session began.
    """
    before = _before(world, mark)
    found: dict[Job, None] = {}
    for rank, (action, beneficiary) in notes.causes.items():
        job = world.jobs.get(beneficiary)
        if job is not None and action != "consolidate" and rank.state is RankState.EVICTED and job not in found:
            pair: Action = "preempt" if rank.job.queue is job.queue else "reclaim"
            if _circle(world, job, rank.job) or _wrong(job, rank.job, before, pair):
                found[job] = None
    return list(found)


def _circle(world: World, job: Job, loser: Job) -> str:
    if world.ledger is None or not world.ledger.returns(job.name, loser.name):
        return ""
    return f"{loser.name} would make room for {job.name}, which has just made room for it"


def _wrong(job: Job, loser: Job, before: _Before, action: Action) -> str:
    """Return how the potential does not fall when one loses its place to the other; `before` is what the queues were allocated."""
    if action == "preempt":
        good = loser.queue is job.queue and loser.priority < job.priority
        return "" if good else f"{loser.name} is no less important than {job.name}"
    split = path_split(job.queue, loser.queue)
    if split is None:
        return f"{loser.name} is in the queue of {job.name}"
    mine, theirs = split
    taken = before.lost.get(loser, {})
    was, becomes = _height(theirs, *before.of(theirs), taken), _height(mine, mine.allocated, _by_model(mine), taken)
    if was[0] == 0:
        return f"{theirs.name} is within quota and would lose {loser.name}"
    if becomes >= was:
        return f"{mine.name} would be as far over its share as {theirs.name}, which would lose {loser.name}"
    return ""


class _Before:
    """What queues were allocated before, in all and by GPU model, as far as that has changed since."""

    def __init__(self) -> None:
        self.vectors: dict[Queue, Vector] = {}
        self.models: dict[Queue, dict[str, int]] = {}
        #: by job the models that its ranks have left
        self.lost: dict[Job, dict[str, None]] = {}

    def of(self, queue: Queue) -> tuple[Vector, dict[str, int]]:
        """Return it for one queue."""
        return self.vectors.get(queue, queue.allocated), self.models.get(queue, {}) or _by_model(queue)


def _before(world: World, mark: int) -> _Before:
    found = _Before()
    for rank, (vector, model) in world.charged_before(mark).items():
        if model and model != rank.model:
            found.lost.setdefault(rank.job, {})[model] = None
        for queue in rank.job.queue.path:
            found.vectors[queue] = add(found.vectors.get(queue, queue.allocated), subtract(vector, rank.charged))
            if queue.models:
                by_model = found.models.setdefault(queue, _by_model(queue))
                for which, by in ((model, vector[0]), (rank.model, -rank.charged[0])):
                    if which in by_model:
                        by_model[which] += by
    return found


def _by_model(queue: Queue) -> dict[str, int]:
    return {model: account.allocated for model, account in queue.models.items()}


def _height(queue: Queue, allocated: Vector, by_model: dict[str, int], taken: dict[str, None]) -> tuple[int, float]:
    rank = 2 if not within(allocated, queue.allocatable) else 1 if not within(allocated, queue.quota) else 0
    ratios = [_ratio(a, share) for a, share in zip(allocated, queue.fair_share, strict=True) if a and share < UNLIMITED]
    for model in taken:
        account, has = queue.models[model], by_model[model]
        over_quota = account.quota is not None and has > account.quota
        # Who names no quota of a model is bounded by that of all GPUs alone.
        if has > account.allocatable and (over_quota or allocated[0] > queue.quota[0]):
            rank = 2
        elif over_quota:
            rank = max(rank, 1)
        if has and account.fair_share < UNLIMITED:
            ratios.append(_ratio(has, account.fair_share))
    return rank, max(ratios, default=0.0)


def _ratio(allocated: int, share: int) -> float:
    return allocated / share if share else math.inf
