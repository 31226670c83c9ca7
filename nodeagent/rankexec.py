"""From a forked copy of a supervisor to the rank's own program. Small imports: a bare interpreter runs it.

Everything that can be found out before the fork is, because each page that the copy touches has to be copied for it.
"""

from __future__ import annotations

import errno
import os

from gangline.nodeagent import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn  # for real it would add a megabyte to the memory that each fork copies

    from gangline.nodeagent.boxed import Box

_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
_SIGKILL = 9


def programs(name: str, path: str | None) -> list[str]:
    """Return the files that a command may mean, in the order of the search path; empty when there is none.

    Only what is surely no program is left out: relative folders are those of the rank's working directory.
    """
    if "/" in name:
        return [name]
    folders = (path if path is not None else _DEFAULT_PATH).split(":")
    return [f"{folder or '.'}/{name}" for folder in folders if not folder.startswith("/") or os.access(f"{folder}/{name}", os.F_OK)]


def make_workdir(path: str) -> None:
    """Make a private working directory that may be there already. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        os.makedirs(path, 0o700, exist_ok=True)


def become(
    found: list[str], command: list[str], env: dict[str, str], workdir: str, *,
    devnull: int, out_w: int, exec_w: int, parent: int, box: Box | None, private: bool,
) -> NoReturn:  # fmt: skip
    """Turn this forked process into the rank; tell the reason through `exec_w` when that fails. `found` is from `programs`.

    `private`: the working directory is of the agent's making, and not one that the job has named.
    """
    step = "start"
    try:
        os.setsid()
        kernel.die_with_parent(_SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        os.dup2(devnull, 0)
        os.dup2(out_w, 1)
        os.dup2(out_w, 2)
        volunteer_for_oom_killer()
        if box is None or box["container"] is None:
            # A container's runtime is to take it from the container, and needs its own rights for making one.
            kernel.no_new_privileges()
        if box is not None:
            _enter(box, workdir, exec_w, private=private, parent=parent)
        else:
            step = f"working directory {workdir}"
            os.chdir(workdir)
        step = f"command {command[0]!r}"
        execute(found, command, env)
    except BaseException as e:  # noqa: BLE001 - whatever it is, this process must not go on as a second supervisor
        reason = e.strerror if isinstance(e, OSError) and e.strerror else repr(e)
        os.write(exec_w, f"{step}: {reason}".encode()[:4096])
    finally:
        os._exit(127)


def _enter(box: Box, workdir: str, exec_w: int, *, private: bool, parent: int) -> None:
    from gangline.nodeagent import boxed

    reason = boxed.enter(box, workdir, private=private, parent=parent)
    if reason:
        os.write(exec_w, reason.encode()[:4096])
        os._exit(127)


def execute(found: list[str], command: list[str], env: dict[str, str]) -> None:
    """Execute the first that can be. Raises OSError: of the first that is there, as a shell does."""
    first: OSError | None = None
    for program in found:
        try:
            os.execve(program, command, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as e:
            first = first or e
    raise first or OSError(errno.ENOENT, os.strerror(errno.ENOENT))


def volunteer_for_oom_killer() -> None:
    """Make the kernel take ranks before agents when memory runs out. A container may forbid it; then nothing is lost."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(fd, b"500")
        os.close(fd)
    except OSError:
        pass
