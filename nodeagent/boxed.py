"""What stands around a rank that is not just a process of the agent's user: control groups, a user, limits, mounts, a container's remains.

Used by the rank's supervisor and by the forked process before it becomes the rank; loaded by those that need it only. Small imports: a bare
interpreter runs it. What `box` holds is described in isolation.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time

from gangline.nodeagent import kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    #: as marshal brings it: see isolation.Box
    Box = dict[str, Any]

_SIGKILL = int(signal.SIGKILL)
#: a group whose parent is just being removed by the last rank that had been there is made again
_TRIES = 5
#: the time that a container runtime has to answer about one container
RUNTIME_S = 20.0

#: how catatonit and tini begin what they say about a command that they cannot execute
_INIT_FAILED = ("ERROR (catatonit", "[FATAL tini")

_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 19
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = -100, 0x8000, 442
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4


# ---------------------------------------------------------------- control groups


def make_groups(box: Box) -> None:
    """Make the rank's control groups and write their limits. Raises OSError with what failed as its file name."""
    for group in box["groups"]:
        for left in range(_TRIES - 1, -1, -1):
            try:
                _mkdir(group["base"])
                _write_all(group["base"], group["base_writes"])
                _mkdir(group["path"])
                break
            except FileNotFoundError:
                if not left:
                    raise
        _write_all(group["path"], group["writes"])
        if group["denied"]:
            from gangline.nodeagent import deviceaccess  # loaded by those that need it only

            deviceaccess.deny(group["path"], group["denied"])


def join_groups(box: Box) -> None:
    """Move this process into the groups. Raises OSError."""
    for group in box["groups"]:
        _write(f"{group['path']}/cgroup.procs", "0")


def kill_groups(box: Box) -> None:
    """SIGKILL to everything in the groups."""
    for group in box["groups"]:
        try:
            _write(f"{group['path']}/cgroup.kill", "1")
        except OSError:
            for pid in members(group["path"]):
                try:
                    os.kill(pid, _SIGKILL)
                except OSError:
                    continue


def members(path: str) -> list[int]:
    """Return the processes in a group; those that have no number in our namespace, which read as 0, are left out."""
    return [int(pid) for pid in _read(f"{path}/cgroup.procs").split() if pid != "0"]


def remove_groups(box: Box) -> None:
    """Remove the groups, with what somebody may have put in there since the rank ended."""
    for group in box["groups"]:
        for pause_s in (0.0, 0.01, 0.1, 0.5):
            time.sleep(pause_s)
            if _rmdir(group["path"]):
                break
            kill_groups(box)
        _rmdir(group["base"])  # the last one out


def memory_kills(box: Box) -> int:
    """Return how many processes the kernel has killed in the groups because of their memory limit."""
    for group in box["groups"]:
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(f"{group['path']}/{name}").splitlines():
                word, _, count = line.partition(" ")
                if word == "oom_kill" and int(count):
                    return int(count)
    return 0


def refused_forks(box: Box) -> int:
    """Return how many processes or threads could not be made because of the limit on their number."""
    for group in box["groups"]:
        for line in _read(f"{group['path']}/pids.events").splitlines():
            word, _, count = line.partition(" ")
            if word == "max":
                return int(count)
    return 0


def _mkdir(path: str) -> None:
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        return


def _rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except OSError as e:
        return e.errno == errno.ENOENT
    return True


def _write_all(path: str, writes: list[tuple[str, str, bool]]) -> None:
    for name, value, needed in writes:
        try:
            _write(f"{path}/{name}", value)
        except OSError:
            if needed:
                raise


def _write(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as e:
        e.filename = path
        raise


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


# ---------------------------------------------------------------- the process that becomes the rank


def enter(box: Box, workdir: str, *, private: bool, parent: int) -> str:
    """Put this forked process into its box, and into its working directory. Returns "" or what could not be done, for people.

    `private`: the working directory is the agent's own making; the rank's user need not be able to reach it from above.
    """
    step = "control group"
    try:
        join_groups(box)
        step = "resource limits"
        limit(box["rlimits"])
        step = "mounts"
        _mount_all(box)
        if private:
            step = f"working directory {workdir}"
            os.chdir(workdir)
        step = f"user {box['user'] and box['user']['name']}"
        become_user(box["user"])
        # The kernel has forgotten it with the change of user.
        kernel.die_with_parent(_SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        if not private:
            step = f"working directory {workdir}"
            os.chdir(workdir)
    except OSError as e:
        where = f" ({e.filename})" if e.filename and str(e.filename) not in step else ""
        return f"{step}: {e.strerror}{where}"
    return ""


def become_user(user: dict[str, Any] | None) -> None:
    """Give up this process's rights for those of a user, for good. Raises OSError."""
    if user is None or (os.getuid() == user["uid"] and os.geteuid() == user["uid"]):
        return
    os.setgroups(user["groups"])
    os.setresgid(user["gid"], user["gid"], user["gid"])
    os.setresuid(user["uid"], user["uid"], user["uid"])


def limit(limits: list[tuple[int, int, int]]) -> None:
    """Set resource limits: (resource, soft, hard) each. Raises OSError."""
    if limits:
        import resource

        for which, soft, hard in limits:
            try:
                resource.setrlimit(which, (soft, hard))
            except ValueError as e:  # above what this process may give
                raise OSError(errno.EPERM, str(e)) from None


def _mount_all(box: Box) -> None:
    """Give this process a view of the file systems of its own, and mount there what the box says. Raises OSError.

    The sources are opened with the rights of the rank's user: what that user cannot reach, root does not mount for it, whatever has been put
    into the path since it was checked.
    """
    mounts = box["mounts"]
    if not mounts:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    _must(libc.unshare(_CLONE_NEWNS), "unshare")
    _must(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "/")
    # In the new view, from which alone can be mounted, and all before the first of them is covered.
    sources = _as_user(box["user"], lambda: [_open_source(source) for source, _, _ in mounts])
    for fd, (_, target, read_only) in zip(sources, mounts, strict=True):
        where = os.fsencode(target)
        _must(libc.mount(b"/proc/self/fd/%d" % fd, where, None, ctypes.c_ulong(_MS_BIND | _MS_REC), None), target)
        os.close(fd)
        _protect(libc, where, read_only)


def _open_source(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _as_user(user: dict[str, Any] | None, what: Any) -> Any:
    if user is None or os.geteuid() != 0:
        return what()
    groups, gid = os.getgroups(), os.getegid()
    os.setgroups(user["groups"])
    os.setegid(user["gid"])
    os.seteuid(user["uid"])
    try:
        return what()
    finally:
        os.seteuid(0)
        os.setegid(gid)
        os.setgroups(groups)


def _protect(libc: ctypes.CDLL, target: bytes, read_only: bool) -> None:
    """No set-user-id programs and no devices on what a job has mounted, on all that is below it; read only if that is asked for."""
    flags = _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV | (_MOUNT_ATTR_RDONLY if read_only else 0)
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    if libc.syscall(ctypes.c_long(_SYS_MOUNT_SETATTR), _AT_FDCWD, target, _AT_RECURSIVE, attributes, size) == 0:
        return
    # A kernel before 5.12: the mount itself, and not what is mounted below it.
    old = _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV | (_MS_RDONLY if read_only else 0)
    _must(libc.mount(None, target, None, ctypes.c_ulong(old), None), os.fsdecode(target))


def _must(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


# ---------------------------------------------------------------- before and after


def give(box: Box, workdir: str) -> None:
    """Make what the rank's user needs: its private working directory ("" for none), and a container's environment. Raises OSError."""
    owner = box["owner"]
    if workdir and owner is not None:
        os.chown(workdir, owner[0], owner[1], follow_symlinks=False)
    container = box["container"]
    if container is not None:
        fd = os.open(container["env_file"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, container["env_text"].encode())
            if owner is not None and not container["name"]:
                os.fchown(fd, owner[0], owner[1])  # such a runtime runs as the user
        finally:
            os.close(fd)


def take_away(box: Box) -> None:
    """Remove what is left of the box when the rank has ended; of a container whose processes are a daemon's, that is the rank itself."""
    container = box["container"]
    if container is not None:
        _unlink(container["env_file"])
        if container["name"]:
            for pause_s in (0.0, 0.5, 2.0, 5.0):
                time.sleep(pause_s)
                if _run([*container["program"], "rm", "--force", container["name"]])[0]:
                    break
    remove_groups(box)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def memory_message(box: Box, whole: bool) -> str:
    """Say how a rank ended that went past its limit of memory; `whole`: its own process was killed."""
    size = f" of {box['memory_mib']} MiB" if box["memory_mib"] else ""
    return f"{'killed' if whole else 'one of its processes was killed'}: more memory than its limit{size} (resources.memory)"


# ---------------------------------------------------------------- containers


def container_end(box: Box) -> tuple[int, bool, bool, str] | None:
    """Return (exit code, out of memory, has run, error) of the rank's container as its runtime has it; None when it does not know.

    Of a container that was killed together with what stands beside it, a runtime says that it runs, with exit code 0.
    """
    container = box["container"]
    if not container["name"]:
        return None
    form = "{{.State.Status}}|{{.State.ExitCode}}|{{.State.OOMKilled}}|{{.State.StartedAt}}|{{.State.Error}}"
    said = _run([*container["program"], "inspect", "--format", form, container["name"]])[1]
    state, _, rest = said.partition("|")
    code, _, rest = rest.partition("|")
    killed, _, rest = rest.partition("|")
    started, _, error = rest.partition("|")
    if state in ("running", "paused", "stopping") or not code.strip().lstrip("-").isdigit():
        return None
    return int(code), killed == "true", not started.startswith("0001-"), error.strip()


def explain_end(status: dict[str, object], end: tuple[int, bool, bool, str] | None, last_words: str, *, oom: bool) -> None:
    """Put into the status how a container ended: as the same program would have ended as a process, and in words where it never ran.

    `oom`: the kernel has killed something for want of memory meanwhile. Runtimes notice only some of that themselves.
    """
    lines = [line.strip() for line in last_words.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    no_command = last.startswith(_INIT_FAILED) and bool(status["exit_code"])
    unborn = end is None or not end[2] or no_command
    # 125: the runtime itself has failed; 126 and 127: the command cannot be executed, or is not there.
    if unborn and (no_command or status["exit_code"] in (125, 126, 127)) and not status["cause"]:
        reason = (end[3] if end is not None else "") or last or "the container could not be made"
        status.update(cause="start_failed", message=f"container: {reason}"[:500])
    if end is None or unborn:
        return
    code, killed, _, _ = end
    # By the runtimes' convention, as a shell has it: 128 and the signal.
    status["exit_code"] = 128 - code if 128 < code <= 128 + 64 else code
    if code and not status["cause"] and (killed or (oom and status["exit_code"] == -_SIGKILL)):
        status.update(cause="oom", message="killed: more memory than its limit (resources.memory), or than the node has")


def _run(command: list[str]) -> tuple[bool, str]:
    """Run a program of the container runtime. Returns whether it succeeded in time, and the first line that it printed."""
    out, out_w = os.pipe2(os.O_CLOEXEC)
    try:
        pid = _spawn(command, out_w)
    finally:
        os.close(out_w)
    until = time.monotonic() + RUNTIME_S
    try:
        while pid > 0:
            try:
                ended, code = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                return False, ""
            if ended:
                return code == 0, os.read(out, 4096).decode("utf-8", "replace").partition("\n")[0]
            if time.monotonic() > until:
                os.kill(pid, _SIGKILL)
                until = float("inf")
            time.sleep(0.01)
        return False, ""
    finally:
        os.close(out)


def _spawn(command: list[str], out: int) -> int:
    """Start a program with its output there; return its pid, -1 when it cannot be started."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    try:
        return os.posix_spawnp(command[0], command, env, file_actions=actions)
    except OSError:
        return -1
    finally:
        os.close(null)
