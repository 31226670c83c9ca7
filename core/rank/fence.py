"""Checkpoints on a shared file system that a rank of an older generation cannot spoil.

A node that was cut off may come back, with its ranks in the middle of a write, when the gang has long been running elsewhere. Two hidden
files in the checkpoint directory keep such a rank out:

    .gangline.lock      flock, held for the short moments in which the fence is read or changed and a checkpoint is put in its place
    .gangline.fence     {"owner": job, "generations": {job: highest generation seen}}, replaced as a whole, never edited

- A generation takes the directory with its first look at it (`latest`) or its first write; from then on lower generations are refused.
  So all ranks of a generation that start from `latest` start from the same checkpoint.
- Another job that is given the same directory takes it over, and the job before it is refused from then on: it does not come back.
- A checkpoint is written under a `.partial-` name, flushed to disk, and renamed under the lock after a second look at the fence. Whoever
  sees `step-<number>` sees a whole checkpoint.
"""

# ruff: noqa: TID251  relative imports: the folder is core/rank, the package is gangline.rank
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from .records import Context, StaleGeneration

LOCK = ".gangline.lock"
FENCE = ".gangline.fence"
PARTIAL = ".partial-"
#: the lock is held for milliseconds; one that is not to be had for so long is held by a process that hangs
LOCK_TIMEOUT_S = 60.0
#: jobs that are remembered as having had the directory
JOBS_MAX = 64


class Saved(NamedTuple):
    """A whole checkpoint."""

    step: int
    path: Path


class CheckpointWriter:
    """Context manager: gives a path to write to (a file, or a directory to be made there), and puts it in its place at the end.

    An exception inside removes what was written. Raises StaleGeneration at the start and at the end.
    """

    def __init__(self, context: Context, directory: Path, step: int, suffix: str, keep: int, report: Callable[[int, str], None]) -> None:
        if step < 0 or "/" in suffix or (suffix and suffix[0].isdigit()):
            raise ValueError(f"checkpoint of step {step} with suffix {suffix!r}: the step is 0 or more, the suffix like '.pt'")
        #: where the checkpoint will be
        self.path = directory / f"step-{step:012d}{suffix}"
        self.step = step
        self._context = context
        self._directory = directory
        self._suffix = suffix
        self._keep = keep
        self._report = report
        who = f"{context.generation}-{context.rank}-{os.getpid()}"
        self._partial = directory / f"{PARTIAL}{who}-{step}{suffix}"

    def __enter__(self) -> Path:
        claim(self._directory, self._context)
        remove(self._partial)
        return self._partial

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if kind is None:
                try:
                    flush_tree(self._partial)
                except FileNotFoundError:
                    # Either nothing was written, or a newer generation has cleared it away.
                    claim(self._directory, self._context)
                    raise
                self._commit()
        finally:
            remove(self._partial)
        if kind is None:
            self._report(self.step, str(self.path))

    def _commit(self) -> None:
        with locked(self._directory):
            _check(self._directory, self._context)
            if self.path.is_dir():
                # A directory cannot be replaced in one move: the old one of the same step goes first.
                os.rename(self.path, self._partial.with_name(self._partial.name + ".old"))
            os.rename(self._partial, self.path)
            flush(self._directory)
            remove(self._partial.with_name(self._partial.name + ".old"))
            if self._keep > 0:
                same = [saved for saved in _all(self._directory) if saved.path.name[17:] == self._suffix]
                for saved in same[: -self._keep]:
                    remove(saved.path)


def claim(directory: Path, context: Context) -> None:
    """Take the directory for this generation, making it if need be. Raises StaleGeneration. Outside Gangline there is no fence."""
    directory.mkdir(parents=True, exist_ok=True)
    if context.inside:  # else there is nothing to look at, and no reason to leave a lock file behind
        with locked(directory):
            _check(directory, context)


def latest(directory: Path, context: Context) -> Saved | None:
    """Return the newest checkpoint, None when there is none yet. Takes the directory first, unless it cannot be written at all."""
    try:
        claim(directory, context)
    except PermissionError:
        pass  # somebody else's checkpoints, to start from
    except OSError as error:
        if isinstance(error, TimeoutError) or directory.is_dir() is False:
            raise
        # a read-only file system
    everything = _all(directory)
    return everything[-1] if everything else None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the directory. Raises TimeoutError."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{directory / LOCK} has been held for {LOCK_TIMEOUT_S:g} s: a process hangs in its write") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)


def _check(directory: Path, context: Context) -> None:
    """Under the lock: refuse a stale process, raise the fence for a new generation."""
    if not context.inside:
        return
    owner, generations = _read_fence(directory)
    known = generations.get(context.job)
    if known is not None and owner != context.job:
        raise StaleGeneration(
            f"job {owner} has taken checkpoint directory {directory}; job {context.job} generation {context.generation} may not write "
            f"there any more. To give it back, stop that job and remove {directory / FENCE}"
        )
    if known is not None and known > context.generation:
        raise StaleGeneration(
            f"generation {known} of job {context.job} has taken checkpoint directory {directory}; this is generation "
            f"{context.generation}, which has been replaced"
        )
    if known == context.generation:
        return
    generations.pop(context.job, None)
    kept = dict(list(generations.items())[-(JOBS_MAX - 1) :])
    kept[context.job] = context.generation
    fresh = directory / f"{FENCE}.{os.getpid()}"
    fresh.write_text(json.dumps({"owner": context.job, "generations": kept}) + "\n")
    flush(fresh)
    os.rename(fresh, directory / FENCE)
    flush(directory)
    # Nobody of this generation has written anything yet, so what is half written is from the dead, or from those refused from now on.
    for name in os.listdir(directory):
        if name.startswith(PARTIAL):
            remove(directory / name)


def _read_fence(directory: Path) -> tuple[str, dict[str, int]]:
    try:
        raw = json.loads((directory / FENCE).read_text())
        return str(raw["owner"]), {str(job): int(generation) for job, generation in raw["generations"].items()}
    except FileNotFoundError:
        return "", {}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise StaleGeneration(
            f"{directory / FENCE} is damaged, so nobody knows whose directory it is; remove it once no other process writes there"
        ) from None


def _all(directory: Path) -> list[Saved]:
    """Return the checkpoints in order of their steps."""
    found = []
    for name in os.listdir(directory):
        digits = name[5:17]
        if name.startswith("step-") and len(digits) == 12 and digits.isdigit() and not name[17:18].isdigit():
            found.append(Saved(int(digits), directory / name))
    return sorted(found)


def flush_tree(path: Path) -> None:
    """Flush a file, or a directory with everything in it, to disk."""
    if path.is_dir():
        for root, _, names in os.walk(path):
            for name in names:
                flush(Path(root) / name)
            flush(Path(root))
    else:
        flush(path)


def flush(path: Path) -> None:
    """Flush one file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file or a tree, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
