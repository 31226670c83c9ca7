"""Fair share: how much of the cluster each queue should have, worked out anew at the start of every session.

For each resource on its own, the top queues share what the cluster has, then the children of each queue share that queue's part:

1. Each queue gets min(quota, demand). Demand is what it is allocated and what its waiting ranks ask for, capped by its limit; a queue without
   quota bound gets up to all that is being divided. If quotas add up to more than there is, nobody is cut: nothing remains for step 2.
2. What remains goes by queue priority, highest first: one class divides it, and only what it leaves is passed on. In a class it is divided in
   proportion to weight among the queues that still want more. A queue that wants no more than its part gets what it wants, and the rest is
   divided again; when no such queue is left, each gets its part rounded down to a whole unit.
3. What rounding left over is handed out unit by unit (the last may be a fraction): class by class, the largest lost fraction first, then the
   oldest queue.

A queue of weight 0 gets nothing in steps 2 and 3. A unit is one GPU, one milli-core or one byte.

Where the past counts (`usage_half_life`), step 2 does not go by the weight w alone, as a part of the weights of those that still want more, but
by

    max(0, w + K · (w - u))

with u for what the queue has held on average in the past, the last half-life counting most (core/model/usage.py), as a part of what is being
divided. A queue that has had just its part has its plain weight, one that has had more has less of what is over now, and one that had nothing up
to twice its part. Step 1 and priorities know no past. (KAI's time-based fair share, with its default of K = 1; it relates usage to the whole
cluster at every level, here it is related to what is divided there, so that the past counts alike in small parts of the tree.) A queue whose
past does not count has its plain weight. Where the usages of siblings are more than 1 together, because their parent had more then than now,
they are scaled down to 1.

A GPU model that some queue names is divided in the same way on its own, by the quotas, limits and weights of that model: a queue that names no
quota of it has none in step 1, and one that names no weight of it has that of all GPUs. The past does not count there. These shares are in the
models' accounts (models.py).

Within a session placements and evictions change what queues are allocated, and never their fair shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.core.policy.gangs import next_chunk
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import GPU, UNLIMITED, Vector, add
from gangline.core.policy.world import World

#: size of a whole unit in the units of a vector
WHOLE = (GPU, 1, 1)
#: how strongly the past counts
K = 1.0


@dataclass
class Claim:
    """What one queue wants of one resource that is being divided, in the units of a vector."""

    quota: int
    limit: int
    #: allocated and waiting
    demand: int
    weight: float
    priority: int
    #: position by age, 0 the oldest
    age: int
    #: what it has held on average in the past, as a part of what is being divided; None: the past does not count
    used: float | None = None
    share: int = 0
    #: its weight in the present lap of step 2
    pull: float = 0.0

    @property
    def wanted(self) -> int:
        """What it could use at all."""
        return min(self.demand, self.limit)


@dataclass
class ToDivide:
    """What the cluster has, in all and by GPU model, and what queues wait for of the models that they name; all in the units of a vector."""

    total: Vector
    by_model: dict[str, int]
    waiting: dict[tuple[Queue, str], int]


def set_fair_shares(world: World) -> None:
    """Work out the fair share of every queue from what is allocated and waiting now."""
    roots = world.roots()
    named = bool(roots and roots[0].models)
    divide_all(roots, ToDivide(world.total, world.gpus_by_model() if named else {}, _waiting_by_model(world) if named else {}))


def divide_all(roots: list[Queue], what: ToDivide) -> None:
    """Set the fair shares of the top queues and of all below."""
    demands: dict[Queue, Vector] = {}
    for root in roots:
        _demand(root, demands)
    _share_out(roots, what.total, demands, what.total)
    for model in roots[0].models if roots else ():
        _share_model_out(roots, model, what.by_model.get(model, 0), what.waiting)


def _demand(queue: Queue, demands: dict[Queue, Vector]) -> Vector:
    """Return what is waiting in the subtree; store for each queue what is allocated and waiting."""
    waiting = queue.waiting
    for child in queue.children:
        waiting = add(waiting, _demand(child, demands))
    demands[queue] = add(queue.allocated, waiting)
    return waiting


def _share_out(queues: list[Queue], total: Vector, demands: dict[Queue, Vector], cluster: Vector) -> None:
    if not queues:
        return
    shares: list[list[int]] = []
    for r in range(3):
        claims = [Claim(q.quota[r], q.limit[r], demands[q][r], q.weight[r], q.priority, q.seq, _used(q, r, cluster, total)) for q in queues]
        divide(claims, total[r], WHOLE[r])
        shares.append([c.share for c in claims])
    for at, queue in enumerate(queues):
        queue.set_fair_share((shares[0][at], shares[1][at], shares[2][at]))
        _share_out(queue.children, queue.fair_share, demands, cluster)


def _used(queue: Queue, r: int, cluster: Vector, total: Vector) -> float | None:
    return None if queue.usage is None else queue.usage[r] * cluster[r] / total[r] if total[r] else 0.0


def _waiting_by_model(world: World) -> dict[tuple[Queue, str], int]:
    """Return what each queue waits for of each model, in thousandths of a GPU: of every model that will do, all of it."""
    found: dict[tuple[Queue, str], int] = {}
    for leaf, groups in world.waiting_groups().items():
        for group in groups.values():
            for rank in next_chunk(group.first):
                gpus = len(group.entries) * rank.request.vector(world.smallest_device_mib)[0]
                for model in world.models_of(rank.request) if gpus else ():
                    for queue in leaf.path:
                        found[queue, model] = found.get((queue, model), 0) + gpus
    return found


def _share_model_out(queues: list[Queue], model: str, total: int, waiting: dict[tuple[Queue, str], int]) -> None:
    accounts = [queue.models[model] for queue in queues]
    claims = [
        Claim(a.quota or 0, a.limit, a.allocated + waiting.get((q, model), 0), a.weight, q.priority, q.seq)
        for q, a in zip(queues, accounts, strict=True)
    ]
    divide(claims, total, GPU)
    for queue, account, claim in zip(queues, accounts, claims, strict=True):
        account.set_fair_share(claim.share)
        if queue.children:
            _share_model_out(queue.children, model, claim.share, waiting)


def divide(claims: list[Claim], total: int, whole: int) -> None:
    """Set the share of each claim on `total`; `whole` is the size of a unit."""
    left = total
    for claim in claims:
        claim.share = min(total if claim.quota >= UNLIMITED else claim.quota, claim.wanted)
        left -= claim.share
    if left <= 0:
        return
    together = sum(c.used for c in claims if c.used is not None)
    if together > 1:
        for claim in claims:
            claim.used = None if claim.used is None else claim.used / together
    lost: dict[int, float] = {}
    classes = sorted({c.priority for c in claims}, reverse=True)
    by_class = [[c for c in claims if c.priority == p] for p in classes]
    for some in by_class:
        left = _by_weight(some, left, whole, lost)
    for some in by_class:
        left = _leftover(some, left, whole, lost)


def _by_weight(claims: list[Claim], left: int, whole: int, lost: dict[int, float]) -> int:
    """Step 2 within one class; returns what is left."""
    hungry = [c for c in claims if c.weight > 0 and c.wanted > c.share]
    while hungry and left > 0:
        weights = _set_pull(hungry)
        content = [c for c in hungry if c.wanted - c.share <= left * c.pull / weights]
        if content:
            taken = 0
            for claim in content:
                taken += claim.wanted - claim.share
                claim.share = claim.wanted
            left -= taken
            hungry = [c for c in hungry if c.wanted > c.share]
            continue
        taken = 0
        for claim in hungry:
            part = left * claim.pull / weights
            given = int(part // whole) * whole
            claim.share += given
            taken += given
            lost[id(claim)] = part - given
        return left - taken
    return left


def _set_pull(hungry: list[Claim]) -> float:
    """Set by which weights these claims share in this lap; returns their sum."""
    weights = sum(c.weight for c in hungry)
    for claim in hungry:
        claim.pull = claim.weight
    if all(c.used is None for c in hungry):
        return weights
    for claim in hungry:
        weight = claim.weight / weights
        claim.pull = weight if claim.used is None else max(0.0, weight + K * (weight - claim.used))
    # Usages are at most 1 together, so somebody has a pull.
    return sum(c.pull for c in hungry)


def _leftover(claims: list[Claim], left: int, whole: int, lost: dict[int, float]) -> int:
    """Step 3 within one class; returns what is left."""
    for claim in sorted((c for c in claims if id(c) in lost), key=lambda c: (-lost[id(c)], c.age)):
        if left <= 0:
            break
        given = min(whole, left, claim.wanted - claim.share)
        claim.share += given
        left -= given
    return left


def no_fair_shares(world: World) -> None:
    """Set what holds where quotas do not bind: every queue may have everything."""
    for queue in world.queues.values():
        for account in queue.models.values():
            account.set_fair_share(UNLIMITED)
        queue.set_fair_share((UNLIMITED, UNLIMITED, UNLIMITED))
        queue.allocatable = (UNLIMITED, UNLIMITED, UNLIMITED)
