"""S7, S12: what clients were told is what the log has. Needs the clients' history; without it, only that no key is there twice."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.chaos.checker.evidence import Operation
from gangline.chaos.checker.facts import Facts, Handler
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model.state import FINISHED_KEPT, State


class Submissions:
    """Accounts of submissions by idempotency key."""

    def __init__(self, report: Report, facts: Facts, history: Iterable[Operation] | None) -> None:
        self._report = report
        self._facts = facts
        self._history = None if history is None else list(history)
        if self._history is None:
            report.gap("S7", "what clients were told, no history of clients")
        if self._history is None or not any(o.op == "read" for o in self._history):
            report.gap("S12", "no history of clients with reads")
        #: key → submissions with it
        self._by_key: dict[str, list[Cite]] = {}
        self._jobs: dict[str, Cite] = {}
        self._ended = 0
        #: job → how many had ended when it did
        self._place: dict[str, int] = {}
        self._begun = 0

    def begin(self, state: State) -> None:
        """Start from a state: submissions before it cannot be cited."""
        self._begun = state.index
        for key, job_id in state.keys.items():
            known = state.jobs[job_id]
            event = ev.JobSubmitted(job=job_id, spec=known.spec, user=known.user, idempotency_key=key, body_digest=known.body_digest)
            self._by_key[key] = [Cite(known.submitted_index, known.submitted_at_ms, event)]
        for job in state.jobs.values():
            self._jobs[job.id] = Cite(job.submitted_index, job.submitted_at_ms)

    def handlers(self) -> dict[type[ev.LogEvent], Handler]:
        """Return what to call for which events, before the facts take them in."""
        return {ev.JobSubmitted: self._submitted, ev.GangFinished: self._finished}

    def _submitted(self, at: Cite, e: ev.JobSubmitted) -> None:
        self._report.checked["S7"] += 1
        if e.job in self._jobs:
            self._report.add("S7", f"job {e.job} is submitted twice", self._jobs[e.job], at)
        self._jobs.setdefault(e.job, at)
        if not e.idempotency_key:
            return
        before = self._by_key.setdefault(e.idempotency_key, [])
        if before and self._known(before[-1]):
            self._report.add("S7", f"the submission with key {e.idempotency_key!r} is in the log twice", before[-1], at)
        before.append(at)

    def _finished(self, at: Cite, e: ev.GangFinished) -> None:
        self._ended += 1
        self._place.setdefault(e.job, self._ended)

    def _known(self, at: Cite) -> bool:
        """Whether the schedulers still know the job, so that its key names it: they forget the oldest of those that have ended."""
        job = getattr(at.event, "job", "")
        place = self._place.get(job)
        return place is None or self._ended - place < FINISHED_KEPT

    def end(self, last: int) -> None:
        """All entries are there, up to index `last`: compare with what clients have seen."""
        if self._history is None:
            return
        submits: dict[str, list[Operation]] = {}
        for each in self._history:
            if each.op == "submit":
                submits.setdefault(each.key, []).append(each)
            else:
                self._read(each)
        for key, tries in submits.items():
            self._compare(key, tries, last)

    def _compare(self, key: str, tries: list[Operation], last: int) -> None:
        self._report.checked["S7"] += 1
        found = self._by_key.get(key, [])
        accepted = [o for o in tries if o.outcome == "ok"]
        cites = tuple(found[:3])
        jobs = [str(getattr(c.event, "job", "")) for c in found]
        for o in accepted:
            if o.job not in jobs:
                if o.index <= self._begun or o.index > last:
                    self._report.gap("S7", "submissions outside of these entries")
                    continue
                there = f"the log has {', '.join(jobs)}" if jobs else "the log has none"
                self._report.add("S7", f"submission {key!r} was accepted as job {o.job} at entry {o.index}, and {there}", *cites)
        if len(found) > 1:
            self._report.add("S7", f"one submission with key {key!r} has become {len(found)} jobs: {', '.join(jobs)}", *cites)
        if found and tries and all(o.outcome == "fail" for o in tries):
            self._report.add("S7", f"submission {key!r} was rejected, and is in the log as {', '.join(jobs)}", *cites)

    def _read(self, o: Operation) -> None:
        if o.outcome != "ok":
            return
        self._report.checked["S12"] += 1
        submitted = self._jobs.get(o.job)
        cites = (submitted,) if submitted is not None else ()
        if o.index < o.after:
            self._report.add("S12", f"a client that knew entry {o.after} was answered as of entry {o.index}", Cite(o.after), Cite(o.index))
        elif not o.found and submitted is not None and submitted.index <= max(o.index, o.after) and self._known(submitted):
            what = f"job {o.job} was submitted at entry {submitted.index}, and an answer as of entry {o.index} does not know it"
            self._report.add("S12", what, *cites)
