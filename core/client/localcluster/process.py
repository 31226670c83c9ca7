"""Processes that outlive the one that started them, named by pid and start time, so that a pid that was given away is never signalled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["etcd", "scheduler", "agent"]

_POLL_S = 0.02


class Process(msgspec.Struct, frozen=True):
    """One process of the cluster."""

    name: str
    kind: Kind
    pid: int
    #: in clock ticks since boot; with pid and boot the name of the process for ever
    start_time: int
    boot_id: str

    @property
    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return self.boot_id == boot_id() and is_alive(self.pid, self.start_time)

    def signal(self, number: int) -> bool:
        """Send a signal. False when the process is gone."""
        return self.boot_id == boot_id() and send(self.pid, self.start_time, number)


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time_of(pid: int) -> tuple[int, str]:
    """Return when a process started, in clock ticks since boot, and the letter of its state; (0, "") when there is none."""
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0, ""
    # The second field is the command in parentheses, and may contain spaces and parentheses itself.
    fields = data[data.rindex(b")") + 2 :].split()
    return int(fields[19]), fields[0].decode()


def is_alive(pid: int, start_time: int) -> bool:
    """Whether the process with that pid and start time runs; one without a start time never did."""
    started, state = start_time_of(pid)
    return started == start_time > 0 and state not in ("Z", "X")


def send(pid: int, start_time: int, number: int) -> bool:
    """Send a signal to the process with that pid and start time. False when it is gone."""
    try:
        # The descriptor holds on to this very process, whatever becomes of the pid between the look and the signal.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(pid, start_time):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def send_to_group(pid: int, start_time: int, number: int) -> None:
    """Send a signal to the process with that pid and start time, and to the group that it leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # A group keeps the number of its leader from being given away for as long as that one lives.
        if is_alive(pid, start_time) and os.getpgid(pid) == pid:
            os.killpg(pid, number)
    send(pid, start_time, number)


def wait_gone(processes: Iterable[tuple[int, int]], patience_s: float) -> list[tuple[int, int]]:
    """Wait until the processes, each (pid, start time), are gone. Returns those that are not after `patience_s`."""
    deadline = time.monotonic() + patience_s
    left = list(processes)
    while left := [p for p in left if is_alive(*p)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    return left


def spawn(command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, its output at the end of the file `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd, env=dict(env)
        )
