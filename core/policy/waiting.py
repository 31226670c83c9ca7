"""The jobs that wait, in groups that are placed alike.

Two jobs of one queue have the same *signature* if their next chunks ask for the same, in the same kind of tree, under the same constraints. If
one of them finds no place, neither does the other: so a full cluster refuses ten thousand jobs by looking at a handful of them. Each group is
kept sorted. Only jobs that have changed are looked at again, when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterator

from gangline.core.policy.gangs import Job, Rank, alive, charge_of, growing, next_chunk, waiting
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import Request, Vector

#: what decides how a job's next chunk is placed: equal signatures in one queue succeed or fail together
#: (where users take turns, the user besides, so that a group has one user)
Signature = tuple[object, ...]
#: order of jobs in one queue: priority, standing, age, name
JobKey = tuple[int, int, int, str]
#: jobs of one queue, in order
Entries = list[tuple[JobKey, Job]]


class Group:
    """Waiting jobs of one queue that are placed alike, and what was last said about why they wait."""

    __slots__ = ("_requests", "_vectors", "code", "entries", "untold")

    def __init__(self) -> None:
        self.entries: Entries = []
        #: the reason that all of its jobs were told, but for those in `untold`: so only these are looked at while it stays the same
        self.code = ""
        self.untold: dict[Job, JobKey] = {}
        self._vectors: dict[int, Vector] = {}
        self._requests: tuple[Request, ...] = ()

    def __iter__(self) -> Iterator[tuple[JobKey, Job]]:
        return iter(self.entries)

    @property
    def first(self) -> Job:
        """The first of its jobs."""
        return self.entries[0][1]

    def vector(self, device_memory_mib: int) -> Vector:
        """Return what each of its jobs asks for next, on devices with this much memory."""
        found = self._vectors.get(device_memory_mib)
        if found is None:
            found = self._vectors[device_memory_mib] = charge_of(next_chunk(self.first), device_memory_mib)
        return found

    def requests(self) -> tuple[Request, ...]:
        """Return what the ranks of the next chunk of each of its jobs ask for, each once."""
        if not self._requests:
            self._requests = tuple(dict.fromkeys(r.request for r in next_chunk(self.first)))
        return self._requests


class Tail:
    """The jobs of a group from one on, as they are when somebody asks, but for some."""

    __slots__ = ("_but", "group", "start")

    def __init__(self, group: Group, start: JobKey, but: Container[Job] = ()) -> None:
        self.group = group
        self.start = start
        self._but = but

    def __iter__(self) -> Iterator[Job]:
        entries = self.group.entries
        first = bisect_left(entries, self.start, key=lambda e: e[0])
        return (entries[at][1] for at in range(first, len(entries)) if entries[at][1] not in self._but)

    def untold(self, code: str) -> list[Job]:
        """Return those of whom it is not known that this is the reason that they were told (`Waiting.told`)."""
        group = self.group
        if group.code == code:
            return [job for job, key in group.untold.items() if key >= self.start and job not in self._but]
        group.code = code
        group.untold = {job: key for key, job in group.entries}
        return list(self)


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
            chunk = next_chunk(job) if alive(job.root) else []
            place = (signature_of(job, chunk), job_key(job)) if chunk else None
            if place is not None and self._group_of.get(job) == place:
                continue  # it was changed and changed back
            self._remove(job)
            if place is not None:
                self._insert(job, *place)
            elif any(waiting(r) for r in job.ranks):
                self.incomplete[job] = None
        self.changed.clear()

    def forget(self, job: Job) -> None:
        """Take out a job that is no more."""
        self._remove(job)
        self.changed.pop(job, None)

    def group_of(self, job: Job) -> tuple[Group, JobKey] | None:
        """Return the group that a job was in at the last refresh, and its place there; None if it was in none."""
        if job not in self._group_of:
            return None
        signature, key = self._group_of[job]
        return self.groups[job.queue][signature], key

    def told(self, job: Job, code: str) -> None:
        """Note which reason a job was told last, "" for none."""
        found = self.group_of(job)
        if found is not None and found[0].code == code:
            found[0].untold.pop(job, None)
        elif found is not None:
            found[0].untold[job] = found[1]

    def _remove(self, job: Job) -> None:
        known = self._group_of.pop(job, None)
        self.incomplete.pop(job, None)
        if known is None:
            return
        signature, key = known
        groups = self.groups[job.queue]
        group = groups[signature]
        del group.entries[bisect_left(group.entries, key, key=lambda e: e[0])]
        group.untold.pop(job, None)
        if not group.entries:
            del groups[signature]
            if not groups:
                del self.groups[job.queue]

    def _insert(self, job: Job, signature: Signature, key: JobKey) -> None:
        groups = self.groups.setdefault(job.queue, {})
        group = groups.get(signature)
        if group is None:
            group = groups[signature] = Group()
        insort(group.entries, (key, job), key=lambda e: e[0])
        group.untold[job] = key
        self._group_of[job] = (signature, key)


def signature_of(job: Job, chunk: list[Rank]) -> Signature:
    """Return what decides how a chunk is placed. Ranks that must be near their gang's other ranks are only like themselves."""
    first = chunk[0].request.number
    alike = all(r.request.number == first for r in chunk)
    what: object = (first, len(chunk)) if alike and job.single else tuple((r.podset.name, r.request.number) for r in chunk)
    own = "" if job.plain or not (job.active or any(r.request.affinity for r in chunk)) else job.name
    placed: Signature = (job.preemptible, job.shape, what, own, growing(job))
    return (*placed, job.user) if job.queue.user_fairness else placed


def is_growth(signature: Signature) -> bool:
    """Whether such jobs run already, and wait to grow."""
    return bool(signature[4])


def placed_alike(signature: Signature) -> Signature:
    """Return what of a signature decides how jobs are placed: everything but the user."""
    return signature[:5]
