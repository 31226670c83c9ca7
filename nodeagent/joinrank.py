"""From a process of the agent to one inside a running rank's isolation: its control groups, mounts, user, limits, environment and directory.

Run by a bare interpreter, see drivers/process.py. Says on standard error why it could not, and ends with 126, or 127 for a command that is not
there. The rank is held by a pidfd and its start time, so that nothing of another process is ever taken for the rank's.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, NoReturn

from gangline.nodeagent import boxed, kernel, rankexec, rankfile

_CLONE_NEWNS = 0x00020000


def main(text: str) -> NoReturn:
    """Become the command of a request: pid, start, groups, user, mounts, rlimits, command."""
    request = json.loads(text)
    try:
        _join(request)
    except OSError as e:
        sys.stderr.write(f"gangline: {e.filename or 'the rank'}: {e.strerror}\n")
    sys.stderr.flush()
    os._exit(126)


def _join(request: dict[str, Any]) -> None:
    pid, command = request["pid"], request["command"]
    rank = os.pidfd_open(pid)
    try:
        if rankfile.process_start(pid) != request["start"]:
            raise ProcessLookupError(3, "it has ended")
        workdir = os.open(f"/proc/{pid}/cwd", os.O_PATH | os.O_CLOEXEC)
        env = _environment(pid)
        if request["mounts"]:
            _enter_mounts(pid)
        boxed.join_groups({"groups": [{"path": path} for path in request["groups"]]})
        rankexec.volunteer_for_oom_killer()
        boxed.limit(request["rlimits"])
        os.fchdir(workdir)
        boxed.become_user(request["user"])
        kernel.no_new_privileges()
        # All that was taken was the rank's, if that is still there.
        if rankfile.process_start(pid) != request["start"]:
            raise ProcessLookupError(3, "it has ended")
    finally:
        os.close(rank)
    try:
        rankexec.execute(rankexec.programs(command[0], env.get("PATH")), command, env)
    except OSError as e:
        sys.stderr.write(f"gangline: {command[0]}: {e.strerror}\n")
        sys.stderr.flush()
        os._exit(127 if isinstance(e, FileNotFoundError) else 126)


def _environment(pid: int) -> dict[str, str]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def _enter_mounts(pid: int) -> None:
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "mounts of the rank")
    os.close(fd)
