"""Ranks as their status files tell it, and what is true of them: recognised by boot, pid and start time, never by pid alone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gangline.core.model.gpushares import GpuShare
from gangline.nodeagent import rankfile
from gangline.nodeagent.launcher import Launch
from gangline.nodeagent.local import LocalRank, RankState


class RankStatus(msgspec.Struct, frozen=True):
    """The content of a status file; `supervisor.py` writes it."""

    job: str
    generation: int
    rank: int
    gpus: tuple[int, ...]
    boot_id: str
    #: pids, with the start of each process in clock ticks since boot
    supervisor: int
    supervisor_start: int
    pid: int
    pid_start: int
    state: RankState
    exit_code: int
    cause: str
    message: str
    started_at_ms: int
    exited_at_ms: int
    dropped_bytes: int = 0
    #: boottime at which nothing was left of it, 0 where no supervisor has seen that
    ended_boot_ms: int = 0
    share: GpuShare | None = None


def read_status(path: Path | str) -> RankStatus | None:
    """Return the status in a file; None when there is none or it cannot be read."""
    try:
        return msgspec.json.decode(rankfile.read(str(path)), type=RankStatus)
    except msgspec.DecodeError:
        return None


def local_rank(status: RankStatus, progress_at: float) -> LocalRank:
    """Return the rank that the status describes."""
    return LocalRank(
        rank=status.rank, generation=status.generation, gpus=status.gpus, state=status.state, pid=status.pid,
        exit_code=status.exit_code, cause=status.cause, message=status.message,
        started_at_ms=status.started_at_ms, exited_at_ms=status.exited_at_ms, progress_at=progress_at, share=status.share,
    )  # fmt: skip


class Supervised(msgspec.Struct, frozen=True):
    """A living supervisor, held by a descriptor that cannot come to mean another process."""

    pidfd: int
    pid: int

    def kick(self) -> None:
        """Make it read its command file."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def terminate(self) -> None:
        """Make it stop its rank without a command file: when there is no space to write one."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def close(self) -> None:
        """Let go of it."""
        os.close(self.pidfd)


def hold(status: RankStatus, boot_id: str) -> Supervised | None:
    """Return the living supervisor of a rank; None when it is gone, however alive its pid may look."""
    if status.boot_id != boot_id:
        return None
    pidfd = open_process(status.supervisor, status.supervisor_start)
    return None if pidfd < 0 else Supervised(pidfd, status.supervisor)


def open_process(pid: int, start: int) -> int:
    """Return a pidfd of the process with that pid that started then; -1 when there is none."""
    if pid <= 0 or start <= 0:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    # Looked at after opening: from here on the descriptor stays with what was seen.
    if rankfile.process_start(pid) != start:
        os.close(pidfd)
        return -1
    return pidfd


def orphaned(status: RankStatus, boot_id: str) -> RankStatus:
    """Return what became of a rank whose supervisor is gone without having written its end; what is left of it is killed."""
    cause, message = "lost", "its supervisor is gone, and with it the exit status"
    if status.boot_id != boot_id:
        cause, message = "node_restart", "the host was started anew"
    else:
        _kill_session(status)
    now_ms = time.time_ns() // 1_000_000
    return msgspec.structs.replace(
        status, state="exited", exit_code=-signal.SIGKILL, cause=cause, message=message, exited_at_ms=now_ms, ended_boot_ms=0
    )


def not_started(launch: Launch, message: str) -> RankStatus:
    """Return the status of a rank that could not be started."""
    return RankStatus(
        job=launch.job, generation=launch.generation, rank=launch.rank, gpus=launch.gpus, boot_id=launch.boot_id,
        supervisor=0, supervisor_start=0, pid=0, pid_start=0, state="exited", exit_code=127, cause="start_failed", message=message,
        started_at_ms=0, exited_at_ms=time.time_ns() // 1_000_000, share=launch.share,
    )  # fmt: skip


def save_status(path: str, status: RankStatus) -> None:
    """Write a status in the place of a supervisor that is gone."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            rankfile.write(fd, msgspec.to_builtins(status))
        finally:
            os.close(fd)


def _kill_session(status: RankStatus) -> None:
    """Kill what is left in the rank's session, if its first process is the one that we know or is gone.

    The kernel has killed that process when its supervisor died; what it had forked has kept its session.
    """
    start = rankfile.process_start(status.pid)
    if status.pid <= 0 or (start and start != status.pid_start):
        return
    for pid in _session_members(status.pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _session_members(session: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(name)) == session:
                    found.append(int(name))
    return found


def stored_statuses(runs: Path) -> Iterator[RankStatus]:
    """Yield every status under a folder of runs that can be read and lies where it says that it belongs."""
    for path in sorted(runs.glob("*.status")):
        status = read_status(path)
        if status is not None and path.name == os.path.basename(rankfile.status_path(status.job, status.generation, status.rank)):
            yield status
