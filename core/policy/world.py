"""The what-if world: nodes, queues, jobs, and every change to where a rank is, each of which can be undone.

A *session* decides on this world as if it were the cluster. Five changes exist, and only these move a rank:

    bind      a waiting rank gets a place that is free now
    reserve   a rank that waits, or that was evicted, gets a place that will be free when what leaves it has left
    evict     a rank that works has to go; it holds its place until it has gone
    spare     an evicted rank stays after all
    withdraw  a reservation that was made in this session is taken back

Besides, room is covered for a hold, or is uncovered (holds.py).

Each is written to a journal. `checkpoint` is a position in it, `rollback` undoes everything behind a position in reverse order, and what is left
in the journal at the end of a session is what the session decided. All amounts are whole numbers and every change is a sum, so a rollback
restores the world exactly.

Between sessions the caller keeps the world in step with the cluster: jobs and nodes come and go, ranks start and end (`settle`, `leave`). What
a session costs follows from what has changed, because nothing is copied: waiting jobs are kept sorted, in groups that are placed alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gangline.core.policy import models
from gangline.core.policy.fragmentation import Measure
from gangline.core.policy.gangs import ACTIVE, HOLDING, Job, PodsetGroup, Rank, RankState, charge_of, put_back, waiting
from gangline.core.policy.holds import Hold, Holds
from gangline.core.policy.ledger import Ledger
from gangline.core.policy.lostwork import Losses
from gangline.core.policy.moves import Moves
from gangline.core.policy.nodes import Node, NodeSpec, Place
from gangline.core.policy.queues import Queue, QueueSpec
from gangline.core.policy.requests import GPU, ZERO, Request, Vector, add, mig_gpus, subtract
from gangline.core.policy.waiting import Group, JobKey, Signature, Waiting


@dataclass(frozen=True)
class Options:
    """How a session decides. The defaults are what production uses."""

    #: "binpack", "spread" or "none", for ranks with devices and for those without
    gpu_nodes: str = "binpack"
    cpu_nodes: str = "binpack"
    #: "pack", "spread" or "none"
    share_devices: str = "pack"
    #: quotas, limits and fair shares bind; priorities count; a node where the rank fits now, or can share a device, is preferred
    quotas: bool = True
    priorities: bool = True
    prefer_ready: bool = True
    prefer_shared: bool = True
    #: seconds that a gang below its minimum may stay, unless its job says otherwise
    staleness_grace_s: float = 60.0
    #: ranks beyond a gang's minimum may have others evicted; without this they only get what is idle
    evict_for_surplus: bool = True
    #: what potential.py states holds for the session as a whole; and who is moved by reclaim or preempt must be one that may be taken for
    #: good, since a move restarts it, too
    no_thrash: bool = False
    #: what-if placements tried for one waiting job in one pass, at most
    simulations: int = 1000
    #: gangs with a reservation at a time
    reservations: int = 4


#: changes that concern no rank
_OF_HOLDS = ("cover", "lift")


class World:
    """Everything a session knows and changes. Build it with add_node, add_queue and add_job, parents before children."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.nodes: list[Node] = []
        self.node_by_name: dict[str, Node] = {}
        self.queues: dict[str, Queue] = {}
        self.jobs: dict[str, Job] = {}
        #: levels of each topology, coarsest first
        self.topologies: dict[str, tuple[str, ...]] = {}
        #: by topology: the label path of each node inside it, with the `node_version` and the levels that it was read from
        self.label_paths: dict[str, tuple[int, tuple[str, ...], dict[str, tuple[str, ...]]]] = {}
        self.total: Vector = ZERO
        #: of all devices in the cluster, MiB
        self.smallest_device_mib = 0
        self.largest_device_mib = 0
        #: positions of nodes whose room has changed, in order; those who keep an index of nodes remember how far they have read
        self.touched: list[int] = []
        #: ranks with pod-affinity terms or labels
        self.affine: dict[Rank, None] = {}
        #: some node takes MIG ranks
        self.has_mig = False
        #: some node partitions its devices as it is asked
        self.partitions = False
        #: rises when the set of nodes changes, and when anything on a node does
        self.node_version = 0
        self.room_version = 0
        #: what will be free in all, what of it is on each node, and the nodes on which that may have changed since it was added up
        self._free: Vector = ZERO
        self._free_on: dict[Node, Vector] = {}
        self._stirred: dict[Node, None] = {}
        self._requests: dict[Request, Request] = {}
        self._shapes: dict[object, int] = {}
        self._gpus_by_model: tuple[int, dict[str, int]] = (-1, {})
        #: by number of a request: the models of its nodes, with the `node_version`
        self._models_of: dict[int, tuple[int, tuple[str, ...]]] = {}
        self._journal: list[tuple[str, Rank, RankState, Place | None, Vector, tuple[Rank, ...]]] = []
        #: what jobs would lose if they stopped now; None where nothing is known of it
        self.losses: Losses | None = None
        #: who was evicted for whom lately; None where nothing is known of it
        self.ledger: Ledger | None = None
        #: room that is kept from some
        self.holds = Holds([])
        #: what may be moved, and what that is worth; None: anything that can be preempted
        self.moves: Moves | None = None
        #: what idle room is worth to those who are likely to come; None: nodes are filled by how full they are
        self.measure: Measure | None = None
        #: names of jobs that are served before all others (earmarks.py)
        self.first: tuple[str, ...] = ()
        #: the jobs that wait, in groups
        self.waiting = Waiting()

    # ------------------------------------------------------------ building

    def add_node(self, spec: NodeSpec) -> Node:
        """Add a node. Names must be unique."""
        node = Node(spec)
        if self.node_by_name.setdefault(spec.name, node) is not node:
            raise ValueError(f"node {spec.name!r} is there already")
        self._renumber()
        return node

    def add_nodes(self, specs: Iterable[NodeSpec]) -> None:
        """Add many nodes at once."""
        for spec in specs:
            if spec.name in self.node_by_name:
                raise ValueError(f"node {spec.name!r} is there already")
            self.node_by_name[spec.name] = Node(spec)
        self._renumber()

    def free_later(self) -> Vector:
        """Return what will be free in all on nodes that give whole devices or none, when what is leaving has left."""
        if self._stirred:
            g, c, m = self._free
            for node in self._stirred:
                old, new = self._free_on.get(node, ZERO), _free_on(node)
                g, c, m = g + new[0] - old[0], c + new[1] - old[1], m + new[2] - old[2]
                self._free_on[node] = new
            self._free = (g, c, m)
            self._stirred.clear()
        return self._free

    def stir(self, node: Node) -> None:
        """Note that something on a node has changed."""
        self.touched.append(node.index)
        self.room_version += 1
        self._stirred[node] = None

    def remove_node(self, name: str) -> None:
        """Take a node away. No rank may be on it."""
        node = self.node_by_name[name]
        if node.pods_idle != node.spec.max_pods or node.pods_later != node.spec.max_pods:
            raise ValueError(f"node {name!r} still has ranks")
        del self.node_by_name[name]
        self._renumber()

    def _renumber(self) -> None:
        self.nodes = [self.node_by_name[name] for name in sorted(self.node_by_name)]
        for at, node in enumerate(self.nodes):
            node.index = at
        self.node_version += 1
        self.touched.clear()
        self._free, self._free_on, self._stirred = ZERO, {}, dict.fromkeys(self.nodes)
        self.has_mig = any(n.mig_only for n in self.nodes)
        self.partitions = any(n.spec.mig_layout is not None for n in self.nodes)
        gpus = sum(n.gpus * GPU + sum(mig_gpus(p) * count * GPU for p, count in (n.spec.mig or {}).items()) for n in self.nodes)
        self.total = (gpus, sum(n.spec.cpu_milli for n in self.nodes), sum(n.spec.memory_bytes for n in self.nodes))
        memories = [n.spec.gpu_memory_mib for n in self.nodes if n.gpus and n.spec.gpu_memory_mib]
        self.smallest_device_mib, self.largest_device_mib = min(memories, default=0), max(memories, default=0)

    def add_queue(self, spec: QueueSpec) -> Queue:
        """Add a queue below its parent, which must exist. Names must be unique. All queues come before the first job."""
        self.add_queues([spec])
        return self.queues[spec.name]

    def add_queues(self, specs: Iterable[QueueSpec]) -> None:
        """Add many queues at once, parents before children."""
        for spec in specs:
            self._add_queue(spec)
        for queue in self.queues.values():
            queue.children.sort(key=lambda q: (q.created, q.name))
        for at, queue in enumerate(sorted(self.queues.values(), key=lambda q: (q.depth, q.created, q.name))):
            queue.seq = at
        if any(queue.spec.models for queue in self.queues.values()):
            models.open_accounts(self.queues.values())

    def _add_queue(self, spec: QueueSpec) -> None:
        if spec.name in self.queues:
            raise ValueError(f"queue {spec.name!r} is there already")
        if spec.parent and spec.parent not in self.queues:
            raise ValueError(f"queue {spec.name!r} has the parent {spec.parent!r}, which is not there")
        queue = Queue(spec, self.queues[spec.parent] if spec.parent else None)
        if queue.parent is not None:
            queue.parent.children.append(queue)
        self.queues[spec.name] = queue

    def gpus_by_model(self) -> dict[str, int]:
        """Return how many thousandths of a GPU the nodes have of each model."""
        if self._gpus_by_model[0] != self.node_version:
            found: dict[str, int] = {}
            for node in self.nodes:
                found[node.model] = found.get(node.model, 0) + node.gpus * GPU
            self._gpus_by_model = (self.node_version, found)
        return self._gpus_by_model[1]

    def models_of(self, request: Request) -> tuple[str, ...]:
        """Return the GPU models of the nodes that a request names, of all nodes with GPUs if it names none."""
        known = self._models_of.get(request.number)
        if known is None or known[0] != self.node_version:
            some = self.nodes if request.nodes is None else [self.node_by_name[n] for n in request.nodes if n in self.node_by_name]
            known = self._models_of[request.number] = (self.node_version, tuple(sorted({n.model for n in some if n.gpus or n.mig_only})))
        return known[1]

    def roots(self) -> list[Queue]:
        """Return the top queues, oldest first."""
        return sorted((q for q in self.queues.values() if q.parent is None), key=lambda q: q.seq)

    def intern(self, request: Request) -> Request:
        """Return the one object that stands for all requests equal to this one."""
        known = self._requests.get(request)
        if known is None:
            known = replace(request, number=len(self._requests))
            self._requests[known] = known
        return known

    def add_job(self, job: Job, places: dict[int, tuple[RankState, Place | None]] | None = None) -> None:
        """Add a job whose ranks and tree are complete; `places` says by index which ranks are not just waiting, and where they are.

        A pending rank with a place has a reservation there, which no queue is charged for.
        """
        if job.name in self.jobs:
            raise ValueError(f"job {job.name!r} is there already")
        self.jobs[job.name] = job
        for podset in job.podsets:
            podset.ranks.sort(key=lambda r: r.key)
        first = job.ranks[0].request if job.ranks else None
        job.uniform = first if all(r.request is first for r in job.ranks) else None
        job.shape = self._shape_of(job)
        job.plain = all(r.request.affinity is None for r in job.ranks) and not _constrained(job)
        if not all(r.request.affinity is None for r in job.ranks):
            self.affine |= {r: None for r in job.ranks if r.request.affinity is not None}
        placed = places or {}
        for rank in job.ranks if placed else ():
            if rank.index in placed:
                self._introduce(rank, *placed[rank.index])
        idle = [r for r in job.ranks if r.index not in placed]
        job.queue.waiting = add(job.queue.waiting, charge_of(idle, self.smallest_device_mib))
        if any(waiting(r) for r in job.ranks):
            self.waiting.changed[job] = None
        else:
            self.waiting.changed.pop(job, None)

    def _introduce(self, rank: Rank, state: RankState, place: Place | None) -> None:
        rank.state = state
        if state is RankState.PENDING:
            rank.job.queue.waiting = add(rank.job.queue.waiting, rank.request.vector(self.smallest_device_mib))
            if place is not None:
                self._take(rank, place, 0, -1)
                rank.reservation = place
                self._count(rank, 1)
        elif state not in HOLDING:
            rank.place = place
        elif place is not None:
            rank.place = place
            self._take(rank, place, -1, 0 if state in (RankState.RELEASING, RankState.EVICTED) else -1)
            if state in ACTIVE:
                self._charge(rank, rank.request.vector(place.node.spec.gpu_memory_mib))
                self._count(rank, 1)

    def remove_job(self, name: str) -> None:
        """Forget a job, with everything that its ranks hold. Not within a session."""
        job = self.jobs.pop(name)
        idle = [r for r in job.ranks if waiting(r)]
        job.queue.waiting = subtract(job.queue.waiting, charge_of(idle, self.smallest_device_mib))
        for rank in idle:
            rank.state = RankState.SUCCEEDED
        for rank in job.ranks if len(idle) < len(job.ranks) else ():
            self.leave(rank, RankState.SUCCEEDED)
        for rank in job.ranks if self.affine else ():
            self.affine.pop(rank, None)
        self.waiting.forget(job)

    def _shape_of(self, job: Job) -> int:
        value = (job.constraint.key() if job.constraint else None, _tree_key(job.root))
        return self._shapes.setdefault(value, len(self._shapes))

    # ------------------------------------------------------------ changes, each with its way back

    def checkpoint(self) -> int:
        """Return the position to roll back to."""
        return len(self._journal)

    def bind(self, rank: Rank, place: Place) -> None:
        """Place a waiting rank where it fits now."""
        assert waiting(rank), f"bind {rank.name}: it is {rank.state.name}"
        self._journal.append(("bind", rank, rank.state, None, ZERO, ()))
        rank.state, rank.place = RankState.BINDING, place
        self._count(rank, 1)
        queue = rank.job.queue
        queue.waiting = subtract(queue.waiting, rank.request.vector(self.smallest_device_mib))
        self._take(rank, place, -1, -1)
        self._charge(rank, rank.request.vector(place.node.spec.gpu_memory_mib))

    def reserve(self, rank: Rank, place: Place) -> None:
        """Reserve a place for a rank that waits or was evicted."""
        assert rank.reservation is None, f"reserve for {rank.name}: it has a reservation"
        self._journal.append(("reserve", rank, rank.state, None, ZERO, ()))
        rank.reservation = place
        self._count(rank, 1)
        self._take(rank, place, 0, -1)
        self._charge(rank, rank.request.vector(place.node.spec.gpu_memory_mib))

    def evict(self, rank: Rank) -> None:
        """Evict a rank that works: it leaves, and its queue is no longer charged for it."""
        assert rank.state in ACTIVE, f"evict {rank.name}: it is {rank.state.name}"
        assert rank.place is not None, f"{rank.name} works and has no place"
        self._journal.append(("evict", rank, rank.state, rank.place, rank.charged, ()))
        rank.state = RankState.EVICTED
        self._count(rank, -1)
        self._take(rank, rank.place, 0, 1)
        self._charge(rank, ZERO)

    def spare(self, rank: Rank) -> None:
        """Take back the eviction of a rank that has got no other place."""
        assert put_back(rank), f"spare {rank.name}: it is {rank.state.name}"
        assert rank.place is not None, f"{rank.name} is leaving and has no place"
        self._journal.append(("spare", rank, rank.state, rank.place, rank.charged, ()))
        rank.state = RankState.RUNNING
        self._count(rank, 1)
        self._take(rank, rank.place, 0, -1)
        self._charge(rank, rank.request.vector(rank.place.node.spec.gpu_memory_mib))

    def shift(self, rank: Rank, devices: tuple[int, ...]) -> None:
        """Give a reservation other whole devices of the same node, which must be free later."""
        old = rank.reservation
        assert old is not None, f"shift {rank.name}: it has no reservation"
        self._journal.append(("shift", rank, rank.state, old, rank.charged, ()))
        rank.reservation = Place(old.node, devices, old.milli, old.zones, old.mig)
        self._take(rank, old, 0, 1)
        self._take(rank, rank.reservation, 0, -1)

    def withdraw(self, rank: Rank) -> None:
        """Take back a reservation that was made in this session."""
        assert rank.reservation is not None, f"withdraw {rank.name}: it has no reservation"
        self._journal.append(("withdraw", rank, rank.state, rank.reservation, rank.charged, ()))
        self._take(rank, rank.reservation, 0, 1)
        rank.reservation = None
        self._count(rank, -1)
        if rank.state is RankState.PENDING:
            rank.state = RankState.WITHDRAWN
        self._charge(rank, ZERO)

    def cover(self, hold: Hold) -> None:
        """Turn a hold on: what it wants, as far as it is there, is not free any more."""
        if hold.on:
            return
        hold.short = False
        for want in hold.wants:
            node = self.node_by_name.get(want.node)
            if node is None:
                hold.short = True
                continue
            rank, place = self.holds.cover_of(hold, want, node)
            if place.devices or rank.request.cpu_milli or rank.request.memory_bytes:
                self._journal.append(("cover", rank, rank.state, place, ZERO, ()))
                self._set_cover(rank, place, True)

    def cover_reservations(self) -> None:
        """Turn on the holds of declared reservations."""
        for hold in self.holds.by_name.values():
            if hold.always:
                self.cover(hold)

    def let_in(self, job: Job) -> list[Hold]:
        """Turn off the holds of declared reservations that admit a job, and return them."""
        holds = [hold for hold in self.holds.on() if hold.always and self.holds.leaves(job, hold)]
        for hold in holds:
            self.lift(hold)
        return holds

    def cover_for_those_who_wait(self) -> None:
        """Turn on the holds of all jobs that have no place yet."""
        for name, hold in self.holds.by_name.items():
            job = self.jobs.get(name)
            if job is None or not job.active:
                self.cover(hold)

    def lift(self, hold: Hold) -> None:
        """Turn a hold off."""
        for rank, place in list(hold.covers.items()):
            self._journal.append(("lift", rank, rank.state, place, ZERO, ()))
            self._set_cover(rank, place, False)

    def _set_cover(self, rank: Rank, place: Place, on: bool) -> None:
        covers = self.holds.by_name[rank.job.name].covers
        if on:
            covers[rank] = place
        else:
            del covers[rank]
        place.node.take(rank.request, place, 0, -1 if on else 1)
        self.stir(place.node)

    def give_up(self, rank: Rank) -> None:
        """Evict a rank that works, or withdraw its reservation, if it has one."""
        if rank.reservation is not None:
            self.withdraw(rank)
        else:
            self.evict(rank)

    def vanish(self, rank: Rank) -> None:
        """Suppose that a rank that was evicted has gone: it waits again, as one does whose reservation was withdrawn."""
        assert put_back(rank), f"vanish {rank.name}: it is {rank.state.name}"
        self._journal.append(("vanish", rank, rank.state, rank.place, rank.charged, ()))
        if rank.state is RankState.EVICTED and rank.place is not None:
            self._take(rank, rank.place, 1, 0)
            rank.place = None
            rank.job.queue.waiting = add(rank.job.queue.waiting, rank.request.vector(self.smallest_device_mib))
        rank.state = RankState.PENDING
        self.waiting.changed[rank.job] = None

    def place_alike(self, ranks: list[Rank], node: Node, devices: list[tuple[int, ...]], wait: bool) -> None:
        """Bind, or reserve for, waiting ranks of one podset with the same plain request, all on one node; devices are given by rank.

        It is the same as `bind`, or `reserve`, for one after another, and costs less.
        """
        assert all(waiting(r) for r in ranks), f"place {ranks[0].job.name}: some of its ranks do not wait"
        milli = GPU if ranks[0].request.count else 0
        self._journal.append(("reserve alike" if wait else "bind alike", ranks[0], RankState.PENDING, None, ZERO, tuple(ranks)))
        charged = ranks[0].request.vector(node.spec.gpu_memory_mib)
        for rank, chosen in zip(ranks, devices, strict=True):
            place = Place(node, chosen, milli)
            rank.charged = charged
            if wait:
                rank.reservation = place
            else:
                rank.state, rank.place = RankState.BINDING, place
        self._take_alike(ranks, node, devices, wait, 1)

    def _take_alike(self, ranks: Sequence[Rank], node: Node, devices: list[tuple[int, ...]], wait: bool, by: int) -> None:
        job, podset, request, count = ranks[0].job, ranks[0].podset, ranks[0].request, by * len(ranks)
        node.take_alike(request, [d for some in devices for d in some], len(ranks), 0 if wait else -by, -by)
        self.stir(node)
        self.waiting.changed[job] = None
        podset.active += count
        job.active += count
        if job.active:
            job.queue.works(job)
        else:
            job.queue.stops(job)
        if not wait:
            waits, one = job.queue.waiting, request.vector(self.smallest_device_mib)
            job.queue.waiting = (waits[0] - count * one[0], waits[1] - count * one[1], waits[2] - count * one[2])
        charged = request.vector(node.spec.gpu_memory_mib)
        if job.queue.models:
            for rank in ranks:
                rank.model = node.model if by > 0 and charged[0] else ""
            models.charge_queues(job, node.model, count * charged[0])
        self._charge_queues(job, count * charged[0], count * charged[1], count * charged[2])

    def _undo_alike(self, ranks: tuple[Rank, ...], wait: bool) -> None:
        places = [r.reservation if wait else r.place for r in ranks]
        node, devices = places[0].node if places[0] else None, [p.devices for p in places if p is not None]
        assert node is not None, f"{ranks[0].name} was placed and has no place"
        for rank in ranks:
            rank.charged = ZERO
            if wait:
                rank.reservation = None
            else:
                rank.state, rank.place = RankState.PENDING, None
        self._take_alike(ranks, node, devices, wait, -1)

    def rollback(self, checkpoint: int) -> None:
        """Undo everything since the checkpoint, the last change first."""
        while len(self._journal) > checkpoint:
            what, rank, state, place, charged, alike = self._journal.pop()
            if what in _OF_HOLDS:
                assert place is not None
                self._set_cover(rank, place, what == "lift")
                continue
            if alike:
                self._undo_alike(alike, what == "reserve alike")
                continue
            if what == "vanish":
                self._unvanish(rank, state, place)
                continue
            if what == "shift":
                assert place is not None
                assert rank.reservation is not None
                self._take(rank, rank.reservation, 0, 1)
                self._take(rank, place, 0, -1)
                rank.reservation = place
                continue
            if what == "bind":
                assert rank.place is not None
                self._take(rank, rank.place, 1, 1)
                rank.place = None
                queue = rank.job.queue
                queue.waiting = add(queue.waiting, rank.request.vector(self.smallest_device_mib))
            elif what == "reserve":
                assert rank.reservation is not None
                self._take(rank, rank.reservation, 0, 1)
                rank.reservation = None
            else:
                assert place is not None
                self._take(rank, place, 0, 1 if what == "spare" else -1)
                if what == "withdraw":
                    rank.reservation = place
            self._count(rank, 1 if what in ("evict", "withdraw") else -1)
            rank.state = state
            self._charge(rank, charged)

    def _unvanish(self, rank: Rank, state: RankState, place: Place | None) -> None:
        rank.state = state
        if state is RankState.EVICTED and place is not None:
            rank.place = place
            self._take(rank, place, -1, 0)
            rank.job.queue.waiting = subtract(rank.job.queue.waiting, rank.request.vector(self.smallest_device_mib))
        self.waiting.changed[rank.job] = None

    def changes(self, checkpoint: int = 0) -> list[Rank]:
        """Return the ranks that were changed since the checkpoint, each once, in order of their first change."""
        some = (entry for entry in self._journal[checkpoint:] if entry[0] not in _OF_HOLDS)
        return list(dict.fromkeys(rank for entry in some for rank in entry[5] or (entry[1],)))

    def charged_before(self, checkpoint: int) -> dict[Rank, tuple[Vector, str]]:
        """Return what was charged at the checkpoint for the ranks that were changed since then, and for which GPU model if queues name it."""
        out: dict[Rank, tuple[Vector, str]] = {}
        for what, first, _, place, charged, alike in self._journal[checkpoint:]:
            if what in _OF_HOLDS:
                continue
            model = place.node.model if place is not None and charged[0] else ""
            for rank in alike or (first,):
                out.setdefault(rank, (charged, model if model in rank.job.queue.models else ""))
        return out

    def commit(self) -> None:
        """Make everything so far final: it can no longer be rolled back."""
        self._journal.clear()

    def _take(self, rank: Rank, place: Place, idle: int, later: int) -> None:
        place.node.take(rank.request, place, idle, later)
        self.stir(place.node)
        self.waiting.changed[rank.job] = None

    def _count(self, rank: Rank, by: int) -> None:
        rank.podset.active += by
        job = rank.job
        job.active += by
        if by < 0 and job.active == 0:
            job.queue.stops(job)
        elif by > 0:
            job.queue.works(job)

    def _charge(self, rank: Rank, vector: Vector) -> None:
        old = rank.charged
        if vector == old:
            return
        rank.charged = vector
        if rank.job.queue.models:
            models.charge(rank, old[0], vector[0])
        self._charge_queues(rank.job, vector[0] - old[0], vector[1] - old[1], vector[2] - old[2])

    def _charge_queues(self, job: Job, g: int, c: int, m: int) -> None:
        fixed = not job.preemptible
        leaf = job.queue
        if leaf.user_fairness:
            held = add(leaf.users.pop(job.user, ZERO), (g, c, m))
            if held != ZERO:
                leaf.users[job.user] = held
        for queue in leaf.path:
            a = queue.allocated
            queue.allocated = (a[0] + g, a[1] + c, a[2] + m)
            if fixed:
                n = queue.nonpreemptible
                queue.nonpreemptible = (n[0] + g, n[1] + c, n[2] + m)

    # ------------------------------------------------------------ between sessions

    def settle(self) -> None:
        """A session's decisions have been carried out as far as they can be at once: what was bound runs, what was evicted is leaving.

        Reservations are dropped; the next session makes them anew, with whatever has changed by then.
        """
        for rank in self.changes():
            if rank.reservation is not None:
                self._drop_reservation(rank)
            if rank.state is RankState.BINDING:
                rank.state = RankState.RUNNING
            elif rank.state is RankState.EVICTED:
                rank.state = RankState.RELEASING
            elif rank.state is RankState.WITHDRAWN:
                rank.state = RankState.PENDING
        self.commit()

    def _drop_reservation(self, rank: Rank) -> None:
        assert rank.reservation is not None
        self._take(rank, rank.reservation, 0, 1)
        rank.reservation = None
        self._count(rank, -1)
        self._charge(rank, ZERO)

    def leave(self, rank: Rank, state: RankState = RankState.PENDING) -> None:
        """A rank has gone from its node: it waits again, or has ended. Not within a session."""
        if rank.reservation is not None:
            self._drop_reservation(rank)
        if rank.state is RankState.PENDING:
            rank.job.queue.waiting = subtract(rank.job.queue.waiting, rank.request.vector(self.smallest_device_mib))
        if rank.place is not None and rank.state in HOLDING:
            self._take(rank, rank.place, 1, 0 if rank.state in (RankState.RELEASING, RankState.EVICTED) else 1)
            rank.place = None
        if rank.state in ACTIVE:
            self._count(rank, -1)
            self._charge(rank, ZERO)
        rank.state = state
        if state is RankState.PENDING:
            rank.job.queue.waiting = add(rank.job.queue.waiting, rank.request.vector(self.smallest_device_mib))
        self.waiting.changed[rank.job] = None

    # ------------------------------------------------------------ who waits

    def waiting_groups(self) -> dict[Queue, dict[Signature, Group]]:
        """Return the waiting jobs of each leaf queue, grouped by what is placed alike, each group in order. Not to be changed."""
        self.waiting.refresh(self.job_key)
        return self.waiting.groups

    def job_key(self, job: Job) -> JobKey:
        """Return its place in the order of its queue: larger priority, lower standing, older, name."""
        return (-job.priority - job.boost if self.options.priorities else 0, job.standing, job.order, job.name)


def _free_on(node: Node) -> Vector:
    """What a node adds to what will be free in all."""
    if node.mig_only or node.pods_later <= 0:
        return ZERO
    return (max(0, node.later_milli), max(0, node.cpu_later), max(0, node.memory_later))


def _constrained(job: Job) -> bool:
    def below(member: object) -> bool:
        if getattr(member, "constraint", None) is not None:
            return True
        return isinstance(member, PodsetGroup) and any(below(m) for m in member.members)

    return job.constraint is not None or below(job.root)


def _tree_key(member: object) -> object:
    constraint = getattr(member, "constraint", None)
    key = constraint.key() if constraint is not None else None
    if isinstance(member, PodsetGroup):
        return (key, member.min_members, tuple((m.name, _tree_key(m)) for m in member.members))
    return (key, getattr(member, "unit", 1))
