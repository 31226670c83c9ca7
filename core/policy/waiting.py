"""The jobs that wait, in groups that are placed alike.

Two jobs of one queue have the same *signature* if their next chunks ask for the same, in the same kind of tree, under the same constraints. If
one of them finds no place, neither does the other: so a full cluster refuses ten thousand jobs by looking at a handful of them. Each group is
kept sorted. Only jobs that have changed are looked at again, when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from gangline.core.policy.gangs import Job, Rank, alive, growing, next_chunk, waiting
from gangline.core.policy.queues import Queue

#: what decides how a job's next chunk is placed: equal signatures in one queue succeed or fail together
#: (where users take turns, the user besides, so that a group has one user)
Signature = tuple[object, ...]
#: order of jobs in one queue: priority, standing, age, name
JobKey = tuple[int, int, int, str]
#: waiting jobs that are placed alike, in order
Group = list[tuple[JobKey, Job]]


class Waiting:
    """The groups of all leaf queues. World notes in `changed` which jobs to look at again."""

    def __init__(self) -> None:
        self.groups: dict[Queue, dict[Signature, Group]] = {}
        self.changed: dict[Job, None] = {}
        #: jobs that have waiting ranks, too few to be placed
        self.incomplete: dict[Job, None] = {}
        self._group_of: dict[Job, tuple[Signature, JobKey]] = {}

    def refresh(self, job_key: Callable[[Job], JobKey]) -> None:
        """Put the jobs that have changed into their groups."""
        for job in self.changed:
            self._remove(job)
            self._insert(job, job_key)
        self.changed.clear()

    def forget(self, job: Job) -> None:
        """Take out a job that is no more."""
        self._remove(job)
        self.changed.pop(job, None)

    def _remove(self, job: Job) -> None:
        known = self._group_of.pop(job, None)
        self.incomplete.pop(job, None)
        if known is None:
            return
        signature, key = known
        groups = self.groups[job.queue]
        group = groups[signature]
        del group[bisect_left(group, key, key=lambda e: e[0])]
        if not group:
            del groups[signature]
            if not groups:
                del self.groups[job.queue]

    def _insert(self, job: Job, job_key: Callable[[Job], JobKey]) -> None:
        chunk = next_chunk(job) if alive(job.root) else []
        if not chunk:
            if any(waiting(r) for r in job.ranks):
                self.incomplete[job] = None
            return
        signature, key = signature_of(job, chunk), job_key(job)
        insort(self.groups.setdefault(job.queue, {}).setdefault(signature, []), (key, job), key=lambda e: e[0])
        self._group_of[job] = (signature, key)


def signature_of(job: Job, chunk: list[Rank]) -> Signature:
    """Return what decides how a chunk is placed. Ranks that must be near their gang's other ranks are only like themselves."""
    first = chunk[0].request.number
    alike = all(r.request.number == first for r in chunk)
    what: object = (first, len(chunk)) if alike and job.single else tuple((r.podset.name, r.request.number) for r in chunk)
    own = "" if job.plain or not (job.active or any(r.request.affinity for r in chunk)) else job.name
    placed: Signature = (job.preemptible, job.shape, what, own, growing(job))
    return (*placed, job.user) if job.queue.user_fairness else placed


def placed_alike(signature: Signature) -> Signature:
    """Return what of a signature decides how jobs are placed: everything but the user."""
    return signature[:5]
