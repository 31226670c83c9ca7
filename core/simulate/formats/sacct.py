"""What Slurm's accounting prints:

    sacct --allusers --parsable2 --noconvert -o JobID,User,Partition,Submit,ElapsedRaw,TimelimitRaw,AllocTRES,State

Needed: `JobID`, `Submit` and `ElapsedRaw` (or `Elapsed`). GPUs come from `AllocTRES`, else `ReqTRES` (`gres/gpu=8`). Read as well, where there:
`User`, `Partition`, `TimelimitRaw` in minutes or `Timelimit`. Steps (`12.batch`), jobs that never ran, and jobs without GPUs are left out.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from gangline.core.simulate.formats.jobs import MOST_GPUS, MOST_S, Trace, TraceJob
from gangline.core.simulate.reading import Row, Table, open_text

_NEVER = ("", "None", "Unknown", "N/A")
_SPAN = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_GPU = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_GPU_OF_MODEL = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")


def read(path: Path) -> Trace:
    """Return the jobs of an export. Raises BadTrace."""
    with open_text(path) as file:
        there = next(file, "").strip().split("|")
    elapsed = "ElapsedRaw" if "ElapsedRaw" in there else "Elapsed"
    table = Table(path, ("JobID", "Submit", elapsed if elapsed in there else "ElapsedRaw"), delimiter="|")
    trace = Trace([])
    zero: float | None = None
    jobs: list[TraceJob] = []
    for row in table:
        name = row.string("JobID")
        if "." in name:
            continue
        submit, ran = _moment(row, "Submit"), _seconds(row, elapsed, 1)
        asked = _seconds(row, "TimelimitRaw", 60) if "TimelimitRaw" in there else _seconds(row, "Timelimit", 60)
        gpus = _gpus(row.string("AllocTRES", "")) or _gpus(row.string("ReqTRES", ""))
        zero = submit if zero is None else min(zero, submit)
        if not ran:
            trace.leave_out("never ran")
        elif not gpus:
            trace.leave_out("no GPU")
        elif gpus > MOST_GPUS:
            row.bad("AllocTRES", f"has more than {MOST_GPUS:,} GPUs")
        else:
            limited = min(ran, asked) if asked else ran
            jobs.append(TraceJob(name, submit, limited, gpus, row.string("Partition", ""), row.string("User", ""), asked))
    table.finish()
    trace.jobs = [TraceJob(j.name, j.submit_s - (zero or 0.0), j.duration_s, j.gpus, j.queue, j.user, j.asked_s) for j in jobs]
    return trace


def _moment(row: Row, name: str) -> float:
    """Return unix time; a time without a zone counts as UTC, since only differences matter."""
    text = row.string(name)
    if not text:
        return 0.0
    try:
        return float(text) if text.isdigit() else datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        row.bad(name, "must be a time as 2026-05-01T12:00:00")
        return 0.0


def _seconds(row: Row, name: str, unit: int) -> float:
    """Return a span: a number of units, or [days-][hours:]minutes:seconds. 0 where none is given."""
    text = row.string(name, "")
    if text in _NEVER or text.upper() in ("UNLIMITED", "PARTITION_LIMIT"):
        return 0.0
    if text.isdigit():
        return row.number(name, 0, MOST_S / unit) * unit
    match = _SPAN.fullmatch(text)
    if match is None:
        row.bad(name, "must be a number, or a time as 1-02:03:04")
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return days * 86_400.0 + hours * 3_600 + minutes * 60 + seconds


def _gpus(resources: str) -> int:
    """Return the GPUs of a TRES list: the total if it is there, else those by model."""
    total = _GPU.search(resources)
    return int(total[1]) if total else sum(int(count) for count in _GPU_OF_MODEL.findall(resources))
