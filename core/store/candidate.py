"""Which process a scheduler is, so that its own restart can tell that the process before it is gone and need not wait for its lease.

Only what proves it counts: the same boot of the same kernel, the same pid namespace, and then no process with that pid, or one that was
started at another time. A process that is stopped, or hidden, or of another host, is not gone.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from gangline.core.model.codec import pack, unpack

_PROC = Path("/proc")


class Candidate(msgspec.Struct, frozen=True):
    """The value of the election key."""

    name: str
    boot_id: str
    #: inode of the pid namespace, in which `pid` is meant
    pid_namespace: int
    pid: int
    #: clock ticks from boot to the start of the process
    started: int


def this_process(name: str) -> Candidate:
    """Return the scheduler `name` as this process. On a system without /proc it can never be proven to be gone."""
    try:
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
        return Candidate(name, boot_id, namespace, os.getpid(), _start_of(os.getpid()))
    except (OSError, ValueError):
        return Candidate(name, "", 0, os.getpid(), 0)


def encode(candidate: Candidate) -> bytes:
    """Return the bytes for the election key."""
    return pack(candidate)


def decode(value: bytes) -> Candidate | None:
    """Return the candidate in the bytes of an election key, None when they are something else."""
    try:
        return unpack(value, Candidate)
    except ValueError:
        return None


def is_gone(other: Candidate, me: Candidate) -> bool:
    """Tell whether `other` was provably a process of this host that has ended. Pids are compared in our namespace only."""
    if other.pid < 1 or not me.boot_id or (other.boot_id, other.pid_namespace) != (me.boot_id, me.pid_namespace):
        return False
    try:
        # /proc may hide the processes of other users (hidepid); the kernel's answer to signal 0 does not.
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    try:
        return _start_of(other.pid) != other.started
    except (OSError, ValueError):
        return False


def _start_of(pid: int) -> int:
    stat = (_PROC / str(pid) / "stat").read_text()
    # The second field is the command in parentheses, and may itself contain any of them; the start is the 22nd.
    return int(stat.rpartition(")")[2].split()[19])
