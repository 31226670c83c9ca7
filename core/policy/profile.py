"""The availability profile: when what is held now becomes free. Estimates, reservations and backfill all go by it.

A placed gang ends

1. at its notice's deadline, when it was asked to leave;
2. at its time limit;
3. when jobs like it have ended (core/model/runtimes.py), if it has not run longer than that already;

whatever comes first. When none of these says anything, nobody knows.
"""

from __future__ import annotations

from gangline.core.model.runtimes import expected_ms
from gangline.core.model.state import Job, State
from gangline.core.policy.capacity import ends_ms


class Profile:
    """Ends of gangs as they are expected at one time. Reads the state, changes nothing."""

    def __init__(self, state: State, now_ms: int) -> None:
        self.state = state
        self.now_ms = now_ms
        #: some end that was asked for is known from others only
        self.learned = False
        self._ends: dict[str, int | None] = {}

    def end(self, job_id: str) -> int | None:
        """Return when a placed gang ends and has gone, None if nothing says so."""
        if job_id not in self._ends:
            self._ends[job_id] = self._end(self.state.jobs[job_id])
        return self._ends[job_id]

    def _end(self, job: Job) -> int | None:
        hard = ends_ms(job, self.now_ms)
        known = [hard] if hard is not None else []
        expected = expected_ms(self.state.runtimes, job)
        if expected is not None:
            learned = (job.running_since_ms or self.now_ms) - job.ran_ms + expected
            if learned > self.now_ms and (hard is None or learned < hard):
                self.learned = True
                known.append(learned)
        return min(known, default=None)

    def end_if_started(self, job: Job, *, learned: bool) -> int | None:
        """Return when a waiting job would end if it were placed now; `learned`: what jobs like it say counts as well."""
        lasts_ms = self.lasts_ms(job, learned=learned)
        return None if lasts_ms is None else self.now_ms + lasts_ms

    def lasts_ms(self, job: Job, *, learned: bool) -> int | None:
        """Return how long a waiting job would run from its next start on."""
        known = [int(job.spec.time_limit_s * 1000) - job.ran_ms] if job.spec.time_limit_s else []
        expected = expected_ms(self.state.runtimes, job) if learned else None
        if expected is not None and expected > job.ran_ms:
            known.append(expected - job.ran_ms)
        return min(known, default=None)

    def in_order(self) -> list[tuple[int | None, str]]:
        """Return (end, job) of all placed gangs: known ends first, by time; then the others, who has run longest first."""
        found = [(self.end(job), job) for job in self.state.running]
        jobs = self.state.jobs
        return sorted(found, key=lambda e: (e[0] is None, e[0] or 0, jobs[e[1]].placed_at_ms, jobs[e[1]].number))

