"""The Standard Workload Format of the Parallel Workloads Archive (Feitelson et al.): 18 fields a line, -1 unknown, comments after a semicolon.

Fields used, counted from 1: 1 job, 2 submit, 4 run time, 5 processors used, 8 processors asked, 9 time asked, 12 user, 15 queue. Processors
stand for GPUs. `; MaxProcs:` in the header is the size of the cluster. A job that ran longer than it had asked for counts as stopped then.
"""

from __future__ import annotations

from pathlib import Path

from gangline.core.model.problems import MAX_PROBLEMS, Problem, show
from gangline.core.simulate.formats.jobs import MOST_GPUS, MOST_S, Trace, TraceJob
from gangline.core.simulate.reading import BadTrace, open_text

FIELDS = 18
_USED = {1: "job number", 2: "submit time", 4: "run time", 5: "processors used", 8: "processors asked", 9: "time asked", 12: "user", 15: "queue"}


def read(path: Path) -> Trace:
    """Return the jobs of a log. Raises BadTrace."""
    trace, problems = Trace([]), list[Problem]()
    line = 0
    with open_text(path) as file:
        try:
            for line, text in enumerate(file, 1):
                if text.lstrip().startswith(";"):
                    _header(trace, text)
                elif text.strip():
                    _job(trace, problems, line, text)
                if len(problems) >= MAX_PROBLEMS:
                    break
        except UnicodeDecodeError:
            problems.append(Problem("", "Not UTF-8 after this line.", "GL-1201", line=max(1, line), column=1))
        except (OSError, EOFError) as error:
            problems.append(Problem("", f"Cannot be read further: {error}.", "GL-1201", line=max(1, line), column=1))
    if problems:
        raise BadTrace(problems[:MAX_PROBLEMS], str(path))
    return trace


def _header(trace: Trace, text: str) -> None:
    name, _, value = text.lstrip("; \t").partition(":")
    if name.strip().lower() in ("maxprocs", "maxnodes") and value.split()[:1] and value.split()[0].isdigit():
        trace.gpus = max(trace.gpus, int(value.split()[0]))


def _job(trace: Trace, problems: list[Problem], line: int, text: str) -> None:
    words = text.split()
    if len(words) != FIELDS:
        problems.append(Problem("", f"{len(words)} fields, where a line has {FIELDS}.", "GL-1203", line=line, column=1))
        return
    found: dict[int, float] = {}
    at = 0
    for number, word in enumerate(words, 1):
        at = text.index(word, at)
        if number in _USED:
            value = _number(word)
            if value is None or not -1 <= value <= MOST_S:
                said = f"Field {number}, {_USED[number]}: {show(word)} must be a number from -1 to {MOST_S:,.0f}."
                problems.append(Problem("", said, "GL-1204", line=line, column=at + 1))
                return
            found[number] = value
        at += len(word)
    processors = int(found[5] if found[5] > 0 else found[8])
    asked = max(found[9], 0.0)
    ran = min(found[4], asked) if asked else found[4]
    if processors <= 0 or processors > MOST_GPUS:
        trace.leave_out("no processors")
    elif ran <= 0:
        trace.leave_out("no run time")
    elif found[2] < 0:
        trace.leave_out("no submit time")
    else:
        queue, user = (f"{found[n]:.0f}" if found[n] >= 0 else "" for n in (15, 12))
        trace.jobs.append(TraceJob(words[0], found[2], ran, processors, queue and f"q{queue}", user and f"u{user}", asked))


def _number(word: str) -> float | None:
    try:
        found = float(word)
    except ValueError:
        return None
    return found if found == found else None
