"""Our own log, so that a cluster's history is a trace: segments of the archive (`<first>-<last>.<digest>.frames`, core/store/archive.py).

A job that was submitted and has ended in the segment counts, with the time that it ran in all its generations. Elements of arrays are jobs. Jobs
of several roles count with all of their GPUs.
"""

from __future__ import annotations

from pathlib import Path

from gangline.core.model import events as ev
from gangline.core.model.arrays import split_element
from gangline.core.model.codec import BadFrame, decode_frame
from gangline.core.model.gpushares import GPU
from gangline.core.model.problems import Problem
from gangline.core.model.roles import asked
from gangline.core.model.spec import JobSpec
from gangline.core.simulate.formats.jobs import Trace, TraceJob
from gangline.core.simulate.reading import BadTrace
from gangline.core.store.archive import Archive, ArchiveError


class _Life:
    """What is known of one job."""

    __slots__ = ("ran_ms", "since_ms", "spec", "submit_ms", "user")

    def __init__(self, spec: JobSpec, user: str, submit_ms: int) -> None:
        self.spec, self.user, self.submit_ms = spec, user, submit_ms
        self.since_ms = self.ran_ms = 0

    def stops(self, at_ms: int) -> None:
        """A generation ends."""
        if self.since_ms:
            self.ran_ms += at_ms - self.since_ms
            self.since_ms = 0


def read(path: Path) -> Trace:
    """Return the jobs of a segment. Raises BadTrace; its "line" is the index of the log entry."""
    archive = Archive(path.parent)
    segment = next((s for s in archive.segments() if s.path.name == path.name), None)
    if segment is None:
        raise BadTrace([Problem("", "Not named as a segment of an archive: <first>-<last>.<digest>.frames.", "GL-1201")], str(path))
    trace, known, index = Trace([]), dict[str, _Life](), segment.first
    try:
        for index, data in archive.read(segment.first, segment.last):
            frame = decode_frame(data, index, None)
            for event in frame.events:
                _take(trace, known, event, frame.at_ms)
    except (ArchiveError, BadFrame) as error:
        raise BadTrace([Problem("", f"Cannot be read: {error}.", "GL-1201", line=index, column=1)], str(path)) from error
    for _ in known:
        trace.leave_out("has not ended")
    zero = min((job.submit_s for job in trace.jobs), default=0.0)
    trace.jobs = [TraceJob(j.name, j.submit_s - zero, j.duration_s, j.gpus, j.queue, j.user, j.asked_s) for j in trace.jobs]
    return trace


def _take(trace: Trace, known: dict[str, _Life], event: ev.LogEvent, at_ms: int) -> None:
    if isinstance(event, ev.JobSubmitted):
        known[event.job] = _Life(event.spec, event.user, at_ms)
        return
    job_id = getattr(event, "job", "")
    life = known.get(job_id)
    if life is None and (split := split_element(job_id)) is not None and split[0] in known:
        array = known[split[0]]
        life = known[job_id] = _Life(array.spec, array.user, array.submit_ms)
    if life is None:
        if isinstance(event, ev.GangFinished):
            trace.leave_out("was submitted earlier")
    elif isinstance(event, ev.RanksStarted):
        life.since_ms = life.since_ms or at_ms
    elif isinstance(event, ev.GangRestarting | ev.GangRequeued | ev.GangPlaced):
        life.stops(at_ms)
    elif isinstance(event, ev.GangFinished):
        life.stops(at_ms)
        del known[job_id]
        if life.spec.array is not None and split_element(job_id) is None:
            return
        gpus = -(-asked(life.spec).gpus_milli // GPU)
        if not gpus or not life.ran_ms:
            trace.leave_out("never ran" if gpus else "no GPU")
        else:
            job = TraceJob(
                job_id, life.submit_ms / 1000, life.ran_ms / 1000, gpus, life.spec.queue, life.user, life.spec.time_limit_s
            )  # fmt: skip
            trace.jobs.append(job)
