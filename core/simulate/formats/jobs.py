"""Traces of jobs: what arrived when, how large it was, and how long it ran. `read` tells the format by the file and has a list of all of them.

Each format becomes the same: jobs in the order of their submission, with times in seconds from the trace's own zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gangline.core.model.problems import Problem
from gangline.core.simulate.reading import BadTrace, open_text

#: more GPUs than any job has
MOST_GPUS = 1_000_000
#: 100 years
MOST_S = 3_155_760_000.0


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job. `gpus` may be processors, where the trace has no GPUs."""

    name: str
    submit_s: float
    #: on its own GPUs, without waiting
    duration_s: float
    gpus: int
    queue: str = ""
    user: str = ""
    #: the time that its user asked for; 0: not known
    asked_s: float = 0.0


@dataclass(slots=True)
class Trace:
    """A whole trace. `left_out` says how many rows were no jobs for a simulation, by reason."""

    jobs: list[TraceJob]
    #: GPUs that the trace says its cluster had, 0: it says nothing
    gpus: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        """Count a row that is no job for a simulation."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def settled(self) -> Trace:
        """Return it with the jobs in order, and the first submission at 0."""
        self.jobs.sort(key=lambda job: job.submit_s)
        return self


def read(path: Path) -> Trace:
    """Return the jobs of a file. Raises BadTrace, with every problem by line and column."""
    from gangline.core.simulate.formats import jobcsv, ownlog, sacct, swf

    if path.name.endswith(".frames"):
        return ownlog.read(path).settled()
    with open_text(path) as file:
        try:
            first = next((line for line in file if line.strip()), "")
        except (UnicodeDecodeError, EOFError, OSError) as error:
            raise BadTrace([Problem("", f"Cannot be read: {type(error).__name__}.", "GL-1201", line=1, column=1)], str(path)) from error
    reader: Callable[[Path], Trace]
    if "|" in first:
        reader = sacct.read
    elif first.lstrip().startswith(";") or (len(first.split()) == swf.FIELDS and "," not in first):
        reader = swf.read
    else:
        reader = jobcsv.read
    trace = reader(path).settled()
    if not trace.jobs:
        raise BadTrace([Problem("", "There is no job in it that a simulation could run.", "GL-1203", line=1, column=1)], str(path))
    return trace
