"""Exit codes. They are an interface: docs/cli.md lists them, and each has a test."""

from __future__ import annotations

DONE = 0
INTERNAL = 1
USAGE = 2
JOB_FAILED = 3
IMPOSSIBLE = 4
PENDING = 5
REFUSED = 6
NOT_FOUND = 7
CONFLICT = 8
UNREACHABLE = 9
TIMED_OUT = 124
INTERRUPTED = 130

MEANINGS = {
    DONE: "done; for a job that was waited for: it succeeded",
    INTERNAL: "error inside of gangline",
    USAGE: "usage: wrong options, or a job file with problems",
    JOB_FAILED: "the job failed or was stopped (with --propagate: the job's own exit code)",
    IMPOSSIBLE: "impossible as asked: no state of this cluster could run it",
    PENDING: "still waiting in the queue when --timeout ended",
    REFUSED: "refused: authentication, quota, rate or policy",
    NOT_FOUND: "no such job, node, log or index",
    CONFLICT: "conflict: the name is in use, or the key was used for something else",
    UNREACHABLE: "no scheduler can be reached, or none leads",
    TIMED_OUT: "--timeout ended first",
    INTERRUPTED: "interrupted by Ctrl-C; the job goes on",
}


class Exit(Exception):
    """Ends the command with this code, after everything was said."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def of_status(status: int, code: str) -> int:
    """Return the exit code for an answer that is an error."""
    if code in ("impossible", "exceeds_cluster"):
        return IMPOSSIBLE
    if code == "ambiguous" or status in (400, 405, 413, 415, 416):
        return USAGE
    if code == "queue_drains" or status in (401, 403, 421, 429):
        return REFUSED
    if status in (404, 410):
        return NOT_FOUND
    if status in (409, 412, 422, 428):
        return CONFLICT
    return UNREACHABLE if status in (502, 503, 504) else INTERNAL
