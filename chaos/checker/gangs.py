"""S4, S5: no GPU is given twice, and a gang is placed whole and starts together. Needs entries alone; with agents' records see lives.py.

A rank occupies its GPUs from its placement until the log has evidence that nothing of it can be left: its exit, the word of its node, or the
loss of a node whose ranks are known to be dead. That is told from the events themselves, and by the uuids of GPUs, not by their indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from gangline.chaos.checker.facts import Facts, Handler, Incarnation, JobFacts
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model import roles
from gangline.core.model.gpushares import GpuShare, GpuUse, uses_of
from gangline.core.model.state import State

#: (job, generation, rank): who occupies
Owner = tuple[str, int, int]


class _Claim:
    """What one rank occupies of one node."""

    __slots__ = ("at", "gpus", "share", "uuids")

    def __init__(self, gpus: tuple[int, ...], uuids: tuple[str, ...], share: GpuShare | None, at: Cite) -> None:
        self.gpus, self.uuids, self.share, self.at = gpus, uuids, share, at


class Gangs:
    """Accounts of who occupies which GPU, by evidence."""

    def __init__(self, report: Report, facts: Facts) -> None:
        self._report = report
        self._facts = facts
        #: node → job → owner → what it occupies there
        self._on: dict[str, dict[str, dict[Owner, _Claim]]] = {}
        #: uuid → owners
        self._owners: dict[str, dict[Owner, _Claim]] = {}
        #: job → nodes where it occupies anything
        self._where: dict[str, set[str]] = {}
        #: job → what is kept for its next size
        self._pending: dict[str, list[tuple[str, Owner]]] = {}
        #: uuid → node that has it
        self._home: dict[str, str] = {}
        #: uuid → its memory in MiB
        self._memory: dict[str, int] = {}

    def begin(self, state: State) -> None:
        """Start from a state."""
        here = Cite(state.index, state.at_ms)
        for node in state.nodes.values():
            for gpu in node.registration.gpus:
                self._home[gpu.uuid], self._memory[gpu.uuid] = node.id, gpu.memory_mib
        for job in state.jobs.values():
            for node_id, part in job.parts.items():
                if node_id in job.held_nodes:
                    for number, rank in part.ranks.items():
                        if not rank.exited:
                            self._claim(node_id, (job.id, rank.generation, number), rank.gpus, rank.share, here, False)

    def handlers(self) -> dict[type[ev.LogEvent], Handler]:
        """Return what to call for which events, before the facts take them in."""
        return {
            ev.GangPlaced: self._placed, ev.GangResizing: self._resizing, ev.GangRestarting: self._drop_pending, ev.RankRestarting: self._again,
            ev.GangRequeued: self._left, ev.GangFinished: self._left, ev.GangPreempting: self._drop_pending,
            ev.NodePrepared: self._node_prepared, ev.RanksStarted: self._started, ev.RanksExited: self._exited,
            ev.PartReleased: self._part_released, ev.GangReleased: self._released, ev.NodeLost: self._lost,
            ev.NodeAdministered: self._administered, ev.NodeJoined: self._joined,
        }  # fmt: skip

    # ---------------------------------------------------------------- S5

    def _whole(self, at: Cite, e: ev.GangPlaced | ev.GangResizing) -> None:
        self._report.checked["S5"] += 1
        job = self._facts.jobs.get(e.job)
        ranks = sorted(r.rank for p in e.parts for r in p.ranks)
        if ranks != list(range(len(ranks))) or not ranks:
            self._report.add("S5", f"{e.job} is placed with the ranks {ranks}, not with 0 to n - 1", at)
            return
        if job is None:
            return
        wrong = roles.wrong_sizes(job.spec, roles.placed(job.spec, e.role_sizes, len(ranks)))
        if not wrong and e.role_sizes and sum(e.role_sizes) != len(ranks):
            wrong = f"{len(ranks)} ranks, and its roles say {sum(e.role_sizes)}"
        if wrong:
            self._report.add("S5", f"a part of the gang {e.job} is placed: {wrong}", job.submitted, at)

    def _released(self, at: Cite, e: ev.GangReleased) -> None:
        job = self._facts.jobs.get(e.job)
        self._report.checked["S5"] += 1
        if job is None or job.placed is None:
            return
        if missing := [n for n in job.nodes if n not in job.prepared]:
            self._report.add("S5", f"{e.job} starts while {', '.join(missing)} have not prepared", job.placed, at)

    def _starts_together(self, at: Cite, e: ev.RanksStarted) -> None:
        job = self._facts.jobs.get(e.job)
        self._report.checked["S5"] += 1
        if job is None or job.placed is None:
            return
        if not job.released:
            what = f"ranks {list(e.ranks)} of {e.job} run before the gang was released on its {len(job.nodes)} nodes"
            self._report.add("S5", what, job.placed, at)
        if strangers := [n for n in e.ranks if n not in job.ranks or job.ranks[n].node != e.node]:
            self._report.add("S5", f"ranks {strangers} of {e.job} run on {e.node}, where they are not placed", job.placed, at)

    # ---------------------------------------------------------------- S4: taking

    def _placed(self, at: Cite, e: ev.GangPlaced) -> None:
        self._whole(at, e)
        self._drop_pending(at, e)
        for part in e.parts:
            for r in part.ranks:
                self._take(part.node, (e.job, e.generation, r.rank), r, at, False)

    def _resizing(self, at: Cite, e: ev.GangResizing) -> None:
        self._whole(at, e)
        self._drop_pending(at, e)
        for part in e.parts:
            for r in part.ranks:
                self._take(part.node, (e.job, e.generation + 1, r.rank), r, at, True)

    def _again(self, at: Cite, e: ev.RankRestarting) -> None:
        job = self._facts.jobs.get(e.job)
        if job is None:
            return
        for number in e.ranks:
            rank = job.ranks.get(number)
            if rank is not None:
                placed = ev.PlacedRank(number, rank.gpus, rank.share)
                self._take(rank.node, (e.job, e.generation + 1, number), placed, at, False)

    def _take(self, node: str, owner: Owner, r: ev.PlacedRank, at: Cite, pending: bool) -> None:
        self._report.checked["S4"] += 1
        self._check_known(node, owner, r, at)
        claim = self._claim(node, owner, r.gpus, r.share, at, pending)
        for gpu, uuid in zip(r.gpus, claim.uuids, strict=True):
            others = {o: c for o, c in self._owners[uuid].items() if o != owner and (o[0] != owner[0] or o[1] == owner[1])}
            if others and (problem := self._problem(gpu, uuid, owner, claim, others)):
                first = next(iter(others))
                who = f"rank {first[2]} of {first[0]}, generation {first[1]}"
                what = f"GPU {uuid} ({gpu} of {node}) is given to rank {owner[2]} of {owner[0]} and to {who}: it {problem}"
                self._report.add("S4", what, *[c.at for c in others.values()][:3], at)

    def _check_known(self, node: str, owner: Owner, r: ev.PlacedRank, at: Cite) -> None:
        registration = self._facts.nodes.get(node)
        known = {gpu.index for gpu in registration.gpus} if registration is not None else set()
        if unknown := [g for g in r.gpus if g not in known]:
            self._report.add("S4", f"rank {owner[2]} of {owner[0]} is given GPUs {unknown} of {node}, which it does not have", at)

    def _problem(self, gpu: int, uuid: str, owner: Owner, claim: _Claim, others: dict[Owner, _Claim]) -> str:
        """Why they cannot all have a GPU, "" when they can."""
        if claim.share is None or any(c.share is None for c in others.values()):
            return "is given whole"
        # Of one other gang, what several generations have may overlap: the younger starts when the older is gone. Their newest counts.
        newest = {o[0]: max(p[1] for p in others if p[0] == o[0]) for o in others}
        claims = [claim, *(c for o, c in others.items() if newest[o[0]] == o[1])]
        uses = [use for c in claims for use in uses_of(c.gpus, c.share) if use.gpu == c.gpus[c.uuids.index(uuid)]]
        together = reduce(GpuUse.plus, [GpuUse(gpu, u.milli, u.memory_mib, u.mig, u.charged) for u in uses])
        return together.problem(self._memory.get(uuid, 0))

    def _claim(self, node: str, owner: Owner, gpus: tuple[int, ...], share: GpuShare | None, at: Cite, pending: bool) -> _Claim:
        registration = self._facts.nodes.get(node)
        names = {gpu.index: gpu.uuid for gpu in registration.gpus} if registration is not None else {}
        claim = _Claim(gpus, tuple(names.get(g) or f"{node}/{g}" for g in gpus), share, at)
        self._on.setdefault(node, {}).setdefault(owner[0], {})[owner] = claim
        self._where.setdefault(owner[0], set()).add(node)
        for uuid in claim.uuids:
            self._owners.setdefault(uuid, {})[owner] = claim
        if pending:
            self._pending.setdefault(owner[0], []).append((node, owner))
        return claim

    # ---------------------------------------------------------------- S4: evidence of ends

    def _free(self, node: str, job: str, generations: range | None = None, only: Owner | None = None) -> None:
        claims = self._on.get(node, {}).get(job)
        if claims is None:
            return
        for owner in [only] if only is not None else [o for o in claims if generations is None or o[1] in generations]:
            claim = claims.pop(owner, None)
            for uuid in claim.uuids if claim is not None else ():
                self._owners[uuid].pop(owner, None)
                if not self._owners[uuid]:
                    del self._owners[uuid]
        if not claims:
            del self._on[node][job]
            self._where[job].discard(node)
            if not self._where[job]:
                del self._where[job]

    def _drop_pending(
        self, at: Cite, e: ev.GangPlaced | ev.GangResizing | ev.GangRestarting | ev.GangPreempting | ev.GangRequeued | ev.GangFinished
    ) -> None:
        """Places for a next size are given up, or become those of the next placement: nothing has run on them."""
        for node, owner in self._pending.pop(e.job, ()):
            self._free(node, e.job, only=owner)

    def _left(self, at: Cite, e: ev.GangRequeued | ev.GangFinished) -> None:
        """It gives its nodes back; those that are lost, and will not say that it is gone, are not waited for."""
        self._drop_pending(at, e)
        for node in [n for n in self._where.get(e.job, ()) if not self._facts.up.get(n)]:
            self._free(node, e.job)

    def _node_prepared(self, at: Cite, e: ev.NodePrepared) -> None:
        self._free(e.node, e.job, range(e.generation))

    def _started(self, at: Cite, e: ev.RanksStarted) -> None:
        self._starts_together(at, e)
        job = self._facts.jobs.get(e.job)
        if job is not None:
            self._begun(job, e.node, [job.ranks[n] for n in e.ranks if n in job.ranks])

    def _begun(self, job: JobFacts, node: str, ranks: Sequence[Incarnation]) -> None:
        """A rank starts when what its gang had there before is gone."""
        older = min((r.generation for r in ranks), default=0)
        placed = min((r.generation for r in job.ranks.values() if r.node == node), default=older)
        self._free(node, job.id, range(min(older, placed)))

    def _exited(self, at: Cite, e: ev.RanksExited) -> None:
        job = self._facts.jobs.get(e.job)
        if job is not None:  # of a short life, nobody may have told the start
            generations = {x.rank: x.generation for x in e.exits}
            self._begun(job, e.node, [r for n, r in job.ranks.items() if r.node == e.node and generations.get(n) == r.generation])
        for x in e.exits:
            self._free(e.node, e.job, only=(e.job, x.generation, x.rank))

    def _part_released(self, at: Cite, e: ev.PartReleased) -> None:
        self._free(e.node, e.job)

    def _lost(self, at: Cite, e: ev.NodeLost) -> None:
        for job in list(self._on.get(e.node, {})):
            known = self._facts.jobs.get(job)
            if e.proven or known is None or known.spec.on_disconnect == "stop":
                self._free(e.node, job)

    def _administered(self, at: Cite, e: ev.NodeAdministered) -> None:
        if e.action == "confirm_dead":
            for job in list(self._on.get(e.node, {})):
                self._free(e.node, job)

    def _joined(self, at: Cite, e: ev.NodeJoined) -> None:
        reg = e.registration
        for gpu in reg.gpus:
            self._report.checked["S4"] += 1
            home = self._home.get(gpu.uuid)
            if home is not None and home != reg.node and self._facts.up.get(home):
                here = self._facts.nodes.get(home)
                if here is not None and any(g.uuid == gpu.uuid for g in here.gpus):
                    self._report.add("S4", f"GPU {gpu.uuid} is on {home} and on {reg.node} at once", self._facts.since[home], at)
            self._home[gpu.uuid], self._memory[gpu.uuid] = reg.node, gpu.memory_mib
