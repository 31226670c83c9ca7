"""Who is next: queues, the jobs in them, and, in exactly the reverse order, victims.

Between queues, level by level from the top, each represented by its best job; the first difference decides:

1. not over its fair share (in every resource at once) before over it
2. still within quota in every resource with its next job, before one that would not be
3. higher queue priority
4. a queue that would use a resource of which it may have nothing goes last
5. smaller dominant share, its next job included: the largest, over the resources, of allocated / allocatable, where allocatable is
   max(quota, fair share) capped by the limit, the whole cluster if unlimited; if it is zero, a thousand times what is allocated counts. GPU
   models that queues name are resources of their own here, without the next job, whose model is not known yet
6. the same without the next job
7. smaller allocatable share
8. older queue

The order is found anew after every job, so queues take turns. Only the path of the queue that has just been served can have changed: the others
keep their places in the heaps.

Jobs in one queue: higher priority, with what waiting has added to it (ageing.py); where users take turns, the user who has come least far
(turns.py); below the gang minimum, then at it, then above; older; name (World.job_key). Victims are taken in the reverse of both orders, among
equal priorities (of one user, where users take turns) by lost work where that is known (lostwork.py); for them nothing is added in rules 2, 4
and 5, and rule 5 leaves out what was already picked from the queue, and what would be picked next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from gangline.core.policy.gangs import Job, Rank, charge_of, eviction_slices, next_chunk, waiting
from gangline.core.policy.lostwork import victim_keys
from gangline.core.policy.models import furthest
from gangline.core.policy.queues import Queue
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.requests import GPU, UNLIMITED, ZERO, Vector, add, subtract
from gangline.core.policy.turns import Line, Turns
from gangline.core.policy.waiting import Entries, Group, JobKey, Signature, Tail, is_growth, placed_alike
from gangline.core.policy.world import World

QueueKey = tuple[float, ...]


def queue_key(world: World, queue: Queue, chunk: Vector, picked: Vector = ZERO) -> QueueKey:
    """Return the place of a queue whose next job asks for `chunk`: the smallest goes first."""
    if not world.options.quotas:
        return (float(queue.seq),)
    a, f, q = queue.allocated, queue.fair_share, queue.quota
    more = (a[0] + chunk[0], a[1] + chunk[1], a[2] + chunk[2])
    able = queue.allocatable
    over = a[0] > f[0] and a[1] > f[1] and a[2] > f[2]
    above_quota = more[0] > q[0] or more[1] > q[1] or more[2] > q[2]
    uses_nothing = (more[0] > 0 and able[0] == 0) or (more[1] > 0 and able[1] == 0) or (more[2] > 0 and able[2] == 0)
    with_chunk, without = dominant_share(world, queue, subtract(more, picked)), dominant_share(world, queue, a)
    if queue.models:
        of_models = furthest(queue)
        with_chunk, without = max(with_chunk, of_models), max(without, of_models)
    return (over, above_quota, -queue.priority, uses_nothing, with_chunk, without, *able, queue.seq)


def dominant_share(world: World, queue: Queue, amount: Vector) -> float:
    """Return the largest of amount / allocatable over the resources (rule 5)."""
    largest = 0.0
    total = world.total
    able = queue.allocatable
    for r in range(3):
        if amount[r]:
            bound = able[r] if able[r] < UNLIMITED else total[r]
            share = amount[r] / bound if bound else amount[r] * 1000 / (GPU if r == 0 else 1)
            if share > largest:
                largest = share
    return largest


@dataclass
class _Entry:
    """What a leaf offers next: one job, or the next one of a group of jobs that are placed alike."""

    job: Job
    #: what it asks for, or would give up; None: not worked out yet
    vector: Vector | None
    signature: Signature | None = None
    group: Entries = field(default_factory=list)
    at: int = 0
    #: works out the vector of a job of the group; None: the job has nothing to give
    sizes: Callable[[Job], Vector | None] | None = None
    #: the group, if it is one of waiting jobs
    of: Group | None = None


class JobOrder:
    """Jobs of all queues, the next one first. `reverse` gives victims: the jobs that should go first."""

    def __init__(self, world: World, reverse: bool = False) -> None:
        self._world = world
        self._reverse = reverse
        self._leaves: dict[Queue, Line[_Entry]] = {}
        self._nodes: dict[Queue | None, list[tuple[QueueKey, int, Queue]]] = {}
        self._valid: dict[Queue, int] = {}
        self._picked: dict[Queue, Vector] = {}
        self._stale: dict[Queue, None] = {}
        self._count = 0
        self._dead: dict[Signature | tuple[Queue, Signature], Refusal] = {}
        #: jobs that were passed over because others that are placed alike had failed, with the reason
        self.skipped: list[tuple[Tail, Refusal]] = []
        #: the groups that were left out, until `take_in`
        self.left_out: dict[Queue, list[tuple[Signature, Group]]] = {}
        #: the groups that were added
        self.groups: list[tuple[Queue, Signature, Group]] = []

    def push(self, job: Job, vector: Vector, key: JobKey | None = None) -> None:
        """Add a job whose next chunk, or slice, is `vector`."""
        self._push(job.queue, key or self._world.job_key(job), _Entry(job, vector))

    def push_group(self, queue: Queue, signature: Signature, group: Group, vector: Vector) -> None:
        """Add jobs that wait in one queue and are placed alike."""
        entries = group.entries
        self.groups.append((queue, signature, group))
        self._push(queue, entries[0][0], _Entry(entries[0][1], vector, signature, entries, of=group))

    def take_in(self, queue: Queue) -> None:
        """Add the groups of a queue that were left out."""
        for signature, group in self.left_out.pop(queue, ()):
            if group.entries:
                self.push_group(queue, signature, group, group.vector(self._world.smallest_device_mib))

    def push_sorted(self, queue: Queue, group: Entries, sizes: Callable[[Job], Vector | None]) -> None:
        """Add many jobs of one queue, in their order; what each asks for is worked out when its turn comes."""
        self._push(queue, group[0][0], _Entry(group[0][1], None, None, group, 0, sizes))

    def _push(self, queue: Queue, key: JobKey, entry: _Entry) -> None:
        self._count += 1
        ordered: tuple[object, ...] = (-key[0], -key[1], -key[2], _Reversed(key[3])) if self._reverse else key
        line = self._leaves.get(queue)
        if line is None:
            line = self._leaves[queue] = Turns(self._world, queue, self._reverse) if queue.user_fairness else Line()
        line.push(ordered, self._count, entry.job.user, entry)
        self._stale[queue] = None

    def fail(self, signature: Signature, refusal: Refusal, queue: Queue | None = None) -> None:
        """From now on pass over all jobs that are placed alike, in one queue or in all."""
        alike = placed_alike(signature)
        self._dead[alike if queue is None else (queue, alike)] = refusal

    def failed(self, queue: Queue, signature: Signature) -> bool:
        """Whether such jobs are passed over."""
        alike = placed_alike(signature)
        return alike in self._dead or (queue, alike) in self._dead

    def picked(self, job: Job, vector: Vector) -> None:
        """Note that a victim of this size was picked: a job, or a part of it."""
        for q in job.queue.path:
            self._picked[q] = add(self._picked.get(q, ZERO), vector)
        self._leaves[job.queue].picked(job.user, vector)
        self._stale[job.queue] = None

    def pop(self) -> tuple[Job, Signature | None] | None:
        """Return the next job, with its signature if it came from a group; None if none is left."""
        stale = self._stale
        while stale:
            # Level by level upwards, so that a queue whose children have all changed is put in order once.
            above: dict[Queue, None] = {}
            for stale_queue in stale:
                self._refresh(stale_queue)
                if stale_queue.parent is not None:
                    above[stale_queue.parent] = None
            stale = above
        self._stale.clear()
        queue = self._first(None)
        if queue is None:
            return None
        while queue not in self._leaves:
            below = self._first(queue)
            assert below is not None, f"{queue.name} has a place in the order and no job"
            queue = below
        entry = self._leaves[queue].pop()
        self._stale[queue] = None
        self._push_next(queue, entry)
        return entry.job, entry.signature

    def _push_next(self, queue: Queue, entry: _Entry) -> None:
        if entry.at + 1 < len(entry.group):
            key, job = entry.group[entry.at + 1]
            vector = None if entry.sizes else entry.vector
            self._push(queue, key, _Entry(job, vector, entry.signature, entry.group, entry.at + 1, entry.sizes, entry.of))

    def _first(self, parent: Queue | None) -> Queue | None:
        heap = self._nodes.get(parent, [])
        while heap:
            _, number, queue = heap[0]
            if self._valid.get(queue) == number:
                return queue
            heappop(heap)
        return None

    def _best(self, queue: Queue) -> Vector | None:
        """Return what the best job below a queue asks for."""
        while queue not in self._leaves:
            below = self._first(queue)
            if below is None:
                return None
            queue = below
        line = self._leaves[queue]
        while (entry := line.first()) is not None:
            if entry.vector is None and entry.sizes is not None:
                entry.vector = entry.sizes(entry.job)
            if entry.vector is None:
                line.pop()
                self._push_next(queue, entry)
                continue
            refusal = self._refusal_of(queue, entry)
            if refusal is None:
                return entry.vector
            line.pop()
            assert entry.of is not None, f"{entry.job.name} is passed over and in no group"
            self.skipped.append((Tail(entry.of, entry.group[entry.at][0]), refusal))
        return None

    def _refusal_of(self, queue: Queue, entry: _Entry) -> Refusal | None:
        if entry.signature is None or not self._dead:
            return None
        alike = placed_alike(entry.signature)
        return self._dead.get(alike) or self._dead.get((queue, alike))

    def _refresh(self, queue: Queue) -> None:
        """Give a queue its new place among its siblings."""
        vector = self._best(queue)
        if vector is None:
            self._valid.pop(queue, None)
            return
        if self._reverse:
            picked = add(self._picked.get(queue, ZERO), vector)
            key = tuple(-k for k in queue_key(self._world, queue, ZERO, picked))
        else:
            key = queue_key(self._world, queue, vector)
        self._count += 1
        self._valid[queue] = self._count
        heappush(self._nodes.setdefault(queue.parent, []), (key, self._count, queue))


class _Reversed:
    """A text that sorts the other way round."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __lt__(self, other: _Reversed) -> bool:
        return self.text > other.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reversed) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _nobody(_first: Job, _group: Group) -> Refusal | None:
    return None


def waiting_order(world: World, growth: bool = False, passed_over: Callable[[Job, Group], Refusal | None] = _nobody) -> JobOrder:
    """Return all jobs that wait, in order; or those that run and would grow (grow.py).

    `passed_over` is asked for each group, by its first job: those for which it gives a refusal are left out before they are put in order. With
    a thousand queues that wait for what their limits do not allow, that is most of what a session costs.
    """
    order = JobOrder(world)
    smallest = world.smallest_device_mib
    for queue, groups in world.waiting_groups().items():
        for signature, group in groups.items():
            if is_growth(signature) is not growth:
                continue
            refusal = passed_over(group.first, group)
            if refusal is None:
                order.push_group(queue, signature, group, group.vector(smallest))
            else:
                order.skipped.append((Tail(group, group.entries[0][0]), refusal))
                order.left_out.setdefault(queue, []).append((signature, group))
    # Those that room is kept for are looked at one by one: from their turn on it is kept (holds.py).
    for name in world.holds.by_name:
        job = world.jobs.get(name)
        chunk = next_chunk(job, waiting) if job is not None else []
        if job is not None and chunk:
            order.push(job, charge_of(chunk, world.smallest_device_mib))
    return order


@dataclass(frozen=True)
class Slice:
    """Ranks of one job that are given up together, and what the queue is charged for each. `last`: nothing of the job is left after it.

    `models` are the GPU models that they are charged for, where queues have amounts by model.
    """

    job: Job
    ranks: tuple[Rank, ...]
    vectors: tuple[Vector, ...]
    models: tuple[str, ...]
    vector: Vector
    last: bool


def victims_in_order(world: World, jobs: list[Job], protected: dict[Job, None]) -> Iterator[Slice]:
    """Return what may be given up, first what should go first. Of protected jobs only the surplus is offered."""
    order = JobOrder(world, reverse=True)
    slices: dict[Job, list[Slice]] = {}

    def first(job: Job) -> Vector | None:
        found = slices[job] = _slices(job, job in protected)[::-1]
        return found[-1].vector if found else None

    by_queue: dict[Queue, list[Job]] = {}
    for job in jobs:
        by_queue.setdefault(job.queue, []).append(job)
    keys: dict[Job, JobKey] = {}
    for queue, some in by_queue.items():
        keys |= victim_keys(some, world.job_key, world.losses)
        lines: dict[str, Entries] = {}
        for job in some:
            lines.setdefault(job.user if queue.user_fairness else "", []).append((keys[job], job))
        for group in lines.values():
            group.sort(key=lambda entry: entry[0], reverse=True)
            order.push_sorted(queue, group, first)
    while (popped := order.pop()) is not None:
        job = popped[0]
        left = slices[job]
        step = left.pop()
        yield step
        order.picked(job, step.vector)
        if left:
            key = keys[job]
            standing = 1 if left[-1].last else 2
            order.push(job, left[-1].vector, (key[0], standing, key[2], key[3]))


def _slices(job: Job, protected: bool) -> list[Slice]:
    steps = eviction_slices(job)
    running = job.active
    out = []
    for ranks in steps:
        running -= len(ranks)
        last = running == 0
        if last and protected:
            break
        vector = ZERO
        for rank in ranks:
            vector = add(vector, rank.charged)
        out.append(Slice(job, tuple(ranks), tuple(r.charged for r in ranks), tuple(r.model for r in ranks), vector, last))
    return out
