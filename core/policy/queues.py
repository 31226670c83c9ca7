"""Queues: a tree of accounts.

Only leaves have jobs; what a leaf is charged, all its ancestors are charged. `allocated` counts ranks that work and reservations made in this
session; what leaves is not counted any more. `fair_share` is set at the start of each session (fairshare.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline.core.policy.models import ModelAccount, ModelSpec
from gangline.core.policy.requests import UNLIMITED, ZERO, Vector

if TYPE_CHECKING:
    from gangline.core.policy.gangs import Job


@dataclass(frozen=True)
class QueueSpec:
    """One queue as it is configured. Vectors are in thousandths of a GPU, milli-cores and bytes; UNLIMITED stands for no bound."""

    name: str
    parent: str = ""
    quota: Vector = (0, UNLIMITED, UNLIMITED)
    limit: Vector = (UNLIMITED, UNLIMITED, UNLIMITED)
    #: weights of what is above quota
    weight: tuple[float, float, float] = (0, 1, 1)
    priority: int = 100
    #: order of creation among its siblings, 0 the oldest
    created: int = 0
    #: jobs here are not reclaimed from before they have run so long; None: as the parent
    reclaim_min_runtime_s: float | None = None
    #: the same for jobs of a higher priority in the same leaf
    preempt_min_runtime_s: float | None = None
    #: users of this leaf take turns (turns.py)
    user_fairness: bool = False
    #: amounts by GPU model (models.py)
    models: tuple[ModelSpec, ...] = ()
    #: jobs are in an order by service (service.py)
    by_service: bool = False


class Queue:
    """One queue. Only World and the fair share change it."""

    __slots__ = (
        "allocated", "allocatable", "children", "created", "depth", "fair_share", "limit", "models", "name", "nonpreemptible", "parent", "path",
        "preempt_min_runtime_s", "priority", "quota", "reclaim_min_runtime_s", "seq", "spec", "usage", "user_fairness", "user_usage", "users",
        "waiting", "weight", "working", "yielding",
    )  # fmt: skip

    def __init__(self, spec: QueueSpec, parent: Queue | None) -> None:
        self.spec = spec
        self.name = spec.name
        self.parent = parent
        self.children: list[Queue] = []
        #: itself and its ancestors, itself first
        self.path: tuple[Queue, ...] = (self, *(parent.path if parent else ()))
        self.depth = len(self.path)
        #: position in the order of age of all queues
        self.seq = 0
        self.quota, self.limit, self.weight = spec.quota, spec.limit, spec.weight
        self.priority, self.created = spec.priority, spec.created
        self.reclaim_min_runtime_s = spec.reclaim_min_runtime_s
        self.preempt_min_runtime_s = spec.preempt_min_runtime_s
        self.allocated: Vector = ZERO
        #: the part of it that cannot be preempted
        self.nonpreemptible: Vector = ZERO
        #: requests of ranks that wait in this leaf, on the smallest devices
        self.waiting: Vector = ZERO
        #: jobs of this leaf with ranks that work or have a reservation; kept by World, in no order that means anything
        self.working: dict[Job, None] = {}
        #: those of them that can be preempted, by priority with what their waiting has added; no priority is in it without jobs
        self.yielding: dict[int, dict[Job, None]] = {}
        #: by GPU model; empty while no queue of the world names any
        self.models: dict[str, ModelAccount] = {}
        #: what it has held on average in the past, as parts of what the cluster had then; None: the past does not count
        self.usage: tuple[float, float, float] | None = None
        #: where users take turns: what each is charged, and the usage of each, in the units of `usage`
        self.user_fairness = spec.user_fairness
        self.users: dict[str, Vector] = {}
        self.user_usage: dict[str, tuple[float, float, float]] = {}
        self.fair_share: Vector = (UNLIMITED, UNLIMITED, UNLIMITED)
        #: max(quota, fair share), capped by the limit
        self.allocatable: Vector = (UNLIMITED, UNLIMITED, UNLIMITED)

    def __repr__(self) -> str:
        return f"Queue({self.name})"

    def works(self, job: Job) -> None:
        """A job of this leaf works, or has a reservation."""
        self.working[job] = None
        if job.preemptible:
            self.yielding.setdefault(job.priority + job.boost, {})[job] = None

    def stops(self, job: Job) -> None:
        """A job of this leaf has nothing any more."""
        self.working.pop(job, None)
        alike = self.yielding.get(job.priority + job.boost, {})
        alike.pop(job, None)
        if not alike:
            self.yielding.pop(job.priority + job.boost, None)

    def working_below(self) -> Iterator[Job]:
        """Return the jobs that work or have a reservation, in this queue and all below it."""
        yield from self.working
        for child in self.children:
            yield from child.working_below()

    def set_fair_share(self, share: Vector) -> None:
        """Set the fair share, and with it what may be allocated without being over it."""
        self.fair_share = share
        q, lim = self.quota, self.limit
        self.allocatable = (
            min(lim[0], max(q[0], share[0])),
            min(lim[1], max(q[1], share[1])),
            min(lim[2], max(q[2], share[2])),
        )


def path_split(a: Queue, b: Queue) -> tuple[Queue, Queue] | None:
    """Return the ancestors of two queues at the highest level where their paths differ; None if one is the other."""
    for x, y in zip(reversed(a.path), reversed(b.path), strict=False):
        if x is not y:
            return x, y
    return None
