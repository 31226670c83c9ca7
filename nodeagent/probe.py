"""A process that looks at a job's storage with the rights of its user: a request on standard input, a line on standard output for each problem.

Run by `storage.check`, which gives up on it when a file system hangs. Rights are dropped only here, after the interpreter has started: it may
be where that user cannot read it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gangline.nodeagent import boxed

#: `core/rank/fence.py` writes it
FENCE = ".gangline.fence"
_FENCE_BYTES_MAX = 1 << 20


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    wants, user = request["wants"], request["user"]
    problems = [f"{target} is not there to be mounted over: make it on this node" for target in wants["targets"] if not os.path.lexists(target)]
    boxed.become_user(user)
    who = user["name"] if user else "the agent's user"
    for what, path in wants["readable"]:
        problems += _look(what, path, os.R_OK, who)
    for what, path in wants["writable"]:
        problems += _look(what, path, os.R_OK | os.W_OK, who)
    if wants["workdir"]:
        problems += _folder("working directory", wants["workdir"], os.X_OK, who)
    if wants["checkpoint"]:
        problems += _checkpoint(wants, who)
    sys.stdout.write("".join(f"{problem}\n".replace("\0", "") for problem in problems))


def _look(what: str, path: str, mode: int, who: str) -> list[str]:
    try:
        folder = os.path.isdir(path)
        os.stat(path)
    except OSError as e:
        return [f"{what}: {path}: {e.strerror} ({who})"]
    if not os.access(path, mode | (os.X_OK if folder else 0)):
        return [f"{what}: {path} cannot be {'written' if mode & os.W_OK else 'read'} by {who}"]
    return []


def _folder(what: str, path: str, mode: int, who: str) -> list[str]:
    if os.path.isdir(path):
        return [] if os.access(path, mode) else [f"{what} {path}: Permission denied ({who})"]
    return [f"{what} {path}: {'Not a directory' if os.path.lexists(path) else 'No such file or directory'} ({who})"]


def _checkpoint(wants: dict[str, Any], who: str) -> list[str]:
    path = wants["checkpoint"]
    try:
        os.makedirs(path, exist_ok=True)
        # Not access(): a server may map the superuser to nobody, which only shows when something is written.
        trial = f"{path}/.gangline.trial-{os.getpid()}-{os.urandom(4).hex()}"
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(trial)
        found = os.statvfs(path)
    except OSError as e:
        return [f"checkpoint directory {path} cannot be written by {who}: {e.strerror}"]
    problems = []
    free_mib = found.f_bavail * found.f_frsize >> 20
    if free_mib < wants["free_mib"]:
        problems.append(f"checkpoint directory {path} has {free_mib} MiB of free space, needed are {wants['free_mib']}")
    newer = _generation(path, wants["job"])
    if newer > wants["generation"]:
        problems.append(f"checkpoint directory {path} is written by generation {newer} of this job, and this one is {wants['generation']}")
    return problems


def _generation(path: str, job: str) -> int:
    """Return the highest generation of a job that the fence of a checkpoint directory knows, 0 for none."""
    try:
        with open(os.open(f"{path}/{FENCE}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            known = json.loads(file.read(_FENCE_BYTES_MAX))
        return int(known["generations"].get(job, 0)) if known["owner"] == job else 0
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
