"""When a waiting job may start, and a running one ends: what follows from the availability profile, with the basis of the answer. Pure.

For a gang with a reservation (reserve.py) that is its start. Else the gangs that wait before a job in its queue, and then the job, are laid
over what comes free: a gang ends as profile.py says, and one of which nothing is known never does. Where several fit, the order is that of the
queue. This is no promise: gangs end before their limits, others may be submitted with a higher priority, and room that is made by preemption,
or taken by other queues, is not looked at. Roles are laid out one after another, each inside the domain that it, or else the nearest group
around it, requires.

    now ──▶ place whoever fits, in order ──▶ the next end by a time limit ──▶ place whoever fits ──▶ … ──▶ the job is placed: its start
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from gangline.core.model.gpushares import GPU, in_gpus
from gangline.core.model.roles import Leaf, least, leaves
from gangline.core.model.spec import JobSpec, TopologyRequest
from gangline.core.model.state import Job, Node, State
from gangline.core.policy.capacity import Domain, Room, domain_of, ends_ms, gpu_of, healthy, impossible, on_one_gpu, ranks_in, takes, within
from gangline.core.policy.profile import Profile
from gangline.core.policy.service import waiting_key

#: ranks by leaf and node
_Ranks = Counter[tuple[int, str]]
#: steps of the simulation after which it says that it cannot tell; a step looks at one gang or one node
MAX_STEPS = 100_000
#: reasons for waiting that time alone does not end
_NOT_BY_TIME = ("queue_held", "ranks_may_run", "unknown_topology", "policy_error", "no_such_model", "no_such_device", "held", "dependency")


@dataclass(frozen=True)
class Estimate:
    """When something happens by what is known now, None when that cannot be told; and what that is based on."""

    at_ms: int | None
    basis: str
    #: gangs before it in its queue, which are laid over the same room
    ahead: int = 0
    #: GPUs held by gangs that have no time limit
    gpus_without_limit: float = 0


@dataclass
class _Room:
    """What is free on one node as time goes on."""

    node: Node
    room: Room

    def fits(self, leaf: Leaf) -> int:
        return ranks_in(leaf, self.room)

    def change(self, leaf: Leaf, ranks: int) -> None:
        """Take what so many ranks need; below zero give it back. Shares of different GPUs count as if they were of one."""
        res, room = leaf.resources, self.room
        each = on_one_gpu(res, room.gpu)
        if res.shares_gpu and each:
            milli = room.gpus * GPU + room.shared_milli - ranks * res.charged_milli(room.gpu.memory_mib if room.gpu is not None else 0)
            room.gpus, room.shared_milli = milli // GPU, milli % GPU
        elif res.mig and each:
            room.gpus -= ceil(ranks * res.mig_count / each) if ranks > 0 else -ceil(-ranks * res.mig_count / each)
        else:
            room.gpus -= ranks * res.gpus
        room.cpus_milli -= ranks * res.cpus_milli
        room.memory_mib -= ranks * res.memory_mib


@dataclass
class _Shape:
    """Room by domain for roles that ask for the same per rank, kept as nodes change."""

    leaf: Leaf
    domains: dict[str, Domain]
    by_node: dict[str, int] = field(default_factory=dict)
    by_domain: dict[Domain, int] = field(default_factory=dict)

    def look(self, room: _Room) -> None:
        name = room.node.id
        if name in self.domains:
            fits, domain = room.fits(self.leaf), self.domains[name]
            self.by_domain[domain] = self.by_domain.get(domain, 0) + fits - self.by_node.get(name, 0)
            self.by_node[name] = fits


class _TooLong(Exception):
    """The simulation takes more steps than an answer is worth."""


def end_of(job: Job, now_ms: int) -> Estimate:
    """Return when a placed job ends at the latest."""
    at_ms = ends_ms(job, now_ms)
    if job.state == "preempting":
        return Estimate(at_ms, "it was asked to leave, and is stopped when its notice ends")
    if at_ms is None:
        return Estimate(None, "unknown: it has no time limit")
    ran = "its time limit" if job.running_since_ms else "its time limit, counted from now: it does not run yet"
    return Estimate(at_ms, f"{ran}; it may end before")


def start_of(state: State, job: Job, now_ms: int) -> Estimate:
    """Return when a waiting job starts, if what runs ends at its time limit and what is before it in its queue goes first."""
    never = impossible(state, job.spec)
    if never:
        return Estimate(None, f"never on the nodes that are up: {never}")
    held = _without_limit(state, now_ms)
    if job.deferral is not None and job.deferral.code in _NOT_BY_TIME:
        return Estimate(None, f"unknown: it waits for something other than room ({job.deferral.message})", gpus_without_limit=held)
    ahead = [other for other in _before(state, job, now_ms) if other.deferral is None or other.deferral.code not in _NOT_BY_TIME]
    if job.reserved is not None and job.reserved.start_ms > now_ms:
        basis = f"room is kept for it {job.reserved.message}, by time limits, notices and what jobs like them took"
        return Estimate(job.reserved.start_ms, basis, len(ahead), held)
    simulation = _Simulation(state, now_ms, [*ahead, job])
    try:
        at_ms = simulation.start_of(job)
    except _TooLong:
        return Estimate(None, f"unknown: too much runs and waits to lay it out; {len(ahead)} jobs are before it", len(ahead), held)
    first = f"{len(ahead)} job{'' if len(ahead) == 1 else 's'} before it in its queue"
    if at_ms is None:
        if held:
            return Estimate(None, f"unknown: {held} GPUs are held by jobs without a time limit; {first}", len(ahead), held)
        return Estimate(None, f"unknown: by room alone it would not start; {first}", len(ahead), held)
    if job.begin_at_ms > max(at_ms, now_ms):
        return Estimate(job.begin_at_ms, f"it is not to begin before; {first}, and by then there is room", len(ahead), held)
    if at_ms <= now_ms:
        why = f" (recorded: {job.deferral.message})" if job.deferral is not None else ""
        return Estimate(at_ms, f"there is room for it now; {first}. What keeps it is something else{why}", len(ahead), held)
    how = "at its time limit, or when jobs like it did" if simulation.profile.learned else "at its time limit"
    return Estimate(at_ms, f"if what runs ends {how}, with {first}; earlier when jobs end before it", len(ahead), held)


def _without_limit(state: State, now_ms: int) -> float:
    """GPUs of gangs that nothing says an end of."""
    placed = (state.jobs[job] for job in state.running)
    return in_gpus(sum(job.holds().gpus_milli for job in placed if ends_ms(job, now_ms) is None))


def _before(state: State, job: Job, now_ms: int) -> Iterator[Job]:
    """Jobs that wait before this one in its queue, in order."""
    own, key = state.queues.leaf_of(job.spec.queue), waiting_key(state, job, now_ms)
    waiting: Iterator[Job] = (state.jobs[other] for _, _, other in state.queue)
    if state.queues.ages:  # the queue is sorted by what the jobs were submitted with
        waiting = iter(sorted(waiting, key=lambda other: waiting_key(state, other, now_ms)))
    for other in waiting:
        if waiting_key(state, other, now_ms) >= key:
            return
        if state.queues.leaf_of(other.spec.queue) == own:
            yield other


class _Simulation:
    """Nodes, and gangs on them, from now into the future."""

    def __init__(self, state: State, now_ms: int, waiting: list[Job]) -> None:
        self._state, self._now_ms, self._waiting = state, now_ms, waiting
        self.profile = Profile(state, now_ms)
        self._steps = 0
        nodes = [node for node in state.nodes.values() if node.schedulable]
        self._rooms = {node.id: _room(node) for node in nodes}
        self._shapes: dict[object, _Shape] = {}
        self._count = 0
        #: (when, order, spec, ranks by leaf and node) of what ends by its limit
        self._ends: list[tuple[int, int, JobSpec, _Ranks]] = []
        for job_id in state.running:
            job = state.jobs[job_id]
            at_ms = self.profile.end(job_id)
            if at_ms is not None:
                self._add_end(at_ms, job.spec, Counter((r.leaf, node) for node, part in job.parts.items() for r in part.ranks.values()))

    def start_of(self, job: Job) -> int | None:
        """Return when the job is placed."""
        now_ms = self._now_ms
        while True:
            if self._place_all(now_ms, job):
                return now_ms
            if not self._ends:
                return None
            now_ms = max(now_ms, self._ends[0][0])
            while self._ends and self._ends[0][0] <= now_ms:
                _, _, spec, ranks = heappop(self._ends)
                self._change(spec, ranks, -1)

    def _place_all(self, now_ms: int, job: Job) -> bool:
        """Place whoever fits, in order; True when the job itself is placed."""
        failed: set[object] = set()
        left: list[Job] = []
        for other in self._waiting:
            self._spend(1)
            key = _gang_key(other.spec)
            places = None if key in failed else self._places(other.spec)
            if places is None:
                failed.add(key)
                left.append(other)
                continue
            if other is job:
                return True
            lasts_ms = self.profile.lasts_ms(other, learned=True)
            if lasts_ms is not None:
                self._add_end(now_ms + lasts_ms, other.spec, places)
        self._waiting = left
        return False

    def _places(self, spec: JobSpec) -> _Ranks | None:
        """Take room for a gang of the smallest size that is worth starting, role by role; return its ranks, None when there is no room."""
        found: _Ranks = Counter()
        for leaf, need, asked in zip(leaves(spec), least(spec), within(spec), strict=True):
            ranks = self._places_of(leaf, need, asked)
            if ranks is None:
                self._change(spec, found, -1)
                return None
            self._change(spec, ranks, 1)
            found += ranks
        return found

    def _places_of(self, leaf: Leaf, need: int, asked: TopologyRequest) -> _Ranks | None:
        shape = self._shape(leaf, asked)
        domain = next((d for d, room in shape.by_domain.items() if room >= need), None)
        found: _Ranks = Counter()
        if not need:
            return found
        if domain is None:
            return None
        for node, fits in shape.by_node.items():
            self._spend(1)
            if fits and shape.domains[node] == domain:
                found[leaf.index, node] = min(fits, need)
                need -= found[leaf.index, node]
                if not need:
                    break
        return found

    def _shape(self, leaf: Leaf, asked: TopologyRequest) -> _Shape:
        key = _shape_key(leaf, asked)
        if key not in self._shapes:
            nodes = [room.node for room in self._rooms.values()]
            inside = domain_of(self._state, asked, nodes)
            shape = _Shape(leaf, {node.id: inside[node.id] for node in nodes if node.id in inside and takes(leaf, node)})
            for room in self._rooms.values():
                self._spend(1)
                shape.look(room)
            self._shapes[key] = shape
        return self._shapes[key]

    def _change(self, spec: JobSpec, ranks: _Ranks, by: int) -> None:
        """Take the room of some ranks, or give it back."""
        every = leaves(spec)
        for (leaf, node), count in ranks.items():
            room = self._rooms.get(node)
            if room is not None:
                room.change(every[leaf], by * count)
                for shape in self._shapes.values():
                    self._spend(1)
                    shape.look(room)

    def _add_end(self, at_ms: int, spec: JobSpec, ranks: _Ranks) -> None:
        self._count += 1
        heappush(self._ends, (at_ms, self._count, spec, ranks))

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise _TooLong


def _room(node: Node) -> _Room:
    good = healthy(node)
    memory = {gpu.index: max(1, gpu.memory_mib) for gpu in node.registration.gpus}
    shared = sum(GPU - use.amount(memory[gpu]) // memory[gpu] for gpu, use in node.parted.items() if gpu in good and not use.mig)
    free = sum(1 for gpu in node.free_gpus if gpu in good)
    return _Room(node, Room(gpu_of(node), free, node.free_cpus_milli, node.free_memory_mib, shared))


def _gang_key(spec: JobSpec) -> object:
    """Gangs of which this is equal have room together or not at all."""
    every = zip(leaves(spec), least(spec), within(spec), strict=True)
    return tuple((need, _shape_key(leaf, asked)) for leaf, need, asked in every)


def _shape_key(leaf: Leaf, asked: TopologyRequest) -> object:
    res = leaf.resources
    return (res, leaf.gang.ranks_per_node, asked.name, asked.required)
