"""Waiting for jobs, and what they print meanwhile.

A wait cannot miss anything: it asks for the job as it is, each time at a later log index than before, and the states that end it are never left
again (finished) or leave a trace (a job that has been running has a time of its start). Logs are read by position, so an interrupted read goes
on where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.api import ApiError, Client
from gangline.core.client.output import clean
from gangline.core.client.progress import Progress
from gangline.core.model.units import format_duration

POLL_S = 0.25
IDLE_POLL_S = 1.0
#: ranks whose logs are followed together; more have to be chosen by --rank
MAX_FOLLOWED = 64
#: elements of an array that are asked for at once; no more are known of one that runs
MAX_ELEMENTS = 10_000
CHUNK_BYTES = 1 << 20
#: after the end of a job its last output may still be on the way
DRAIN_S = 2.0

Job = dict[str, Any]
_RANK_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")


def resolve(client: Client, ref: str, user: str) -> str:
    """Return what the API takes for a job as people write it: `@last` is the newest job of this user."""
    if ref != "@last":
        return ref
    rows, _ = client.jobs(1, user=user)
    if not rows:
        raise ApiError(404, {"code": "no_such_job", "detail": f"@last: {user} has no jobs"})
    return str(rows[0]["id"])


def ended(job: Job) -> bool:
    """Return whether the job is over."""
    return bool(job["state"] == "finished")


def fate(job: Job) -> str:
    """Say in one sentence how a job ended, or where it is."""
    return f"{label(job)} {end(job)}" if ended(job) else f"{label(job)} is {job['state']}"


def end(job: Job) -> str:
    """Say how a job that is over ended."""
    cause = job.get("reason") or job.get("cause") or ""
    text = str(job.get("outcome") or "finished")
    started, over = job.get("started_at_ms"), job.get("ended_at_ms")
    if started and over:
        text += f" after {format_duration(max(0, round((over - started) / 1000)))}"
    if cause and job.get("outcome") != "succeeded":
        text += f": {clean(str(cause))}"
    return text


def label(job: Job) -> str:
    """Name a job for people."""
    name = job.get("name")
    return f"{job['id']} ({clean(name)})" if name and name != job["id"] else str(job["id"])


def exit_code(job: Job, *, propagate: bool) -> int:
    """Return the exit code that a finished job means."""
    if job.get("outcome") == "succeeded":
        return exits.DONE
    code = int(job.get("exit_code") or 0)
    if propagate and code:
        return code if 0 < code < 256 else 128 + abs(code) % 128
    return exits.JOB_FAILED


def phase(job: Job) -> str:
    """Say what a job that is not over is doing, and why it does nothing."""
    text = f"{label(job)} {job['state']}"
    why = reason(job)
    return f"{text}: {why}" if why else text


def reason(job: Job) -> str:
    """Return why the job waits, "" when nobody has said."""
    deferred = job.get("deferred") or {}
    return clean(str(deferred.get("message") or job.get("reason") or ""))


def impossible(client: Client, job: Job) -> str:
    """Return why no state of the cluster as it is could run this waiting job, "" when one could."""
    deferred = job.get("deferred") or {}
    need = (deferred.get("need") or {}).get("gpus", 0)
    if job["state"] != "queued" or deferred.get("code") != "not_enough_gpus" or not need:
        return ""
    nodes = client.nodes()
    have = sum(node.get("gpus_total", 0) for node in nodes)
    if nodes and need > have:
        return f"{label(job)} cannot start: it needs {need} GPUs, and all {len(nodes)} nodes together have {have}"
    return ""


class Waiter:
    """Waits for one job. `until` is "finished", or "running" for one that has started (or is over)."""

    def __init__(self, client: Client, job: str, *, until: str = "finished", timeout_s: float = 0.0, progress: Progress | None = None) -> None:
        self._client = client
        self._ref = job
        self._until = until
        self._deadline = time.monotonic() + timeout_s if timeout_s else None
        self._progress = progress or Progress()
        self._checked_at = 0.0

    def wait(self, meanwhile: Callable[[Job], bool] | None = None) -> Job:
        """Return the job at the end of the wait. `meanwhile` is called with each state and says whether it had something to print.

        Raises Exit when the time is over (PENDING or TIMED_OUT) or the job can never run (IMPOSSIBLE).
        """
        pause = POLL_S
        while True:
            job = self._client.job(self._ref).body
            self._ref = job["id"]
            busy = meanwhile(job) if meanwhile else False
            if ended(job) or (self._until == "running" and _has_run(job)):
                self._progress.clear()
                return dict(job)
            self._check(job)
            if meanwhile is None or job["state"] != "running":  # a running job speaks for itself
                self._progress.update(phase(job))
            pause = POLL_S if busy else min(IDLE_POLL_S, pause * 1.2)
            time.sleep(pause)

    def _check(self, job: Job) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._progress.clear()
            queued = job["state"] == "queued" and not job.get("started_at_ms")
            click.echo(f"gangline: --timeout ended; {phase(job)}", err=True)
            raise exits.Exit(exits.PENDING if queued else exits.TIMED_OUT)
        if job["state"] == "queued" and now - self._checked_at > 10.0:
            self._checked_at = now
            never = impossible(self._client, job)
            if never:
                self._progress.clear()
                click.echo(f"gangline: {never}\n  it stays in the queue; to give it up: gangline stop {job['id']}", err=True)
                raise exits.Exit(exits.IMPOSSIBLE)


def _has_run(job: Job) -> bool:
    return bool(job["state"] == "running" or job.get("started_at_ms"))


class _RankLog:
    """How far one rank's log has been read."""

    __slots__ = ("colour", "generation", "missed", "offset", "partial", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.generation = 0
        self.offset = 0
        self.partial = b""
        #: the last attempt failed, and that was said
        self.missed = False
        self.colour = _RANK_COLOURS[rank % len(_RANK_COLOURS)]


#: bytes asked for to find the last lines: longer ones on average give fewer lines
_TAIL_LINE_BYTES = 1_024


class LogReader:
    """Prints the logs of some ranks of a job, each line with its rank in front when `prefix` is set."""

    def __init__(
        self, client: Client, job: str, ranks: Iterable[int], *, prefix: bool, colour: bool = False, tail: int = 0, first_generation: int = 0,
        element: str = "",
    ) -> None:  # fmt: skip
        """`element` stands in front of each line, before the rank: it says which of many jobs has printed it."""
        self._client = client
        self._job = job
        self._logs = [_RankLog(rank) for rank in ranks]
        self._prefix = prefix or bool(element)
        self._element = element
        self._colour = colour
        self._tail = tail
        #: generation that is read first, 0 for the one that runs
        self._first = first_generation
        self._pad = len(str(max((log.rank for log in self._logs), default=0)))

    def read(self, generation: int | None) -> bool:
        """Print what is new, of this generation (None: of the newest that there is); return whether there was anything."""
        found = [self._read_rank(log, generation) for log in self._logs]
        return any(found)

    def finish(self) -> None:
        """Print lines that no newline has ended."""
        for log in self._logs:
            if log.partial:
                self._write(log, log.partial + b"\n")
                log.partial = b""
        sys.stdout.flush()

    def _read_rank(self, log: _RankLog, generation: int | None) -> bool:
        if generation is None:
            return self._drain(log, None)
        found = False
        for each in range(log.generation or self._first or generation, generation + 1):
            if each != log.generation:
                log.generation, log.offset = each, 0
            found = self._drain(log, each) or found
        return found

    def _drain(self, log: _RankLog, generation: int | None) -> bool:
        found = False
        while True:
            query = {"rank": log.rank, "generation": generation, "offset": log.offset or None, "limit": CHUNK_BYTES}
            if self._tail and not log.offset:
                query = {"rank": log.rank, "generation": generation, "tail": min(self._tail * _TAIL_LINE_BYTES, CHUNK_BYTES)}
            try:
                answer = self._client.logs(self._job, query)
            except ApiError as error:
                if error.status not in (404, 416, 429, 502, 503, 504):
                    raise
                if error.status > 416 and not log.missed:
                    click.echo(f"gangline: rank {log.rank}: {clean(str(error))} [{error.code}]", err=True)
                log.missed = error.status > 416
                return found
            data: bytes = answer.body
            log.missed = False
            start = answer.headers.get("gangline-log-offset", "")
            at = int(start) if start.isdecimal() else log.offset
            if log.offset and at > log.offset:
                self._emit(log, b"\n[gangline: %d bytes of this log are no longer kept]\n" % (at - log.offset))
            if self._tail and not log.offset:
                data, at = _last_lines(data, self._tail), at + len(data) - len(_last_lines(data, self._tail))
            log.offset = at + len(data)
            if not data:
                return found
            self._emit(log, data)
            found = True
            size = answer.headers.get("gangline-log-size", "")
            if size.isdecimal() and log.offset >= int(size):
                return found

    def _emit(self, log: _RankLog, data: bytes) -> None:
        if not self._prefix:
            self._write(log, data)
            return
        lines = (log.partial + data).split(b"\n")
        log.partial = lines.pop()
        for line in lines:
            self._write(log, line + b"\n")

    def _write(self, log: _RankLog, data: bytes) -> None:
        if self._prefix:
            rank = f"{log.rank:>{self._pad}}" if len(self._logs) > 1 or not self._element else ""
            mark = f"[{self._element}{'/' if rank and self._element else ''}{rank}] "
            data = (click.style(mark, fg=log.colour) if self._colour else mark).encode() + data
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _last_lines(data: bytes, count: int) -> bytes:
    """Return the last lines; one that no newline has ended yet is one of them."""
    return b"".join(data.splitlines(keepends=True)[-count:])


class ArrayReader:
    """Prints what the elements of an array print, each line with its index in front."""

    def __init__(self, client: Client, array: str, *, colour: bool, tail: int = 0) -> None:
        self._client = client
        self._array = array
        self._colour = colour
        self._tail = tail
        self._readers: dict[str, LogReader] = {}
        self._over: set[str] = set()

    def read(self, *, newest: bool = False) -> bool:
        """Print what is new of the elements that run, and what is left of those that have ended since; return whether there was anything.

        `newest`: of their newest generation alone, one element after the other.
        """
        rows, _ = self._client.jobs(MAX_ELEMENTS, array=self._array)
        found = False
        for row in rows:
            if row["id"] in self._over or not row["generation"] or (len(self._readers) >= MAX_FOLLOWED and row["id"] not in self._readers):
                continue
            reader = self._readers.setdefault(row["id"], self._reader(row))
            found = reader.read(None if newest else int(row["generation"])) or found
            if ended(row) or newest:
                reader.finish()
                del self._readers[row["id"]]
                self._over.add(row["id"])
        return found

    def finish(self) -> None:
        """Print lines that no newline has ended."""
        for reader in self._readers.values():
            reader.finish()

    def _reader(self, row: Job) -> LogReader:
        ranks = range(min(int(row["ranks"]), MAX_FOLLOWED))
        return LogReader(
            self._client, row["id"], ranks, prefix=True, colour=self._colour, tail=self._tail, first_generation=1,
            element=str(row["array_index"]),
        )  # fmt: skip


def attach(client: Client, job: Job, waiter: Waiter, progress: Progress, *, colour: bool) -> Job:
    """Wait for a job and print what its ranks print; return it when it is over."""
    if job.get("elements"):
        return follow_elements(ArrayReader(client, job["id"], colour=colour), waiter, progress)
    ranks = int(job["ranks"])
    shown = range(min(ranks, MAX_FOLLOWED))
    if ranks > MAX_FOLLOWED:
        click.echo(f"gangline: showing ranks 0 to {MAX_FOLLOWED - 1} of {ranks}; others by `gangline logs -f {job['id']} --rank N`", err=True)
    reader = LogReader(client, job["id"], shown, prefix=ranks > 1 and sys.stdout.isatty(), colour=colour, first_generation=1)

    def meanwhile(now: Job) -> bool:
        generation = int(now.get("generation") or 0)
        if not generation or now["state"] in ("queued", "placed", "preparing"):
            return False
        progress.clear()
        return reader.read(generation)

    over = waiter.wait(meanwhile)
    drain(reader, over)
    return over


def follow_elements(reader: ArrayReader, waiter: Waiter, progress: Progress) -> Job:
    """Wait for an array and print what its elements print; return it when it is over."""

    def meanwhile(now: Job) -> bool:
        progress.clear()
        return now["state"] != "queued" and reader.read()

    over = waiter.wait(meanwhile)
    deadline = time.monotonic() + DRAIN_S
    while reader.read() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    reader.finish()
    return over


def drain(reader: LogReader, job: Job) -> None:
    """Print what a job that is over has still printed: until nothing new comes."""
    generation = int(job.get("generation") or 0)
    deadline = time.monotonic() + DRAIN_S
    while generation and reader.read(generation) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    reader.finish()


def wait_for(client: Client, ids: list[str], *, timeout_s: float, propagate: bool, quiet: bool = False) -> int:
    """Wait for all the jobs, say how each ended, and return the exit code of the first that did not succeed."""
    code = exits.DONE
    try:
        for job_id in ids:
            job = Waiter(client, job_id, timeout_s=timeout_s, progress=Progress(quiet=quiet)).wait()
            if not quiet:
                click.echo(fate(job), err=True)
            code = code or exit_code(job, propagate=propagate)
    except KeyboardInterrupt:
        raise detached(ids) from None
    return code


def follow_to_end(client: Client, job_id: str, *, timeout_s: float, propagate: bool, colour: bool) -> int:
    """Print a job's output until its end, say how it ended, and return what that means."""
    progress = Progress()
    try:
        job = client.job(job_id).body
        over = attach(client, job, Waiter(client, job_id, timeout_s=timeout_s, progress=progress), progress, colour=colour)
    except KeyboardInterrupt:
        progress.clear()
        raise detached([job_id]) from None
    click.echo(f"gangline: {fate(over)}", err=True)
    return exit_code(over, propagate=propagate)


def detached(ids: list[str]) -> exits.Exit:
    """Say that only the looking on has ended, and return the end of the command."""
    goes = "the job goes on" if len(ids) == 1 else "the jobs go on"
    click.echo(f"\ngangline: detached, {goes}. Look on: gangline logs -f {ids[0]}; stop: gangline stop {' '.join(ids)}", err=True)
    return exits.Exit(exits.INTERRUPTED)
