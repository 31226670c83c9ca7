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
4. R's quota for non-preemptible work, and limits, hold at every level (gates.py). Where a limit is full, only work below the queue that has
   it is of any help, and where the chunk would fit otherwise, nobody else is looked at;
5. no victim is within its minimum runtime. That of the victim's side just below the common ancestor counts, else that of the next queue
   upwards that has one. An elastic job within it may still lose its surplus;
6. where queues have amounts by GPU model (models.py): no slice is taken with GPUs of a model of which the victim's queue, or one above it up to
   its side, has no more than its quota. Rule 3 holds for the models that somebody loses, too. And a slice may also be taken, by a job that gets
   GPUs of its model, if the victim's side is above its allocatable share of that model, and the reclaimer's side is not with them (unless the
   victim's side names no quota of the model, and is within its quota of GPUs).

As 2 looks before it subtracts, the last slice may push the victim's side below its share: a gang of four may go for the one GPU that it is over.
Victims that are moved lose nothing, and do not count.
"""

from __future__ import annotations

from gangline.core.policy import evicting
from gangline.core.policy.gangs import Job, Rank
from gangline.core.policy.gates import tightest_limit
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import Queue, path_split
from gangline.core.policy.report import Notes
from gangline.core.policy.requests import UNLIMITED, Vector, add, subtract, within
from gangline.core.policy.victims import Lost, Validate
from gangline.core.policy.world import World


def reclaim(world: World, placer: Placer, notes: Notes) -> None:
    """Evict work of queues that have more than their share for waiting jobs of queues that have less."""

    def hopeless(job: Job, need: Vector) -> bool:
        queue = job.queue
        if not within(add(queue.allocated, need), queue.fair_share):
            return True
        if not job.preemptible and not within(add(queue.nonpreemptible, need), queue.quota):
            return True
        full = tightest_limit(queue, need) if world.options.quotas else None
        return full is not None and not _givers(queue, need, full)

    def offer(job: Job, chunk: list[Rank], need: Vector) -> tuple[list[Job], dict[Job, None], Validate] | None:
        if hopeless(job, need):
            return None
        queue = job.queue
        full = tightest_limit(queue, need) if world.options.quotas else None
        if full is not None and not queue.models and evicting.fits(world, placer, job, chunk):
            jobs = [j for q in _givers(queue, need, full) for j in q.working_below() if j.preemptible]
        else:
            jobs = _candidates(world, queue, need, any(r.request.mig for r in chunk))
        if not jobs:
            return None
        protected = {j: None for j in jobs if _within_min_runtime(queue, j)}
        start = {q: q.allocated for q in world.queues.values()}
        if not queue.models:
            return jobs, protected, lambda lost, part: _fair(queue, start, lost, part)
        had = {(q, model): account.allocated for q in world.queues.values() for model, account in q.models.items()}
        return jobs, protected, lambda lost, part: _fair(queue, start, lost, part, ModelRules(job, start, had, lost))

    evicting.run(world, placer, notes, "reclaim", offer, hopeless)


def _givers(reclaimer: Queue, need: Vector, below: Queue) -> list[Queue]:
    """Return the siblings at the levels of the path below a queue that have something to give by rule 2 or 6."""
    return [
        other
        for mine in reclaimer.path[: len(reclaimer.path) - len(below.path)]
        for other in (mine.parent.children if mine.parent is not None else ())
        if other is not mine and (may_take(mine, other, other.allocated, mine.allocated, need) or _above_its_models(mine, other))
    ]


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
                gives_some = may_take(mine, other, other.allocated, mine.allocated, need) or _above_its_models(mine, other)
                (gives if gives_some else moves).append(other)
    free = world.free_later()
    short = any(need[r] > free[r] for r in range(3)) if not gives else bool(need[0]) and free[0] == 0
    queues = gives if short and not (mig or world.has_mig) else [*gives, *moves]
    return [j for q in queues for j in q.working_below() if j.preemptible]


def _above_its_models(mine: Queue, other: Queue) -> bool:
    """Whether the other side may have to give GPUs of some model (rule 6)."""
    return any(
        account.allocated > account.allocatable and mine.models[model].allocated < mine.models[model].allocatable
        for model, account in other.models.items()
    )


def _within_min_runtime(reclaimer: Queue, victim: Job) -> bool:
    split = path_split(reclaimer, victim.queue)
    if split is None or victim.started_s_ago is None:
        return False
    least = next((q.reclaim_min_runtime_s for q in split[1].path if q.reclaim_min_runtime_s is not None), 0.0)
    return victim.started_s_ago < least


def _fair(reclaimer: Queue, start: dict[Queue, Vector], lost: list[Lost], need: Vector, models: ModelRules | None = None) -> bool:
    """Rules 2, 3 and 6, on what the queues were allocated before."""
    left = dict(start)
    losers: dict[Queue, None] = {}
    for slice_ in lost:
        job, vector, _ = slice_
        split = path_split(reclaimer, job.queue)
        if split is None:
            return False
        taken = may_take(split[0], split[1], left[split[1]], start[split[0]], need)
        if models is not None:
            if models.protected(slice_, split[1]):
                return False
            taken = taken or models.may_take(slice_, split[0], split[1], left[split[1]])
            models.subtract(slice_)
        if not taken:
            return False
        for queue in job.queue.path:
            left[queue] = subtract(left[queue], vector)
            losers[queue] = None
    involved = [r for r in range(3) if need[r] or any(v[r] for _, v, _ in lost)]
    for mine in reclaimer.path:
        siblings = [q for q in losers if q.parent is mine.parent and q is not mine]
        after = add(left[mine], need)
        if any(_turned_round(mine.fair_share[r], after[r], other.fair_share[r], left[other][r]) for other in siblings for r in involved):
            return False
        if models is not None and any(models.turned_round(mine, other) for other in siblings):
            return False
    return True


def may_take(mine: Queue, other: Queue, has: Vector, allocated: Vector, need: Vector) -> bool:
    """Whether rule 2 holds, for a victim's side that has `has` left and a reclaimer's side that was allocated `allocated`."""
    if not within(has, other.allocatable):
        return True
    return within(add(allocated, need), mine.quota) and not within(has, other.quota)


def _turned_round(share: int, after: int, theirs: int, left: int) -> bool:
    """Rule 3 for one resource: whether a reclaimer with this share would have `after` of it, and be further over than one that has `left`."""
    if after <= share or theirs <= 0 or theirs >= UNLIMITED:
        return False
    return share == 0 or after * theirs >= left * share


class ModelRules:
    """Rule 6: what holds for GPU models of which queues have amounts, besides. Made when the victims have been evicted and all is reserved.

    `start` and `had` are what the queues were allocated before, in all and by model.
    """

    def __init__(self, reclaimer: Job, start: dict[Queue, Vector], had: dict[tuple[Queue, str], int], lost: list[Lost]) -> None:
        self._left = dict(had)
        #: what the reclaimer gets
        self._gets: dict[str, int] = {}
        for rank in reclaimer.ranks:
            if rank.reservation is not None and rank.model:
                self._gets[rank.model] = self._gets.get(rank.model, 0) + rank.charged[0]
        self._had, self._start = had, start
        self._models = {model: None for _, _, models in lost for model in models if (reclaimer.queue, model) in had}

    def protected(self, slice_: Lost, side: Queue) -> bool:
        """Whether a queue on the victim's path, up to its side, has no more of a model than its quota of it."""
        job, _, models = slice_
        for queue in job.queue.path[: len(job.queue.path) - len(side.path) + 1]:
            for model in models:
                account = queue.models.get(model)
                if account is not None and account.quota is not None and self._left[queue, model] <= account.quota:
                    return True
        return False

    def may_take(self, slice_: Lost, mine: Queue, other: Queue, has: Vector) -> bool:
        """Whether the slice has GPUs of a model of which the victim's side is above its share, and the reclaimer's side then is not."""
        for model in slice_[2]:
            account, own = other.models.get(model), mine.models.get(model)
            if account is None or own is None or model not in self._gets or self._left[other, model] <= account.allocatable:
                continue
            over = account.quota is not None or has[0] > other.quota[0]
            if over and self._had[mine, model] + self._gets[model] <= own.allocatable:
                return True
        return False

    def subtract(self, slice_: Lost) -> None:
        """The slice is taken."""
        job, _, models = slice_
        for queue in job.queue.path:
            for model, gpus in models.items():
                if (queue, model) in self._left:
                    self._left[queue, model] -= gpus

    def turned_round(self, mine: Queue, other: Queue) -> bool:
        """Rule 3 for the models that somebody lost."""
        for model in self._models:
            after, left = self._left[mine, model] + self._gets.get(model, 0), self._left[other, model]
            if _turned_round(mine.models[model].fair_share, after, other.models[model].fair_share, left):
                return True
        return False
