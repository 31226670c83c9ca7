"""The processes below another one, and how to signal them without hitting a stranger. Small imports: a bare interpreter runs it."""

from __future__ import annotations

import os
import signal

from gangline.nodeagent import rankfile


def parents() -> dict[int, int]:
    """Return the parent of every process that is no zombie."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = _parent(int(name))
            if parent:
                found[int(name)] = parent
    return found


def _parent(pid: int) -> int:
    data = rankfile.read_stat(pid)
    if not data:
        return 0
    fields = data[data.rindex(b")") + 2 :].split(None, 2)
    return 0 if fields[0] in (b"Z", b"X") else int(fields[1])


def state(pid: int) -> str:
    """Return the letter of the state of a process, D for one that waits and cannot be interrupted; "" when it is gone."""
    data = rankfile.read_stat(pid)
    return data[data.rindex(b")") + 2 :].split(None, 1)[0].decode() if data else ""


def descendants(root: int) -> list[int]:
    """Return the live processes under `root`, parents first."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def signal_below(root: int, signum: int) -> None:
    """Send a signal to every descendant of `root`, once."""
    for pid in descendants(root):
        _signal_descendant(pid, root, signum)


def _signal_descendant(pid: int, root: int, signum: int) -> None:
    """Signal a process that was seen under `root`, through a pidfd: never a stranger that has got its pid since."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if _is_below(pid, root):
            signal.pidfd_send_signal(handle, signum)
    except OSError:
        pass
    finally:
        os.close(handle)


def _is_below(pid: int, root: int) -> bool:
    for _ in range(64):
        if pid == root:
            return True
        pid = _parent(pid)
        if pid <= 1:
            return False
    return False
