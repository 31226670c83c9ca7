"""S9: no queue is filled above its limit, nor above its quota by what cannot be preempted. Needs entries alone.

A job is charged for its placement from the moment it is placed until it gives it back. What fills a queue is a placement that makes its charge
grow: a queue that is declared smaller than what runs in it is not filled by that, and neither is one whose gang restarts where it is. What
preemptible work has beyond the quota is borrowed: no violation, and noted.
"""

from __future__ import annotations

from typing import NamedTuple

from gangline.chaos.checker.facts import Facts, Handler
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model import roles
from gangline.core.model.gpushares import GpuShare, charged_milli
from gangline.core.model.queues import Amounts, amount
from gangline.core.model.state import State

#: a charge: thousandths of GPUs, thousandths of CPUs, MiB; then thousandths of GPUs by model
_FIELDS = (("GPUs", "gpus_milli"), ("CPUs", "cpus_milli"), ("memory", "memory_mib"))


class _Charge(NamedTuple):
    queue: str
    fixed: bool
    amounts: dict[str, int]
    at: Cite


class Quotas:
    """Accounts of what queues are charged, with their ancestors."""

    def __init__(self, report: Report, facts: Facts) -> None:
        self._report = report
        self._facts = facts
        self._jobs: dict[str, _Charge] = {}
        #: queue → resource or model → charge, all of it and that of work which cannot be preempted
        self._all: dict[str, dict[str, int]] = {}
        self._fixed: dict[str, dict[str, int]] = {}
        #: queue → (most that it had borrowed, of what, entry)
        self._borrowed: dict[str, tuple[int, str, Cite]] = {}

    def begin(self, state: State) -> None:
        """Start from a state."""
        here = Cite(state.index, state.at_ms)
        for job in state.jobs.values():
            if job.active and job.parts:
                ranks = [(n, r.leaf, r.gpus, r.share) for n, p in job.parts.items() for r in p.ranks.values()]
                self._set(job.id, self._charge(job.id, ranks, here))

    def handlers(self) -> dict[type[ev.LogEvent], Handler]:
        """Return what to call for which events, before the facts take them in."""
        return {ev.GangPlaced: self._placed, ev.GangRequeued: self._left, ev.GangFinished: self._left}

    def end(self) -> None:
        """Note what was borrowed."""
        for queue, (most, resource, at) in sorted(self._borrowed.items()):
            what = f"queue {queue} has had up to {amount(resource, most)} beyond its quota, borrowed by work that can be preempted"
            self._report.notes.append(f"S9: {what} (entry {at.index})")

    def _placed(self, at: Cite, e: ev.GangPlaced) -> None:
        job = self._facts.jobs.get(e.job)
        if job is None or not self._facts.queues.declared:
            return
        numbers = sum(len(p.ranks) for p in e.parts)
        leaf_of = roles.leaf_of_ranks(roles.placed(job.spec, e.role_sizes, numbers))
        if len(leaf_of) != numbers:
            return  # S5 says so
        try:
            charge = self._charge(e.job, [(p.node, leaf_of[r.rank], r.gpus, r.share) for p in e.parts for r in p.ranks], at)
        except IndexError:
            return  # S5 says so
        before = self._jobs.get(e.job)
        self._set(e.job, charge)
        self._bounds(e.job, charge, before)

    def _left(self, at: Cite, e: ev.GangRequeued | ev.GangFinished) -> None:
        self._set(e.job, None)

    def _charge(self, job_id: str, ranks: list[tuple[str, int, tuple[int, ...], GpuShare | None]], at: Cite) -> _Charge:
        spec = self._facts.jobs[job_id].spec
        leaves = roles.leaves(spec)
        amounts = {"GPUs": 0, "CPUs": 0, "memory": 0}
        for node, leaf, gpus, share in ranks:
            milli = charged_milli(gpus, share)
            amounts["GPUs"] += milli
            amounts["CPUs"] += leaves[leaf].resources.cpus_milli
            amounts["memory"] += leaves[leaf].resources.memory_mib
            for model in self._models(node, gpus):
                amounts[model] = amounts.get(model, 0) + milli
        return _Charge(self._facts.queues.leaf_of(spec.queue), not spec.preemptible, amounts, at)

    def _models(self, node: str, gpus: tuple[int, ...]) -> set[str]:
        registration = self._facts.nodes.get(node)
        return {gpu.model for gpu in registration.gpus if gpu.index in gpus} if registration is not None else set()

    def _set(self, job: str, charge: _Charge | None) -> None:
        old = self._jobs.pop(job, None)
        if charge is not None:
            self._jobs[job] = charge
        for each, sign in ((old, -1), (charge, 1)):
            if each is None:
                continue
            for path in _lineage(each.queue):
                for into in (self._all, self._fixed) if each.fixed else (self._all,):
                    held = into.setdefault(path, {})
                    for what, value in each.amounts.items():
                        held[what] = held.get(what, 0) + sign * value

    def _bounds(self, job: str, charge: _Charge, before: _Charge | None) -> None:
        specs = self._facts.queues.specs
        old = before.amounts if before is not None else {}
        grown = {what: value for what, value in charge.amounts.items() if value > old.get(what, 0)}
        for path in _lineage(charge.queue):
            queue = specs.get(path)
            if queue is None:
                continue
            self._report.checked["S9"] += 1
            for what in grown:
                has = self._all[path][what]
                limit, quota = _bound(queue.limit, what), _bound(queue.quota, what)
                if limit is not None and has > limit:
                    self._say(f"{job} fills queue {path} to {amount(what, has)}, above its limit of {amount(what, limit)}", path, charge)
                fixed = self._fixed.get(path, {}).get(what, 0)
                if quota is not None and charge.fixed and fixed > quota:
                    filled = f"fills queue {path} to {amount(what, fixed)}, above its quota of {amount(what, quota)}"
                    self._say(f"{job}, which cannot be preempted, {filled}", path, charge)
                elif quota is not None and has > quota and has - quota > self._borrowed.get(path, (0, "", charge.at))[0] and what == "GPUs":
                    self._borrowed[path] = (has - quota, what, charge.at)

    def _say(self, what: str, path: str, charge: _Charge) -> None:
        others = [c.at for c in self._jobs.values() if c is not charge and path in _lineage(c.queue)]
        declared = Cite(self._facts.queues.index, 0)
        self._report.add("S9", what, declared, *others[-3:], charge.at)


def _lineage(path: str) -> list[str]:
    """The queue and its ancestors."""
    found = [path]
    while "/" in path:
        path = path.rpartition("/")[0]
        found.append(path)
    return found


def _bound(amounts: Amounts, what: str) -> int | None:
    for name, field in _FIELDS:
        if what == name:
            value: int | None = getattr(amounts, field)
            return value
    return amounts.models.get(what)
