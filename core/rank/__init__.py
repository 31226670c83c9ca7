"""What a training job imports: report progress and checkpoints, hear about restarts and preemptions, write checkpoints that are fenced.

    from gangline import rank

    saved = rank.latest_checkpoint()                    # take the directory, find where to go on
    for step in range(start, steps):
        loss = train(step)
        rank.progress(step)                             # a few hundred nanoseconds
        if step % 100 == 0 and rank.context().rank == 0:
            with rank.checkpoint(step, suffix=".pt") as path:
                torch.save(model.state_dict(), path)
        if rank.should_stop():                          # preemption, drain, SIGTERM
            rank.acknowledge()
            break

Standard library only. Nothing here waits for the node agent, and everything is harmless outside Gangline: nothing is reported, there are no
events, and checkpoints are written atomically, but unfenced. Nothing is started, opened or installed by the import itself.
Documentation: docs/training-jobs.md.
"""

# ruff: noqa: TID251  relative imports: the folder is core/rank, the package is gangline.rank
from __future__ import annotations

import os
import signal
from _thread import allocate_lock
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, overload

from .records import Context, RestartNotice, StaleGeneration, StopNotice, read_context, restart_notice

if TYPE_CHECKING:
    from types import FrameType

    from .fence import CheckpointWriter, Saved
    from .link import Link

__all__ = [
    "Context",
    "RestartNotice",
    "StaleGeneration",
    "StopNotice",
    "acknowledge",
    "checkpoint",
    "claim",
    "context",
    "events",
    "latest_checkpoint",
    "on_event",
    "progress",
    "restart",
    "should_stop",
    "stop_notice",
]


def progress(step: int, busy_s: float = 0.0) -> None:
    """Report that step `step` is done. Never waits; the newest step is sent at most ten times a second.

    `busy_s` is how long this rank worked on it itself, in seconds, without waiting for others. Ranks of one gang are compared by it, to
    find a slow one; without it by the time from step to step, which is the same for all ranks that wait for each other in each step.

    With a `hang_timeout` in the job file, a rank that reports no new step for so long is taken for hung.
    """
    link = _link or _connect()
    link.step = int(step)
    if busy_s > 0:
        link.busy_ms = max(1, round(busy_s * 1000))
    if not link.pending:
        link.wake()


@overload
def checkpoint(step: int, path: str | os.PathLike[str]) -> None: ...
@overload
def checkpoint(step: int, *, directory: str | os.PathLike[str] | None = None, suffix: str = "", keep: int = 0) -> CheckpointWriter: ...
def checkpoint(
    step: int,
    path: str | os.PathLike[str] | None = None,
    *,
    directory: str | os.PathLike[str] | None = None,
    suffix: str = "",
    keep: int = 0,
) -> CheckpointWriter | None:
    """Report a checkpoint that you wrote yourself (`path`), or write one.

    Without `path` this is a context manager that gives a temporary path to write a file or make a directory at. At the end that is
    flushed, renamed to `step-<12 digits><suffix>` in `directory` (the job's checkpoint directory by default) and reported. With `keep`
    only so many of the newest stay. Raises StaleGeneration when a newer generation has taken the directory.
    """
    if path is not None:
        _report_checkpoint(step, os.fspath(path))
        return None
    from pathlib import Path

    from .fence import CheckpointWriter

    return CheckpointWriter(context(), Path(_directory(directory)), int(step), suffix, keep, _report_checkpoint)


def latest_checkpoint(directory: str | os.PathLike[str] | None = None) -> Saved | None:
    """Return (step, path) of the newest checkpoint that `checkpoint` has written, or None.

    Takes the directory for this generation first, so that no older one can add to it any more, and all ranks find the same checkpoint.
    Raises StaleGeneration when a newer one has taken it.
    """
    from pathlib import Path

    from .fence import latest

    return latest(Path(_directory(directory)), context())


def claim(directory: str | os.PathLike[str] | None = None) -> None:
    """Take a directory for this generation, for those who write checkpoints there in their own way. Raises StaleGeneration."""
    from pathlib import Path

    from .fence import claim

    claim(Path(_directory(directory)), context())


def acknowledge() -> None:
    """Tell the agent that the stop notice was heard and that all that is worth keeping is saved: the gang may be stopped right away."""
    link = _link or _connect()
    link.acknowledged = True
    link.wake()


def should_stop() -> bool:
    """Return whether this rank has been asked to leave: by a notice (preemption, drain, ...) or SIGTERM.

    The first call, from the main thread, takes SIGTERM over if nothing else handles it: who asks is not killed by the signal.
    Ranks hear of it at different moments; those that must leave at the same step have to agree on it among themselves.
    """
    link = _link or _connect()
    if not _signals_taken:
        _take_signals()
    return _signalled or link.stop is not None


def stop_notice() -> StopNotice | None:
    """Return the newest notice that this gang must leave, None when there is none (SIGTERM alone comes without one)."""
    return (_link or _connect()).stop


def events(timeout_s: float | None = 0.0) -> Iterator[dict[str, object]]:
    """Yield this generation's events so far, then each one that comes within `timeout_s` of the one before; None waits for ever."""
    return (_link or _connect()).events(timeout_s)


def on_event(callback: Callable[[dict[str, object]], object]) -> None:
    """Call back on a background thread for each event of this generation, those that came before included."""
    (_link or _connect()).listen(callback)


def restart() -> RestartNotice | None:
    """Return why this generation exists; None in the first generation of a job."""
    who = context()
    found: RestartNotice | None = None
    for event in (_link or _connect()).events(0.0):
        if event["event"] == "restart":
            found = restart_notice(event)
    if found is None and who.restart_cause:
        return RestartNotice(cause=who.restart_cause, restarts=who.restarts)
    return found


def context() -> Context:
    """Return who this process is, as the environment says."""
    return read_context()


class _Alone:
    """In place of the link outside Gangline: takes everything, does nothing."""

    step = -1
    busy_ms = 0
    checkpoint: tuple[int, str] | None = None
    acknowledged = False
    pending = True
    stop: StopNotice | None = None

    def wake(self) -> None:
        return

    def events(self, timeout_s: float | None) -> Iterator[dict[str, object]]:
        return iter(())

    def listen(self, callback: Callable[[dict[str, object]], object]) -> None:
        return

    def flush(self, timeout_s: float) -> None:
        return

    def abandon(self) -> None:
        return


_link: Link | _Alone | None = None
_connecting = allocate_lock()
_hooked = False
_signalled = False
_signals_taken = False


def _connect() -> Link | _Alone:
    global _link
    with _connecting:
        if _link is None:
            who = context()
            path, token = os.environ.get("GANGLINE_SOCKET", ""), os.environ.get("GANGLINE_TOKEN", "")
            if who.inside and ((path and token) or who.events_path):
                from .link import Link

                _hook()
                _link = Link(who, path if token else "", token)
            else:
                _link = _Alone()
        return _link


def _report_checkpoint(step: int, path: str) -> None:
    link = _link or _connect()
    link.checkpoint = (int(step), path)
    link.wake()


def _directory(directory: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    found = directory or context().checkpoint_dir
    if not found:
        raise ValueError("no checkpoint directory: name one in the job file (checkpoint: {path: ...}) or pass directory=")
    return found


def _take_signals() -> None:
    global _signals_taken
    import threading

    if threading.current_thread() is threading.main_thread():
        _hook()
        _signals_taken = True
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _signalled
    _signalled = True


def _hook() -> None:
    global _hooked
    if not _hooked:
        import atexit

        _hooked = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    # What was reported last, an acknowledgement above all, should not be lost because the process was quick to end.
    if _link is not None:
        _link.flush(0.5)


def _after_fork() -> None:
    """A forked helper (a data loader) has no link thread; it gets a link of its own if it asks, and dies of SIGTERM as usual."""
    global _link, _connecting, _signals_taken
    link, _link = _link, None
    _connecting = allocate_lock()
    if link is not None:
        link.abandon()
    if _signals_taken and signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _signals_taken = False
