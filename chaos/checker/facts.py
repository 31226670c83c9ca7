"""What the log says of jobs and nodes, kept apart from the fold: what is placed where, in which incarnation, and what has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gangline.chaos.checker.report import Cite
from gangline.core.model import events as ev
from gangline.core.model.arrays import element_id
from gangline.core.model.documents import Registration
from gangline.core.model.gpushares import GpuShare
from gangline.core.model.queues import Declaration, QueueTree
from gangline.core.model.spec import JobSpec
from gangline.core.model.state import State

#: what an assertion does with an event of a type, given where it stands
Handler = Callable[[Cite, Any], None]


class Incarnation:
    """One rank of one generation in its place: what starts at most once."""

    __slots__ = ("exited", "generation", "gpus", "node", "placed", "rank", "share", "started")

    def __init__(self, rank: int, generation: int, node: str, gpus: tuple[int, ...], share: GpuShare | None, placed: Cite) -> None:
        self.rank, self.generation, self.node, self.gpus, self.share, self.placed = rank, generation, node, gpus, share, placed
        self.started = self.exited = False


class JobFacts:
    """One job that has not ended."""

    __slots__ = ("generation", "id", "nodes", "placed", "prepared", "ranks", "released", "spec", "submitted", "user")

    def __init__(self, job: str, spec: JobSpec, submitted: Cite, user: str = "") -> None:
        self.id, self.spec, self.submitted, self.user = job, spec, submitted, user
        self.generation = 0
        #: of the current placement; empty when there is none, or it is over
        self.ranks: dict[int, Incarnation] = {}
        self.nodes: tuple[str, ...] = ()
        self.prepared: set[str] = set()
        self.released = False
        self.placed: Cite | None = None


class Facts:
    """Follows the log. Events of jobs that it does not know are passed over: that they are illegal is said by others."""

    def __init__(self, keep_ends: bool) -> None:
        """`keep_ends`: remember until when each incarnation was wanted, which takes memory for each."""
        self.jobs: dict[str, JobFacts] = {}
        #: jobs that have ended, with the entry that says so
        self.finished: dict[str, Cite] = {}
        self.nodes: dict[str, Registration] = {}
        self.up: dict[str, bool] = {}
        #: since when a node is up or lost
        self.since: dict[str, Cite] = {}
        self.queues = QueueTree()
        #: (job, rank, generation) → the entry from which on it was not wanted any more
        self.unwanted: dict[tuple[str, int, int], Cite] = {}
        #: how long ranks of a job that has ended may take to die, where ends are kept
        self.grace_ms: dict[str, int] = {}
        self._keep_ends = keep_ends

    def begin(self, state: State) -> None:
        """Start from a state instead of from nothing: the entries before it are not there."""
        here = Cite(state.index, state.at_ms)
        self.queues = state.queues
        for job in state.jobs.values():
            if job.state == "finished":
                self.finished[job.id] = here
                continue
            known = self.jobs[job.id] = JobFacts(job.id, job.spec, here, job.user)
            known.generation, known.released, known.nodes = job.generation, job.released or len(job.parts) == 1, tuple(job.parts)
            known.prepared, known.placed = {n for n, p in job.parts.items() if p.prepared}, here
            if job.active and job.state != "restarting":
                for node, part in job.parts.items():
                    for number, rank in part.ranks.items():
                        made = known.ranks[number] = Incarnation(number, rank.generation, node, rank.gpus, rank.share, here)
                        made.started, made.exited = rank.started, rank.exited
        for name, known_node in state.nodes.items():
            self.nodes[name], self.up[name], self.since[name] = known_node.registration, known_node.status == "up", here

    def handlers(self) -> dict[type[ev.LogEvent], Handler]:
        """Return what to call for which events. To be called after everybody who wants to know what was true before the event."""
        return {
            ev.JobSubmitted: self._submitted, ev.ElementsQueued: self._elements, ev.GangPlaced: self._placed, ev.GangReleased: self._released,
            ev.NodePrepared: self._prepared, ev.GangRestarting: self._over, ev.GangRequeued: self._over, ev.GangFinished: self._finished,
            ev.RankRestarting: self._rank_restarting, ev.RanksStarted: self._started, ev.RanksExited: self._exited,
            ev.NodeJoined: self._joined, ev.NodeLost: self._lost, ev.QueuesDeclared: self._declared,
        }  # fmt: skip

    def _submitted(self, at: Cite, e: ev.JobSubmitted) -> None:
        self.jobs.setdefault(e.job, JobFacts(e.job, e.spec, at, e.user))

    def _elements(self, at: Cite, e: ev.ElementsQueued) -> None:
        array = self.jobs.get(e.job)
        if array is None:
            return
        for index in e.indices:
            element = element_id(e.job, index)
            self.jobs.setdefault(element, JobFacts(element, array.spec, at, array.user))

    def _placed(self, at: Cite, e: ev.GangPlaced) -> None:
        job = self.jobs.get(e.job)
        if job is None:
            return
        self._end(job, at)
        job.generation, job.placed = e.generation, at
        job.nodes = tuple(p.node for p in e.parts)
        job.prepared, job.released = set(), len(e.parts) == 1
        job.ranks = {r.rank: Incarnation(r.rank, e.generation, p.node, r.gpus, r.share, at) for p in e.parts for r in p.ranks}

    def _released(self, at: Cite, e: ev.GangReleased) -> None:
        if e.job in self.jobs:
            self.jobs[e.job].released = True

    def _prepared(self, at: Cite, e: ev.NodePrepared) -> None:
        if e.job in self.jobs:
            self.jobs[e.job].prepared.add(e.node)

    def _over(self, at: Cite, e: ev.GangRestarting | ev.GangRequeued) -> None:
        if e.job in self.jobs:
            self._end(self.jobs[e.job], at)

    def _finished(self, at: Cite, e: ev.GangFinished) -> None:
        job = self.jobs.pop(e.job, None)
        if job is not None:
            self._end(job, at)
            if self._keep_ends:
                self.grace_ms[e.job] = int(job.spec.preemption.grace_s * 1000)
        self.finished.setdefault(e.job, at)

    def _rank_restarting(self, at: Cite, e: ev.RankRestarting) -> None:
        job = self.jobs.get(e.job)
        if job is None:
            return
        job.generation = e.generation + 1
        for number in e.ranks:
            old = job.ranks.get(number)
            if old is not None:
                self._unwant(job, old, at)
                job.ranks[number] = Incarnation(number, job.generation, old.node, old.gpus, old.share, at)

    def _started(self, at: Cite, e: ev.RanksStarted) -> None:
        job = self.jobs.get(e.job)
        if job is None:
            return
        for number in e.ranks:
            if number in job.ranks:
                job.ranks[number].started = True

    def _exited(self, at: Cite, e: ev.RanksExited) -> None:
        job = self.jobs.get(e.job)
        if job is None:
            return
        for x in e.exits:
            rank = job.ranks.get(x.rank)
            if rank is not None and rank.generation == x.generation:
                rank.started = rank.exited = True

    def _joined(self, at: Cite, e: ev.NodeJoined) -> None:
        node = e.registration.node
        if not self.up.get(node):
            self.up[node], self.since[node] = True, at
        self.nodes[node] = e.registration

    def _lost(self, at: Cite, e: ev.NodeLost) -> None:
        self.up[e.node], self.since[e.node] = False, at

    def _declared(self, at: Cite, e: ev.QueuesDeclared) -> None:
        try:
            self.queues = QueueTree(Declaration(e.queues, at.index, at.at_ms, e.by, e.reason, e.topologies))
        except ValueError:
            return  # the fold says so

    def _end(self, job: JobFacts, at: Cite) -> None:
        for rank in job.ranks.values():
            self._unwant(job, rank, at)
        job.ranks = {}

    def _unwant(self, job: JobFacts, rank: Incarnation, at: Cite) -> None:
        if self._keep_ends:
            self.unwanted.setdefault((job.id, rank.rank, rank.generation), at)


