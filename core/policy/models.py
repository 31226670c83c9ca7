"""Amounts by GPU model: what queues may have of the H100, besides what they may have of GPUs in all.

A world in whose queues no model is named knows nothing of models, and pays nothing for them. As soon as one queue names a model, every queue has
an account of that model, kept by World like what the queue is charged in all. The model of a rank is that of its node, so it is known when the
rank has a place there, or a reservation:

    limit      allocated of the model + the rank <= limit of the model, at the queue and all its ancestors, for every placement
    quota      the same with what cannot be preempted, for a rank that cannot be; a queue that names no quota of the model has no such bound
               beyond its quota of GPUs
    reclaim    while a queue has no more of the model than its quota of it, none of that is reclaimed (reclaim.py)

Nodes of a model that a queue may have no more of are no candidates for its ranks; nodes of other models are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gangline.core.policy.requests import UNLIMITED

if TYPE_CHECKING:
    from gangline.core.policy.gangs import Job, Rank
    from gangline.core.policy.queues import Queue

#: (model, quota or None, limit, over-quota weight or None for that of all GPUs), in thousandths of a GPU
ModelSpec = tuple[str, "int | None", int, "float | None"]


class ModelAccount:
    """What one queue may have of one model, and has, in thousandths of a GPU."""

    __slots__ = ("allocatable", "allocated", "fair_share", "limit", "nonpreemptible", "quota", "weight")

    def __init__(self, quota: int | None, limit: int, weight: float) -> None:
        #: None: the queue names none
        self.quota = quota
        self.limit = limit
        self.weight = weight
        self.allocated = 0
        self.nonpreemptible = 0
        self.fair_share = UNLIMITED
        #: max(quota, fair share), capped by the limit
        self.allocatable = limit

    def set_fair_share(self, share: int) -> None:
        """Set the fair share, and with it what may be allocated without being over it."""
        self.fair_share = share
        self.allocatable = min(self.limit, max(self.quota or 0, share))

    def left(self, preemptible: bool) -> int:
        """Return how much more the queue may have."""
        left = self.limit - self.allocated
        return left if preemptible or self.quota is None else min(left, self.quota - self.nonpreemptible)


def open_accounts(queues: Iterable[Queue]) -> None:
    """Give every queue an account of each model that one of them names."""
    queues = list(queues)
    models = sorted({spec[0] for queue in queues for spec in queue.spec.models})
    for queue in queues:
        named = {spec[0]: spec for spec in queue.spec.models}
        for model in models:
            _, quota, limit, weight = named.get(model, (model, None, UNLIMITED, None))
            queue.models[model] = ModelAccount(quota, limit, queue.weight[0] if weight is None else weight)


def charge(rank: Rank, before: int, after: int) -> None:
    """A rank is charged for other GPUs than before: for those where it is, or is to be."""
    old, place = rank.model, rank.reservation or rank.place
    rank.model = place.node.model if after and place is not None else ""
    charge_queues(rank.job, old, -before)
    charge_queues(rank.job, rank.model, after)


def charge_queues(job: Job, model: str, by: int) -> None:
    """A job is charged for so many thousandths of GPUs of a model more."""
    if by and model in job.queue.models:
        for queue in job.queue.path:
            account = queue.models[model]
            account.allocated += by
            if not job.preemptible:
                account.nonpreemptible += by


def left_of(queue: Queue, model: str, preemptible: bool) -> int:
    """Return how much more of a model a leaf and its ancestors allow a job, in thousandths of a GPU."""
    if model not in queue.models:
        return UNLIMITED
    return min(above.models[model].left(preemptible) for above in queue.path)


def closed_models(job: Job, gpus: int) -> list[str]:
    """Return the models of which the job may not have so many thousandths of a GPU more."""
    return [model for model in job.queue.models if left_of(job.queue, model, job.preemptible) < gpus] if gpus else []


def tightest(job: Job, models: Iterable[str]) -> tuple[Queue, dict[str, int]]:
    """Return which queue, of that of a job and those above it, has the least left of some named models together, and how much of each."""
    models = list(models)
    found = [(queue, {model: max(0, queue.models[model].left(job.preemptible)) for model in models}) for queue in job.queue.path]
    return min(found, key=lambda entry: sum(entry[1].values()))


def furthest(queue: Queue) -> float:
    """Return the largest part, over the models, that a queue has of what it may have (order.py, rule 5)."""
    largest = 0.0
    for account in queue.models.values():
        if account.allocated and account.allocatable < UNLIMITED:
            share = account.allocated / account.allocatable if account.allocatable else float(account.allocated)
            largest = max(largest, share)
    return largest
