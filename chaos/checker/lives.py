"""S6, S11, S13, and S4 once more: what ran where, by nodes' own records, against what the log wanted. Needs agents' records, or a look at nodes.

Records of one clock are compared to the moment. Those of different hosts are compared by the log first: a rank that starts on an entry after
the one that tells of the end of the other one starts after it. Only where the log does not say, wall clocks decide, with a margin.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from gangline.chaos.checker.evidence import NodeView, RankLife
from gangline.chaos.checker.facts import Facts, Handler
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model.gpushares import GpuUse, uses_of

#: how far wall clocks of two hosts may differ without anybody noticing
CLOCKS_MS = 5_000
#: what the log no longer wants is gone after this time and the grace of its job; so long may what it wants take to run
CONVERGE_MS = 60_000

_Key = tuple[str, int, int]
_FOR_EVER = float("inf")


class Lives:
    """Accounts of lives of ranks, by what their nodes have written down."""

    def __init__(self, report: Report, facts: Facts, records: Iterable[RankLife] | None, nodes: Iterable[NodeView] | None) -> None:
        self._report = report
        self._facts = facts
        self._lives = None if records is None else list(records)
        self._nodes = None if nodes is None else list(nodes)
        missing = "no records of agents"
        if self._lives is None:
            report.gap("S6", missing)
            report.gap("S13", missing)
            report.gap("S4", f"what ran on GPUs, {missing}")
        if self._lives is None:
            report.gap("S11", f"what ran when, {missing}")
        if self._nodes is None:
            report.gap("S11", "what runs at the end, no look at nodes")
        #: starts by the entry that the agent acted on
        self._at: dict[int, list[RankLife]] = {}
        for life in self._lives or ():
            if life.index:
                self._at.setdefault(life.index, []).append(life)
        #: the log says by this entry that nothing of it is left
        self._told: dict[_Key, Cite] = {}
        self._last = 0
        #: lives by job and node, and by node, which the word of a node may end: in the order of their starts, the first of them last
        self._left: dict[tuple[str, str], list[tuple[int, _Key]]] = {}
        self._on: dict[str, list[tuple[int, _Key]]] = {}
        #: wall clock of the last thing that a node has written down, or was seen at
        self._records_end: dict[str, int] = {}
        for life in sorted(self._lives or (), key=lambda x: -x.index):
            if life.index:
                started = life.index, (life.job, life.rank, life.generation)
                self._left.setdefault((life.job, life.node), []).append(started)
                self._on.setdefault(life.node, []).append(started)
            self._records_end[life.node] = max(self._records_end.get(life.node, 0), life.started_ms, life.ended_ms)
        for view in self._nodes or ():
            self._records_end[view.node] = max(self._records_end.get(view.node, 0), view.at_ms)

    @property
    def wanted(self) -> bool:
        """There is something to compare."""
        return self._lives is not None or self._nodes is not None

    def handlers(self) -> dict[type[ev.LogEvent], Handler]:
        """Return what to call for which events, before the facts take them in."""
        if self._lives is None:
            return {}
        return {ev.RanksExited: self._exited, ev.PartReleased: self._released, ev.NodePrepared: self._prepared, ev.NodeLost: self._lost}

    # ---------------------------------------------------------------- along the log

    def sealed(self, index: int, epoch: int) -> None:
        """An entry is taken in: what has been started on it must be what it wanted."""
        self._last = index
        for life in self._at.get(index, ()):
            self._started_on(life, index, epoch)

    def _started_on(self, life: RankLife, index: int, epoch: int) -> None:
        self._report.checked["S13"] += 1
        if life.epoch and life.epoch != epoch:
            what = f"{life.name} was started on entry {index} of epoch {life.epoch}, and that entry is of epoch {epoch}"
            self._report.add("S13", what, Cite(index))
        job = self._facts.jobs.get(life.job)
        rank = job.ranks.get(life.rank) if job is not None else None
        if job is None or rank is None or (rank.generation, rank.node) != (life.generation, life.node):
            ended = self._facts.finished.get(life.job) or self._facts.unwanted.get((life.job, life.rank, life.generation))
            there = (rank.placed,) if rank is not None else ()
            cites = (ended,) if ended is not None else there
            self._report.add("S13", f"{life.name} was started on entry {index}, which does not want it", *cites, Cite(index))
        elif not job.released:
            self._report.add("S13", f"{life.name} was started on entry {index}, before its gang was released", rank.placed, Cite(index))

    def _exited(self, at: Cite, e: ev.RanksExited) -> None:
        for x in e.exits:
            self._told.setdefault((e.job, x.rank, x.generation), at)

    def _released(self, at: Cite, e: ev.PartReleased) -> None:
        self._tell(self._left.get((e.job, e.node), []), at)

    def _prepared(self, at: Cite, e: ev.NodePrepared) -> None:
        # What is of an older generation was started before this one was prepared.
        self._tell(self._left.get((e.job, e.node), []), at, below=e.generation)

    def _lost(self, at: Cite, e: ev.NodeLost) -> None:
        if e.proven:
            self._tell(self._on.get(e.node, []), at)

    def _tell(self, started: list[tuple[int, _Key]], at: Cite, below: float = _FOR_EVER) -> None:
        """Nothing is left, at this entry, of what was started on earlier ones."""
        while started and started[-1][0] < at.index and started[-1][1][2] < below:
            self._told.setdefault(started.pop()[1], at)

    # ---------------------------------------------------------------- at the end

    def end(self, at_ms: int) -> None:
        """All entries are there; `at_ms` is the time of the last one."""
        if self._lives is not None:
            if late := sorted(index for index in self._at if index > self._last):
                for life in self._at[late[0]]:
                    what = f"{life.name} was started on entry {life.index}, and the log ends at {self._last}"
                    self._report.add("S13", what, Cite(self._last))
            if not self._at and self._lives:
                self._report.gap("S13", "the records do not say on which entries agents acted")
            self._one_at_a_time()
            self._devices()
            self._orphans()
        if self._nodes is not None:
            self._look()

    def _one_at_a_time(self) -> None:
        by_rank: dict[tuple[str, int], list[RankLife]] = {}
        for life in self._lives or ():
            by_rank.setdefault((life.job, life.rank), []).append(life)
        for lives in by_rank.values():
            lives.sort(key=lambda x: (x.generation, x.started_ms, x.started_s))
            self._report.checked["S6"] += len(lives)
            latest: dict[str, RankLife] = {}  # by clock, the life that lasts longest: all others end before it
            for life in lives:
                for before in latest.values():
                    self._pair(before, life)
                longest = latest.get(life.clock)
                if longest is None or _end_s(life) >= _end_s(longest):
                    latest[life.clock] = life

    def _pair(self, a: RankLife, b: RankLife) -> None:
        """Both are lives of one rank, `a` of the older generation, or of the same one."""
        if a.generation == b.generation and a.node != b.node:
            self._report.add("S6", f"{a.name} was started on {b.node} as well", *self._cites(a, b))
            return
        if a.ended == "found" or (not a.ended and a.fenced and a.node != b.node and a.clock != b.clock):
            self._report.gap("S6", "lives whose end nobody has seen")
            return
        if a.clock == b.clock:
            if _end_s(a) > b.started_s:
                until = f"until {a.ended_s:.3f}" if a.ended else "and has not ended"
                what = f"{b.name} began at {b.started_s:.3f}, and {a.name} lived from {a.started_s:.3f} {until}"
                self._report.add("S6", what, *self._cites(a, b))
            return
        told = self._told.get((a.job, a.rank, a.generation))
        if told is not None and b.index >= told.index:
            return
        end_ms = a.ended_ms if a.ended else _FOR_EVER
        if end_ms > b.started_ms + CLOCKS_MS:
            until = f"until {a.ended_ms}" if a.ended else "and has not ended"
            what = f"{b.name} began at {b.started_ms} by its wall clock, and {a.name} lived from {a.started_ms} {until}"
            self._report.add("S6", what, *self._cites(a, b))

    def _cites(self, *lives: RankLife) -> list[Cite]:
        return [Cite(life.index) for life in lives if life.index]

    def _devices(self) -> None:
        """S4 on the nodes: nothing ran on a GPU together with what has the whole of it, and shares fit."""
        by_gpu: dict[tuple[str, str, int], list[RankLife]] = {}
        for life in self._lives or ():
            for gpu in life.gpus if life.ended != "found" else ():
                by_gpu.setdefault((life.node, life.clock, gpu), []).append(life)
        for (node, _, gpu), lives in by_gpu.items():
            lives.sort(key=lambda x: x.started_s)
            beside: list[RankLife] = []
            for life in lives:
                self._report.checked["S4"] += 1
                beside = [o for o in beside if _end_s(o) > life.started_s]
                together = [*beside, life]
                if beside and (problem := self._shared(node, gpu, together)):
                    others = " and ".join(o.name for o in beside[:3])
                    self._report.add("S4", f"{life.name} began on GPU {gpu} beside {others}: it {problem}", *self._cites(*together))
                beside = together

    def _shared(self, node: str, gpu: int, lives: list[RankLife]) -> str:
        if any(life.share is None for life in lives):
            return "is given whole"
        registration = self._facts.nodes.get(node)
        memory = next((g.memory_mib for g in registration.gpus if g.index == gpu), 0) if registration is not None else 0
        return reduce(GpuUse.plus, [u for life in lives for u in uses_of(life.gpus, life.share) if u.gpu == gpu]).problem(memory)

    def _orphans(self) -> None:
        """What the log stopped wanting is gone after a while, as far as the nodes were in touch meanwhile."""
        for life in self._lives or ():
            if life.ended == "found":
                continue
            self._report.checked["S11"] += 1
            unwanted = self._facts.unwanted.get((life.job, life.rank, life.generation))
            if unwanted is None or not self._facts.up.get(life.node):
                continue
            since = max(unwanted.at_ms, self._facts.since[life.node].at_ms)
            late = (life.ended_ms if life.ended else self._records_end[life.node]) - since
            if late > CONVERGE_MS + self._grace_ms(life.job):
                until = f"ran for {late / 1000:.0f} s more" if life.ended else f"still ran {late / 1000:.0f} s later"
                self._report.add("S11", f"{life.name} was not wanted any more, and {until}", unwanted)

    def _grace_ms(self, job: str) -> int:
        known = self._facts.jobs.get(job)
        return int(known.spec.preemption.grace_s * 1000) if known is not None else self._facts.grace_ms.get(job, 30_000)

    def _look(self) -> None:
        """What runs on the nodes now is what the log wants now, but for what is on its way."""
        for view in self._nodes or ():
            self._report.checked["S11"] += 1
            if not self._facts.up.get(view.node):
                continue
            live: set[tuple[str, int, int]] = set(view.live)
            for rank in view.live:
                self._surplus(view, rank)
            for job in self._facts.jobs.values():
                if view.node in job.nodes:
                    self._absent(view, job.id, live)

    def _surplus(self, view: NodeView, rank: tuple[str, int, int]) -> None:
        name, number, generation = rank
        job = self._facts.jobs.get(name)
        wanted = job.ranks.get(number) if job is not None else None
        if wanted is not None and (wanted.generation, wanted.node) == (generation, view.node):
            return
        since = self._facts.unwanted.get(rank) or self._facts.finished.get(name)
        late = view.at_ms - max(since.at_ms if since is not None else 0, self._facts.since[view.node].at_ms)
        if late > CONVERGE_MS + self._grace_ms(name):
            called = f"rank {number} of {name}, generation {generation}"
            what = f"{called}, runs on {view.node}, and the log has not wanted it for {late / 1000:.0f} s"
            self._report.add("S11", what, *((since,) if since is not None else ()))

    def _absent(self, view: NodeView, name: str, live: set[tuple[str, int, int]]) -> None:
        job = self._facts.jobs[name]
        for number, rank in job.ranks.items():
            if rank.node != view.node or rank.exited or (name, number, rank.generation) in live:
                continue
            since = max(rank.placed.at_ms, self._facts.since[view.node].at_ms)
            if rank.started and view.at_ms - since > CONVERGE_MS:
                what = f"rank {number} of {name}, generation {rank.generation}, runs on {view.node} by the log, and nothing of it is there"
                self._report.add("S11", what, rank.placed)


def _end_s(life: RankLife) -> float:
    return life.ended_s if life.ended else _FOR_EVER
