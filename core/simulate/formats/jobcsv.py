"""Tables of jobs, one a row, with a line of names above: as published with Muri, Tiresias, Chronus, Shockwave and others.

Needed: the time of submission (`submit_s`, `submit_time`), the duration (`duration_s`, `duration`), and GPUs (`num_gpu`, `num_gpus`, `gpus`).
Read as well, where there: a name (`job_id`, `name`), a queue (`queue`, `vc`), `user`, and the time asked for (`time_limit_s`). Seconds.
"""

from __future__ import annotations

import csv
from pathlib import Path

from gangline.core.simulate.formats.jobs import MOST_GPUS, MOST_S, Trace, TraceJob
from gangline.core.simulate.reading import Table, open_text

#: what → its names, the first is asked for where none is there
_NAMES = {
    "submit": ("submit_s", "submit_time"), "duration": ("duration_s", "duration"), "gpus": ("num_gpu", "num_gpus", "gpus"),
    "name": ("job_id", "name"), "queue": ("queue", "vc"), "user": ("user",), "asked": ("time_limit_s",),
}  # fmt: skip
_NEEDED = ("submit", "duration", "gpus")


def read(path: Path) -> Trace:
    """Return the jobs of a table. Raises BadTrace."""
    there = _header(path)
    columns = {what: next((name for name in names if name in there), names[0]) for what, names in _NAMES.items()}
    table = Table(path, [columns[what] for what in _NEEDED], [columns[what] for what in _NAMES if what not in _NEEDED])
    trace = Trace([])
    names: set[str] = set()
    for number, row in enumerate(table):
        name = row.string(columns["name"], str(number))
        if name in names:
            row.bad(columns["name"], "is there twice")
        names.add(name)
        submit, duration = row.number(columns["submit"], 0, MOST_S), row.number(columns["duration"], 0, MOST_S)
        gpus = row.integer(columns["gpus"], 0, MOST_GPUS)
        queue, user = row.string(columns["queue"], ""), row.string(columns["user"], "")
        asked = row.number(columns["asked"], 0, MOST_S, default=0.0)
        if not gpus:
            trace.leave_out("no GPU")
        elif not duration:
            trace.leave_out("no duration")
        else:
            trace.jobs.append(TraceJob(name, submit, duration, gpus, queue, user, asked))
    table.finish()
    return trace


def _header(path: Path) -> list[str]:
    with open_text(path) as file:
        return next(csv.reader(file), [])
