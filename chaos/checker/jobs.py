"""S8, S10: what has ended stays ended; restarts stay within the budget and wait as long as they must. Needs entries alone."""

from __future__ import annotations

from gangline.chaos.checker.facts import Facts, Handler
from gangline.chaos.checker.report import Cite, Report
from gangline.core.model import events as ev
from gangline.core.model.state import State

#: a generation that ran so long is healthy: the next failure is the first in a row again (RELIABILITY, row 43)
HEALTHY_MS = 600_000
#: a placement may come so much before the end of a delay: none of the clocks is finer
_ROUNDING_MS = 1

#: what may still be said of a job that has ended: that its nodes let go of it
_AFTERWARDS = (ev.PartReleased,)
#: events that tell of a job
_OF_JOBS = (
    ev.JobSubmitted, ev.JobStopRequested, ev.JobHeld, ev.JobReleased, ev.ElementsQueued, ev.GangPlaced, ev.GangReserved, ev.GangReleased,
    ev.GangRestarting, ev.RankRestarting, ev.GangPreempting, ev.GangResizing, ev.GangRequeued, ev.GangFinished, ev.NodePrepared,
    ev.PrepareFailed, ev.RanksStarted, ev.RanksExited, ev.PartReleased, ev.ProgressReported, ev.CheckpointReported, ev.StopAcknowledged,
    ev.RankSlow,
)  # fmt: skip


class _Row:
    """The failures of one job."""

    __slots__ = ("failures", "in_row", "not_before", "running_since", "waiting")

    def __init__(self) -> None:
        #: those of the application that count, oldest first
        self.failures: list[Cite] = []
        self.in_row = 0
        #: the entry that asked for a delay, and until when
        self.not_before: tuple[Cite, int] | None = None
        self.running_since = 0
        #: ranks of the current placement that have not started
        self.waiting: set[int] = set()


class Jobs:
    """Accounts of ends and of failures."""

    def __init__(self, report: Report, facts: Facts) -> None:
        self._report = report
        self._facts = facts
        self._rows: dict[str, _Row] = {}

    def begin(self, state: State) -> None:
        """Start from a state: failures before it are taken from there."""
        here = Cite(state.index, state.at_ms)
        for job in state.jobs.values():
            if job.state != "finished":
                row = self._rows[job.id] = _Row()
                row.failures = [Cite(state.index, at_ms) for at_ms in job.failures_ms]
                row.in_row, row.running_since = job.failures_in_row, job.running_since_ms
                row.waiting = {n for p in job.parts.values() for n, r in p.ranks.items() if not r.started}
                row.not_before = (here, job.not_before_ms) if job.not_before_ms else None

    def handlers(self) -> list[tuple[type[ev.LogEvent], Handler]]:
        """Return what to call for which events, before the facts take them in."""
        return [
            *((kind, self._of_job) for kind in _OF_JOBS), (ev.GangsDeferred, self._deferred),
            (ev.GangRestarting, self._failed), (ev.RankRestarting, self._failed), (ev.GangRequeued, self._requeued),
            (ev.GangResizing, self._resizing), (ev.GangPlaced, self._placed), (ev.RanksStarted, self._started), (ev.RanksExited, self._exited),
            (ev.GangFinished, self._finished),
        ]  # fmt: skip

    # ---------------------------------------------------------------- S8

    def _of_job(self, at: Cite, e: ev.LogEvent) -> None:
        self._report.checked["S8"] += 1
        ended = self._facts.finished.get(getattr(e, "job", ""))
        if ended is not None and not isinstance(e, _AFTERWARDS):
            self._report.add("S8", f"job {getattr(e, 'job', '')} has ended at entry {ended.index}, and {e.NAME} follows", ended, at)

    def _deferred(self, at: Cite, e: ev.GangsDeferred) -> None:
        for job in e.jobs:
            self._report.checked["S8"] += 1
            ended = self._facts.finished.get(job)
            if ended is not None:
                self._report.add("S8", f"job {job} has ended at entry {ended.index}, and it is said to wait", ended, at)

    def _finished(self, at: Cite, e: ev.GangFinished) -> None:
        self._rows.pop(e.job, None)

    # ---------------------------------------------------------------- S10

    def _failed(self, at: Cite, e: ev.GangRestarting | ev.RankRestarting) -> None:
        row = self._row(e.job)
        delay_ms = self._delay_ms(e.job, row, at) if e.failure_class == "application" else 0
        if e.failure_class == "application":
            self._charge(e.job, row, at, e)
        until = e.not_before_ms if isinstance(e, ev.GangRestarting) else 0
        if isinstance(e, ev.GangRestarting):
            self._report.checked["S10"] += 1
            if until < at.at_ms + delay_ms - _ROUNDING_MS and delay_ms:
                waits = max(0, until - at.at_ms) / 1000
                what = f"{e.job} restarts {waits:g} s after failure {row.in_row} in a row, and must wait {delay_ms / 1000:g} s"
                self._report.add("S10", what, *row.failures[-2:-1], at)
            row.not_before = (at, max(until, at.at_ms + delay_ms)) if until or delay_ms else None
            row.running_since = 0
        else:
            row.waiting |= set(e.ranks)

    def _requeued(self, at: Cite, e: ev.GangRequeued) -> None:
        row = self._row(e.job)
        self._forgive(row, e.forgive)
        if e.failure_class == "application":
            self._charge(e.job, row, at, e)
        row.not_before = (at, e.not_before_ms) if e.not_before_ms else row.not_before
        row.running_since = 0

    def _resizing(self, at: Cite, e: ev.GangResizing) -> None:
        self._forgive(self._row(e.job), e.forgive)

    def _placed(self, at: Cite, e: ev.GangPlaced) -> None:
        row = self._row(e.job)
        self._report.checked["S10"] += 1
        if row.not_before is not None and at.at_ms < row.not_before[1] - _ROUNDING_MS:
            early = (row.not_before[1] - at.at_ms) / 1000
            self._report.add("S10", f"{e.job} is placed {early:g} s before the end of its delay", row.not_before[0], at)
        row.not_before = None
        row.in_row = self._in_row(row, at)
        row.running_since = 0
        row.waiting = {r.rank for p in e.parts for r in p.ranks}

    def _started(self, at: Cite, e: ev.RanksStarted) -> None:
        self._run(e.job, set(e.ranks), at)

    def _exited(self, at: Cite, e: ev.RanksExited) -> None:
        self._run(e.job, {x.rank for x in e.exits}, at)

    def _run(self, job: str, ranks: set[int], at: Cite) -> None:
        row = self._row(job)
        row.waiting -= ranks
        if not row.waiting and not row.running_since:
            row.running_since = at.at_ms

    def _charge(self, job: str, row: _Row, at: Cite, e: ev.LogEvent) -> None:
        """One more failure of the application: is there a restart left for it?"""
        self._report.checked["S10"] += 1
        row.in_row = self._in_row(row, at) + 1
        known = self._facts.jobs.get(job)
        if known is None:
            return
        rules = known.spec.restart
        row.failures = [*(f for f in row.failures if f.at_ms > at.at_ms - rules.window_s * 1000), at]
        if len(row.failures) > rules.max_restarts:
            what = f"{job} is restarted {len(row.failures)} times within {rules.window_s:g} s, and may be {rules.max_restarts} times"
            self._report.add("S10", what, *row.failures[-4:])
        elif rules.on_rank_failure == "never":
            self._report.add("S10", f"{job} is restarted, and says on_rank_failure: never", known.submitted, at)

    def _forgive(self, row: _Row, forgive: bool) -> None:
        if forgive and row.failures:
            row.failures.pop()
            row.in_row = max(0, row.in_row - 1)
            row.not_before = None  # the delay was for a failure that was none

    def _in_row(self, row: _Row, at: Cite) -> int:
        healthy = row.running_since and at.at_ms - row.running_since >= HEALTHY_MS
        return 0 if healthy else row.in_row

    def _delay_ms(self, job: str, row: _Row, at: Cite) -> int:
        """The first failure in a row restarts at once, then the delay doubles from the job's first to its longest."""
        known, before = self._facts.jobs.get(job), self._in_row(row, at)
        if known is None or before == 0:
            return 0
        rules = known.spec.restart
        return int(min(rules.backoff_initial_s * 2 ** min(before - 1, 40), rules.backoff_max_s) * 1000)

    def _row(self, job: str) -> _Row:
        found = self._rows.get(job)
        if found is None:
            found = self._rows[job] = _Row()
        return found
