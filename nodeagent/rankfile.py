"""The files by which agent and supervisors know of each other, and how a process is recognised. Small imports: bare interpreters read it.

    runs/<job>/<generation>/rank-<r>.status   written by the supervisor, atomically; the truth about the rank
    runs/<job>/<generation>/rank-<r>.ctl      appended to by the agent: one command a line, read by the supervisor on SIGUSR1
    notify                                    a FIFO: supervisors hint there that a status file has changed; a lost hint loses nothing

A FIFO and not a datagram socket, because the kernel queues ten datagrams by default and a gang ends with more ranks than that at once.
"""

from __future__ import annotations

import json
import os

NOTIFY = "notify"
FENCE = "fence"

#: fields of a status file, see `RankStatus` in adoption.py
Status = dict[str, object]


def status_name(rank: int) -> str:
    """Name of the status file of a rank inside the folder of its generation."""
    return f"rank-{rank}.status"


def control_name(rank: int) -> str:
    """Name of the command file of a rank inside the folder of its generation."""
    return f"rank-{rank}.ctl"


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: with its pid the name of the process for ever.

    0 when there is no such process, or it is a zombie.
    """
    data = read_stat(pid)
    if not data:
        return 0
    # The second field is the command in parentheses and may contain anything, spaces and parentheses too.
    fields = data[data.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def read_stat(pid: int) -> bytes:
    """Return /proc/<pid>/stat, empty when there is no such process."""
    # Not open(): its layers of objects cost a fresh fork more than the file does.
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 1024)
    except OSError:
        return b""
    finally:
        os.close(fd)


def boot_id() -> str:
    """Return the id of this boot of the host."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f.read().strip()


def claim(path: str, status: Status) -> bool:
    """Write the first version of a status file; False when there is one already, for then somebody else has started this rank.

    A reader may see it half written. It is replaced soon, with a hint.
    """
    try:
        _write(path, status, os.O_EXCL)
    except FileExistsError:
        return False
    return True


def replace(path: str, status: Status) -> None:
    """Write a new version of a status file: readers see the old one or the new one, whole."""
    temporary = f"{path}.{os.getpid()}"
    _write(temporary, status, os.O_TRUNC)
    os.replace(temporary, path)


def _write(path: str, status: Status, flags: int) -> None:
    # Not synced: after a power cut the boot id says that the rank is gone, whatever the file says.
    data = json.dumps(status).encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def open_hints() -> int:
    """Return the writing end of the FIFO of hints, -1 when there is none. The working directory is the state directory.

    Opened for both directions, so that it neither waits for an agent nor breaks when one goes.
    """
    try:
        return os.open(NOTIFY, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1


def hint(fd: int, line: str) -> None:
    """Tell the agent, if there is one, that a status file has changed."""
    try:
        os.write(fd, line.encode())
    except OSError:
        return
