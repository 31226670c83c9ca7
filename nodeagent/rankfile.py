"""The files by which agent and supervisors know of each other, and how a process is recognised. Small imports: bare interpreters read it.

    runs/<job>@<generation>.<rank>.status   written by the supervisor, the same line twice; the truth about the rank
    runs/<job>@<generation>.<rank>.ctl      appended to by the agent: one command a line, read by the supervisor on SIGUSR1
    notify                                  a FIFO: supervisors hint there that a status file has changed; a lost hint loses nothing

One folder for all, because making one costs a file system more than the files in it. A FIFO and not a datagram socket, because the kernel
queues ten datagrams by default and a gang ends with more ranks than that at once.
"""

from __future__ import annotations

import errno
import os

NOTIFY = "notify"
FENCE = "fence"

_READ_TRIES = 5
_STATUS_BYTES_MAX = 1 << 16
#: longest explanation in a status
MESSAGE_CHARS_MAX = 500

#: fields of a status file, see `RankStatus` in adoption.py
Status = dict[str, object]


def status_path(job: str, generation: int, rank: int) -> str:
    """Path of the status file of a rank inside the state directory."""
    return f"runs/{job}@{generation}.{rank}.status"


def control_path(job: str, generation: int, rank: int) -> str:
    """Path of the command file of a rank inside the state directory."""
    return f"runs/{job}@{generation}.{rank}.ctl"


def events_path(job: str, generation: int) -> str:
    """Path of the file of the events of a generation inside the state directory."""
    return f"runs/{job}@{generation}.events"


def named(name: str) -> tuple[str, int] | None:
    """Return the job and the generation that a file in `runs` belongs to, None for one that is not ours. No job has an @ in its id."""
    job, at, rest = name.partition("@")
    generation, dot, _ = rest.partition(".")
    return (job, int(generation)) if at and dot and generation.isdecimal() else None


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


def claim(path: str, status: Status) -> int:
    """Make a status file and return its descriptor; -1 when there is one already, for then somebody else has started this rank."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return -1
    write(fd, status)
    return fd


def write(fd: int, status: Status) -> None:
    """Write a status over the one before, in one call. Raises OSError.

    In place, because a new file for each change costs the file system more than the process costs the kernel; and twice, so that a reader
    that comes in between sees two different lines, and knows that it will be hinted at the file again. What is left of longer lines stands
    behind them, where nobody reads. Not synced: after a power cut the boot id says that the rank is gone, whatever the file says.
    """
    line = encode(status) + b"\n"
    if os.pwrite(fd, line + line, 0) < 2 * len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def encode(status: Status) -> bytes:
    """Return a status as JSON. The module json would do it too, but each fork of the bare interpreter would carry it along."""
    return b"{%b}" % ",".join(f'"{name}":{_json(value)}' for name, value in status.items()).encode("utf-8", "replace")


def _json(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, str):
        plain = "".join(c if c >= " " else " " for c in value)
        return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert isinstance(value, list | tuple)
    return "[" + ",".join(map(_json, value)) + "]"


def read(path: str) -> bytes:
    """Return the JSON in a status file; empty when there is no such file, or not a whole status in it even after a moment."""
    for _ in range(_READ_TRIES):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return b""
        try:
            first, _, rest = os.read(fd, _STATUS_BYTES_MAX).partition(b"\n")
        finally:
            os.close(fd)
        if first and rest.startswith(first + b"\n"):
            return first
    return b""


def open_hints() -> int:
    """Return the writing end of the FIFO of hints, -1 when there is none. The working directory is the state directory.

    Opened for both directions, so that it neither waits for an agent nor breaks when one goes.
    """
    try:
        return os.open(NOTIFY, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1


def hint(fd: int, line: str) -> bool:
    """Tell the agent, if there is one, that a status file has changed. False when that was not possible: nobody has read hints for long."""
    try:
        return os.write(fd, line.encode()) > 0
    except OSError:
        return False
