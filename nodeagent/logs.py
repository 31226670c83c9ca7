"""Reading the logs of ranks: by position in the whole stream, over rotations; safe against whatever a job may have put in the way."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from pathlib import Path

import msgspec

from gangline.nodeagent.statedir import is_safe

_PART = re.compile(r"^rank-(?P<rank>[0-9]{1,9})\.(?P<generation>[0-9]{1,9})\.log(?:\.(?P<base>[0-9]{16}))?$")

#: logs of so many jobs are kept after their end, and no older or larger ones than this
JOBS_KEPT = 200
KEPT_BYTES = 4 << 30


class NoLog(Exception):
    """There is no such log; the message says what was asked for."""


class Chunk(msgspec.Struct, frozen=True):
    """A piece of a log. `offset` is that of its first byte; `size` the length of the stream so far, of which the oldest part may be gone."""

    data: bytes
    offset: int
    size: int
    generation: int


class _Part(msgspec.Struct, frozen=True, order=True):
    base: int
    size: int
    name: str


def read(logs: Path, job: str, rank: int, *, generation: int | None, offset: int | None, limit: int, tail: int | None) -> Chunk:
    """Return up to `limit` bytes of a rank's log, from `offset`, or the last `tail` bytes; of the newest generation when None.

    An offset that has been rotated away becomes the oldest one there is. Raises NoLog, ValueError for an offset beyond the end.
    """
    if not is_safe(job):
        raise NoLog(f"{job!r} is not a job id")
    folder = logs / job
    found = generation if generation is not None else _newest_generation(folder, rank)
    parts = _parts(folder, rank, found)
    if not parts:
        raise NoLog(f"rank {rank} of job {job}, generation {found}, has no log here")
    start, end = parts[0].base, parts[-1].base + parts[-1].size
    at = max(start, end - tail) if tail is not None else max(start, offset or 0)
    if at > end:
        raise ValueError(f"offset {at} is beyond the end, the log has {end} bytes")
    return Chunk(_read_parts(folder, parts, at, limit), at, end, found)


def _newest_generation(folder: Path, rank: int) -> int:
    with contextlib.suppress(OSError):
        matches = (_PART.match(name) for name in os.listdir(folder))
        generations = sorted({int(m["generation"]) for m in matches if m is not None and int(m["rank"]) == rank}, reverse=True)
        for g in generations:
            if _parts(folder, rank, g):
                return g
    raise NoLog(f"rank {rank} of job {folder.name} has no log here")


def _parts(folder: Path, rank: int, generation: int) -> list[_Part]:
    """Return the files of a log, oldest first. The newest has no offset in its name: it goes on where the last full one ended."""
    full: list[_Part] = []
    newest: tuple[int, str] | None = None
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        match = _PART.match(name)
        if match is None or (int(match["rank"]), int(match["generation"])) != (rank, generation):
            continue
        with contextlib.suppress(OSError):
            info = os.lstat(folder / name)
            if not stat.S_ISREG(info.st_mode):
                continue
            if match["base"]:
                full.append(_Part(int(match["base"]), info.st_size, name))
            else:
                newest = (info.st_size, name)
    full.sort()
    if newest is not None:
        full.append(_Part(full[-1].base + full[-1].size if full else 0, *newest))
    return full


def _read_parts(folder: Path, parts: list[_Part], at: int, limit: int) -> bytes:
    out = b""
    for part in parts:
        if part.base + part.size > at + len(out) >= part.base and len(out) < limit:
            out += _read_file(folder / part.name, at + len(out) - part.base, min(limit - len(out), part.size))
    return out


def _read_file(path: Path, offset: int, size: int) -> bytes:
    """Read from a regular file and from nothing else: no link is followed, no FIFO waited for, no device touched."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def prune(root: Path, keep: set[str]) -> list[str]:
    """Remove logs, working directories and records of old jobs that are not in `keep`; return their ids.

    The newest JOBS_KEPT stay, as far as they fit in KEPT_BYTES.
    """
    jobs = [(p.stat().st_mtime, p.name) for p in (root / "logs").iterdir() if p.name not in keep]
    removed, total = [], 0
    for i, (_, job) in enumerate(sorted(jobs, reverse=True)):
        total += _size(root / "logs" / job)
        if i >= JOBS_KEPT or total > KEPT_BYTES:
            removed.append(job)
            shutil.rmtree(root / "logs" / job, ignore_errors=True)
    gone = set(removed)
    for folder in ("work", "runs"):
        for name in os.listdir(root / folder):
            if name.partition("@")[0] in gone:
                _remove(root / folder / name)
    return removed


def _remove(path: Path) -> None:
    """Remove a file or a folder, whatever a job may have made of it."""
    try:
        path.unlink()
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total
