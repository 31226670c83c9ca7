"""The storage that a job wants, found and tried out before anything of it starts: mounts, volumes, the working and checkpoint directories.

    resolve   what is to be mounted where, by the node's rules. Pure.
    check     whether it is there and can be used, with the rights of the job's user: in a process of its own (probe.py), because a file
              system that hangs must not hang the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gangline.core.model.spec import JobSpec, Mount
from gangline.nodeagent.isolation import Refused, User
from gangline.nodeagent.nodefile import NodeRules, Volume

#: a file system that has not answered by then is taken for one that hangs
PROBE_S = 20.0
_BOOT = """
import sys
for name, path in (("gangline", []), ("gangline.nodeagent", [sys.argv[1]])):
    sys.modules[name] = module = type(sys)(name)
    module.__path__ = path
from gangline.nodeagent.probe import main
main()
"""
#: (source, target, read only)
Mounted = tuple[str, str, bool]


class Wants(msgspec.Struct, frozen=True):
    """What is to be looked at, for `probe.py`; paths as the node has them."""

    #: (what people call it, path)
    readable: tuple[tuple[str, str], ...] = ()
    writable: tuple[tuple[str, str], ...] = ()
    #: places that have to be there to be mounted over
    targets: tuple[str, ...] = ()
    workdir: str = ""
    #: made when it is missing
    checkpoint: str = ""
    free_mib: int = 0
    job: str = ""
    generation: int = 0

    def __bool__(self) -> bool:
        return bool(self.readable or self.writable or self.targets or self.workdir or self.checkpoint)


def resolve(mounts: tuple[Mount, ...], rules: NodeRules, mounted: Mapping[str, str]) -> tuple[Mounted, ...]:
    """Return what to mount, outer targets first. `mounted`: mount point to what is mounted there. Raises Refused with all the reasons."""
    found, reasons = [], []
    for mount in mounts:
        try:
            source, read_only = _source(mount, rules, mounted)
            found.append((source, mount.target, read_only))
        except Refused as e:
            reasons.append(str(e))
    if reasons:
        raise Refused("; ".join(reasons))
    return tuple(sorted(found, key=lambda m: m[1].count("/")))


def _source(mount: Mount, rules: NodeRules, mounted: Mapping[str, str]) -> tuple[str, bool]:
    if mount.source.startswith("/"):
        if not any(is_below(mount.source, allowed) for allowed in rules.mount_paths):
            allowed = ", ".join(rules.mount_paths) or "none"
            raise Refused(f"this node lets no job mount {mount.source}; paths that may be mounted: {allowed}")
        return mount.source, mount.read_only
    name, _, below = mount.source.partition("/")
    volume = rules.volumes.get(name)
    if volume is None:
        known = ", ".join(rules.volumes) or "none"
        raise Refused(f"this node has no volume {name}; it has {known}")
    if volume.read_only and not mount.read_only:
        raise Refused(f"volume {name} is read only on this node: mount it with read_only: true")
    _check_nfs(name, volume, mounted)
    return f"{volume.path}/{below}".rstrip("/"), mount.read_only


def _check_nfs(name: str, volume: Volume, mounted: Mapping[str, str]) -> None:
    if volume.nfs and mounted.get(volume.path) != volume.nfs:
        there = mounted.get(volume.path, "")
        what = f"{there} is mounted there" if there else "nothing is mounted there"
        raise Refused(f"volume {name} should be {volume.nfs} at {volume.path} on this node, but {what}")


def mount_points(mountinfo: str) -> dict[str, str]:
    """Return mount point to what is mounted there (`server:/export` for NFS), by /proc/self/mountinfo. The last mount on a point counts."""
    found = {}
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) >= 5 and len(kind) >= 2:
            found[_unescape(fields[4])] = _unescape(kind[1])
    return found


def _unescape(text: str) -> str:
    for escaped, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escaped, plain)
    return text


def is_below(path: str, folder: str) -> bool:
    """Whether a path is a folder or in it, as texts."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def on_node(path: str, mounts: tuple[Mounted, ...]) -> str:
    """Return where the node has what ranks see at a path."""
    over = [m for m in mounts if is_below(path, m[1])]
    if not over:
        return path
    source, target, _ = max(over, key=lambda m: len(m[1]))
    return source + path[len(target) :]


def wants_of(job: str, generation: int, spec: JobSpec, mounts: tuple[Mounted, ...], rules: NodeRules) -> Wants:
    """Return what has to be there for a job."""
    checkpoint = spec.checkpoint.path if spec.checkpoint.path.startswith("/") else ""
    return Wants(
        readable=tuple((f"mount {target}", source) for source, target, read_only in mounts if read_only),
        writable=tuple((f"mount {target}", source) for source, target, read_only in mounts if not read_only),
        # A container has places of its own; on the node they have to be there.
        targets=() if spec.image else tuple(target for _, target, _ in mounts),
        workdir="" if spec.image or not spec.workdir else on_node(spec.workdir, mounts),
        checkpoint=on_node(checkpoint, mounts) if checkpoint else "",
        free_mib=rules.checkpoint_free_mib, job=job, generation=generation,
    )  # fmt: skip


async def check(wants: Wants, user: User | None) -> None:
    """Try it out as the user. Raises Refused with all that is wrong, OSError when that cannot be found out."""
    if not wants:
        return
    request = msgspec.json.encode({"user": msgspec.to_builtins(user), "wants": msgspec.to_builtins(wants)})
    command = [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parent)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        async with asyncio.timeout(PROBE_S):
            out, err = await process.communicate(request)
    except TimeoutError:
        raise Refused(f"a file system does not answer within {PROBE_S:g} s: {_places(wants)}") from None
    finally:
        if process.returncode is None:
            # One that waits for a dead server cannot be killed yet; the event loop takes its end whenever that comes.
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.wait_for(process.wait(), 1.0)
    if process.returncode != 0:
        raise OSError(f"storage cannot be looked at: {err.decode('utf-8', 'replace').strip()[-300:]}")
    problems = out.decode("utf-8", "replace").splitlines()
    if problems:
        raise Refused("; ".join(problems))


def _places(wants: Wants) -> str:
    paths = [path for _, path in (*wants.readable, *wants.writable)] + [p for p in (wants.workdir, wants.checkpoint) if p]
    return ", ".join(dict.fromkeys(paths))
