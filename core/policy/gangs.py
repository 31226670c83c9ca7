"""Jobs: their ranks, the tree of subgroups over these, and what of it is taken or given up next.

A job is a tree. Its leaves are *podsets*, each with ranks and the least number of them that is of use (`min_ranks`). Inner nodes are *sets*, of
whose members all must be satisfied, or `min_members` of them. A job without subgroups is one set with one podset. Ranks beyond a podset's
minimum, and members beyond a set's, are *surplus*: they are placed one step at a time after everything else, and are the first to go.

    next chunk   an unsatisfied set: what its first `min_members` members lack, all as one gang;
                 a satisfied one: the next chunk of the first member that has any
    first slice  the reverse: surplus deep in the tree, then members beyond the minimum, then everything at once

Members are ordered: unsatisfied ones first, then by how far they are satisfied, those of which nothing is needed last, then by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

from gangline.core.policy.nodes import Place
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import ZERO, Request, Vector, add


class RankState(IntEnum):
    """What a rank is doing. A reservation is not a state: a rank that waits, or leaves, may have one besides."""

    #: waits, has no place
    PENDING = 0
    #: placed in this session
    BINDING = 1
    RUNNING = 2
    #: was on its way out before this session began: holds its place, which may be reserved
    RELEASING = 3
    #: its removal hangs: holds its place, which may not be reserved
    STUCK = 4
    #: evicted in this session: holds its place, which may be reserved
    EVICTED = 5
    SUCCEEDED = 6
    FAILED = 7
    #: waits, after a reservation made in this session was withdrawn; not looked at again before the next one
    WITHDRAWN = 8


#: works, or will
ACTIVE = (RankState.BINDING, RankState.RUNNING)
#: occupies a node
HOLDING = (RankState.BINDING, RankState.RUNNING, RankState.RELEASING, RankState.STUCK, RankState.EVICTED)
#: can still be part of its gang
LIVE = (RankState.PENDING, RankState.WITHDRAWN, *HOLDING)


class Rank:
    """One rank. Only World changes its state."""

    __slots__ = ("charged", "index", "job", "key", "model", "name", "place", "podset", "request", "reservation", "state")

    def __init__(self, job: Job, index: int, name: str, request: Request, order_label: int | None) -> None:
        self.job = job
        self.index = index
        self.name = name
        self.request = request
        #: order in its podset: larger labels first, labelled before unlabelled, then names as text
        self.key = (0 if order_label is not None else 1, -(order_label or 0), name)
        self.podset: Podset
        self.state = RankState.PENDING
        self.place: Place | None = None
        self.reservation: Place | None = None
        #: what its queue is charged for it now
        self.charged: Vector = ZERO
        #: GPU model of what it is charged for, where queues have amounts by model
        self.model = ""

    def __repr__(self) -> str:
        return f"Rank({self.name})"

    def all_ranks(self) -> Iterator[Rank]:
        """Return itself."""
        yield self

    @property
    def counts(self) -> bool:
        """Counts towards its gang: works, or has a reservation."""
        return self.reservation is not None or self.state in ACTIVE


class Constraint:
    """Where in a topology the ranks below must be: in one domain of `required`, and preferably in one of `preferred`. Empty: no such wish.

    `balanced` and `spread` are levels over the domains of which they are to be in equal numbers, up to `max_skew` (even.py): the ranks of a
    podset, or the members of a set.
    """

    __slots__ = ("balanced", "max_skew", "preferred", "required", "spread", "topology")

    def __init__(self, topology: str, required: str, preferred: str, *, balanced: str = "", spread: str = "", max_skew: int = 0) -> None:
        self.topology = topology
        self.required = required
        self.preferred = preferred
        self.balanced = balanced
        self.spread = spread
        self.max_skew = max_skew

    @property
    def even(self) -> bool:
        """Whether equal numbers are wanted."""
        return bool(self.balanced or self.spread)

    def key(self) -> tuple[str, str, str, str, str, int]:
        """Return its value."""
        return (self.topology, self.required, self.preferred, self.balanced, self.spread, self.max_skew)


class Podset:
    """A leaf of the tree. `active` is kept by World: how many of its ranks count."""

    __slots__ = ("active", "constraint", "min_ranks", "name", "ranks", "unit")

    def __init__(self, name: str, min_ranks: int, constraint: Constraint | None = None, unit: int = 1) -> None:
        self.name = name
        self.min_ranks = min_ranks
        self.constraint = constraint
        #: ranks of the job that each of these stands for: they are placed together, and are so many in what is said to people
        self.unit = unit
        #: in their order
        self.ranks: list[Rank] = []
        self.active = 0

    @property
    def satisfied(self) -> bool:
        """Has enough ranks that count."""
        return self.active >= self.min_ranks

    @property
    def ratio(self) -> float:
        """How far it is satisfied; what needs nothing comes last."""
        return self.active / self.min_ranks if self.min_ranks else float("inf")

    def all_ranks(self) -> Iterator[Rank]:
        """Return its ranks in order."""
        return iter(self.ranks)

    def podsets(self) -> Iterator[Podset]:
        """Return itself."""
        yield self


class PodsetGroup:
    """A set: an inner node of the tree."""

    __slots__ = ("constraint", "members", "min_members", "name")

    def __init__(self, name: str, min_members: int | None, members: list[Member], constraint: Constraint | None = None) -> None:
        self.name = name
        self.min_members = min_members
        self.members = members
        self.constraint = constraint

    @property
    def needed(self) -> int:
        """How many of its members must be satisfied."""
        return len(self.members) if self.min_members is None else self.min_members

    @property
    def satisfied(self) -> bool:
        """Has enough satisfied members."""
        return sum(1 for m in self.members if m.satisfied) >= self.needed

    @property
    def ratio(self) -> float:
        """How far it is satisfied; what needs nothing comes last."""
        return sum(1 for m in self.members if m.satisfied) / self.needed if self.needed else float("inf")

    def ordered(self) -> list[Member]:
        """Return its members in the order in which they are served."""
        return self.members if len(self.members) == 1 else sorted(self.members, key=lambda m: (m.satisfied, m.ratio, m.name))

    def all_ranks(self) -> Iterator[Rank]:
        """Return the ranks of all members."""
        for member in self.members:
            yield from member.all_ranks()

    def podsets(self) -> Iterator[Podset]:
        """Return the leaves below it."""
        for member in self.members:
            yield from member.podsets()


Member = Podset | PodsetGroup


class Job:
    """One job. `order` is its age rank, 0 the oldest; times are in seconds before `now` of the session, None if there is no such time."""

    __slots__ = (
        "active", "age_s", "boost", "constraint", "evicted_s_ago", "grows", "name", "order", "plain", "podsets", "preemptible",
        "preemption_delay_s",
        "priority", "queue", "ranks", "root", "shape", "single", "stale_for_s", "staleness_grace_s", "started_s_ago",
        "uniform", "user",
    )  # fmt: skip

    def __init__(self, name: str, queue: Queue, *, priority: int, preemptible: bool, order: int, root: PodsetGroup) -> None:
        self.name = name
        self.queue = queue
        self.priority = priority
        #: what its waiting has added to that (ageing.py): counts in the order of its queue and against being preempted, not for preempting
        self.boost = 0
        self.preemptible = preemptible
        self.order = order
        self.root = root
        #: who submitted it; counts where users take turns
        self.user = ""
        self.podsets = list(root.podsets())
        #: the only podset, if the job has no subgroups
        self.single = self.podsets[0] if len(self.podsets) == 1 and root.members == self.podsets else None
        #: how many of its ranks count; kept by World
        self.active = 0
        #: of the whole job, around that of its root set
        self.constraint: Constraint | None = None
        #: by index
        self.ranks: list[Rank] = []
        #: stands for its tree and its constraints: equal numbers are placed alike
        self.shape = 0
        #: what every one of its ranks asks for, None if they ask for different things
        self.uniform: Request | None = None
        #: no constraint and no affinity anywhere: where its other ranks are does not matter
        self.plain = True
        #: runs at a size that is worth a change only when nobody else needs the room: what it lacks to its largest size is placed last (grow.py)
        self.grows = False
        self.age_s: float | None = None
        self.started_s_ago: float | None = None
        self.evicted_s_ago: float | None = None
        self.preemption_delay_s = 0.0
        #: how long it has been stale already; None: is not, or only now
        self.stale_for_s: float | None = None
        #: None: the default; infinity: never evicted for being stale
        self.staleness_grace_s: float | None = None

    def __repr__(self) -> str:
        return f"Job({self.name})"

    @property
    def standing(self) -> int:
        """0 below its gang minimum in some podset, 1 exactly at it in all, 2 with surplus.

        Podsets that their set could do without count as well.
        """
        above = False
        for podset in self.podsets:
            if podset.active < podset.min_ranks:
                return 0
            above = above or podset.active > podset.min_ranks
        return 2 if above else 1


def has_minimum(job: Job) -> bool:
    """Whether the job has all that it cannot do without, so that what it still waits for is surplus: ranks, or members of sets."""
    return job.active > 0 and job.root.satisfied


def growing(job: Job) -> bool:
    """Whether what the job waits for would make a gang larger that runs already, and is placed last."""
    return job.grows and has_minimum(job)


def waiting(rank: Rank) -> bool:
    """Whether the rank waits and has neither place nor reservation."""
    return rank.state is RankState.PENDING and rank.reservation is None


def _waiting_of(podset: Podset) -> list[Rank]:
    pending = RankState.PENDING
    return [r for r in podset.ranks if r.state is pending and r.reservation is None]


def put_back(rank: Rank) -> bool:
    """Whether the rank has lost its place, or its reservation, in this session and has no new one yet."""
    return rank.state in (RankState.EVICTED, RankState.WITHDRAWN) and rank.reservation is None


def alive(member: Member) -> bool:
    """Whether enough live ranks exist to satisfy it."""
    if isinstance(member, Podset):
        return member.satisfied or sum(1 for r in member.ranks if r.state in LIVE) >= member.min_ranks
    return sum(1 for m in member.members if alive(m)) >= member.needed


def next_chunk(job: Job, free: Callable[[Rank], bool] = waiting) -> list[Rank]:
    """Return the ranks to place next, all or none of them; empty if there is nothing to place, or not enough ranks to reach a minimum."""
    return _chunk(job.root, free) or []


def _chunk(member: Member, free: Callable[[Rank], bool]) -> list[Rank] | None:
    if isinstance(member, Podset):
        ranks = _waiting_of(member) if free is waiting else [r for r in member.ranks if free(r)]
        lacking = max(1, member.min_ranks - member.active)
        return ranks[:lacking] if len(ranks) >= lacking else None
    ordered = member.ordered()
    if member.satisfied:
        return next((c for c in (_chunk(m, free) for m in ordered) if c), None)
    out: list[Rank] = []
    served = 0
    for m in ordered:
        if served == member.needed:
            break
        if m.satisfied:
            served += 1
            continue
        chunk = _chunk(m, free)
        if chunk is not None:
            out += chunk
            served += 1
    return out if out and served >= member.needed else None


# ---------------------------------------------------------------- what is given up first


def eviction_slices(job: Job) -> list[list[Rank]]:
    """Return the ranks that run, or have a reservation from this session, in the steps in which they are given up.

    That is surplus one at a time, then all that is left at once. What this session has started is not given up again, and the gang counts on
    it: a job with such ranks has only surplus to give.
    """
    steps = _all_slices(job)
    if any(r.state is RankState.BINDING for r in job.ranks):
        return [s for s in steps[:-1] if all(r.state is not RankState.BINDING for r in s)]
    return steps


def _all_slices(job: Job) -> list[list[Rank]]:
    left = {id(p): [r for r in p.ranks if r.counts and r.charged != ZERO] for p in job.podsets}
    slices: list[list[Rank]] = []
    if job.single is not None:
        ranks = left[id(job.single)]
        while len(ranks) > job.single.min_ranks and len(ranks) > 1:
            slices.append([ranks.pop()])
    else:
        while (step := _surplus(job.root, lambda p: len(left[id(p)]))) is not None:
            taken = _take(step, left)
            if not taken:
                break
            slices.append(taken)
    rest = [r for p in job.podsets for r in left[id(p)]]
    return [*slices, rest] if rest else slices


def _take(step: Member, left: dict[int, list[Rank]]) -> list[Rank]:
    if isinstance(step, Podset) and len(left[id(step)]) > step.min_ranks:
        return [left[id(step)].pop()]
    taken = [r for p in step.podsets() for r in left[id(p)]]
    for p in step.podsets():
        left[id(p)] = []
    return taken


def _surplus(root: Member, active: Callable[[Podset], int]) -> Member | None:
    """Return what can go without harm: a podset with more than its minimum, else a member that its set does not need; None if all is needed."""

    def satisfied(m: Member) -> bool:
        if isinstance(m, Podset):
            return active(m) >= m.min_ranks
        return sum(1 for x in m.members if satisfied(x)) >= m.needed

    def any_active(m: Member) -> bool:
        return any(active(p) for p in m.podsets())

    def ratio(m: Member) -> float:
        if isinstance(m, Podset):
            return active(m) / m.min_ranks if m.min_ranks else float("inf")
        return sum(1 for x in m.members if satisfied(x)) / m.needed if m.needed else float("inf")

    def find(m: Member) -> Member | None:
        if isinstance(m, Podset):
            return m if active(m) > m.min_ranks else None
        ordered = sorted(m.members, key=lambda x: (satisfied(x), ratio(x), x.name), reverse=True)
        for x in ordered:
            found = find(x)
            if found is not None:
                return found
        spare = sum(1 for x in ordered if satisfied(x)) > m.needed
        return next((x for x in ordered if any_active(x) and (spare or not satisfied(x))), None) if satisfied(m) else None

    return find(root)


def charge_of(ranks: list[Rank], device_memory_mib: int) -> Vector:
    """Return what a queue would be charged for the ranks, which are all of one job, on devices with this much memory."""
    uniform = ranks[0].job.uniform if ranks else None
    if uniform is not None:
        one, count = uniform.vector(device_memory_mib), len(ranks)
        return (count * one[0], count * one[1], count * one[2])
    total = ZERO
    for rank in ranks:
        total = add(total, rank.request.vector(device_memory_mib))
    return total
