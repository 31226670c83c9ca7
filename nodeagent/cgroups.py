"""Control groups of this host: what there is (v2, v1 or both at once), and what group a rank gets for the limits that are wanted.

    <the agent's own group>/gangline-<identity>/<job>@<generation>.<rank>

in the v2 hierarchy, and in the v1 hierarchy of each controller that v2 does not have. The groups are made by the rank's supervisor
(boxed.py), for which `Layout.of_rank` says what to write where; ranks without limits have none.

On a hybrid host v2 has no controllers, but its `cgroup.kill` still ends a whole tree at once; v1 has to be emptied process by process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gangline.nodeagent import deviceaccess

#: those that limits are made of; blkio is v1's word for io
CONTROLLERS = ("memory", "pids", "cpu", "io")
_V1_NAMES = {"blkio": "io"}
#: where an agent moves itself in v2, where a group with processes cannot have children with controllers
AGENT_GROUP = "gangline-agent"
_CPU_PERIOD_US = 100_000


class Limits(msgspec.Struct, frozen=True):
    """What one rank may use; 0 is no limit."""

    memory_mib: int = 0
    pids: int = 0
    #: thousandths of CPUs: never more (`cpu_quota`), or its part when all are busy (`cpu_share`)
    cpu_quota_milli: int = 0
    cpu_share_milli: int = 0
    #: character devices, as (major, minor), that it cannot open: GPUs of others
    denied: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.memory_mib or self.pids or self.cpu_quota_milli or self.cpu_share_milli or self.denied)


class Group(msgspec.Struct, frozen=True):
    """A group to make: `base` first, with what is written there, then `path`. (file, value, needed) each; what is not needed may be missing."""

    base: str
    base_writes: tuple[tuple[str, str, bool], ...]
    path: str
    writes: tuple[tuple[str, str, bool], ...]
    #: see Limits
    denied: tuple[tuple[int, int], ...] = ()


class Layout(msgspec.Struct, frozen=True):
    """The hierarchies of this host that this agent can make groups in. Directories are absolute."""

    #: the agent's own group in v2, "" when v2 is not there or not ours to change; and the controllers that children of it can have
    v2: str = ""
    v2_controllers: tuple[str, ...] = ()
    #: the same by controller in v1
    v1: dict[str, str] = {}
    #: why nothing can be limited here, "" when something can
    reason: str = ""
    #: the group below which devices can be denied: v1's, else v2's; "" where the kernel does not let us
    devices: str = ""

    @property
    def controllers(self) -> tuple[str, ...]:
        """What can be limited."""
        return tuple(c for c in CONTROLLERS if c in self.v2_controllers or c in self.v1)

    @property
    def words(self) -> str:
        """How control groups are here, for people."""
        if not self.controllers:
            return f"none ({self.reason or 'no controller'})"
        kind = "v2" if not self.v1 else "v1" if not self.v2 else "hybrid"
        return f"{kind}: {', '.join(self.controllers)}"

    def of_rank(self, base: str, name: str, limits: Limits) -> tuple[Group, ...]:
        """Return the groups of a rank with these limits; those that cannot be kept here are left out, see `missing`."""
        wanted = _wanted(limits)
        directories: dict[str, list[str]] = {}
        for controller in wanted:
            if controller in self.v2_controllers:
                directories.setdefault(self.v2, []).append(controller)
            elif controller in self.v1:
                directories.setdefault(self.v1[controller], []).append(controller)
        if limits.denied and self.devices:
            directories.setdefault(self.devices, [])
        if directories and self.v2:
            directories.setdefault(self.v2, [])  # to kill by
        groups = []
        for directory, controllers in directories.items():
            is_v2 = directory == self.v2
            writes = tuple(w for c in controllers for w in (_v2_writes if is_v2 else _v1_writes)(c, limits))
            enabled = " ".join(f"+{c}" for c in controllers)
            above = (("cgroup.subtree_control", enabled, True),) if is_v2 and controllers else ()
            denied = limits.denied if directory == self.devices else ()
            groups.append(Group(f"{directory}/{base}", above, f"{directory}/{base}/{name}", writes, denied))
        return tuple(groups)

    def missing(self, limits: Limits) -> tuple[str, ...]:
        """Return the controllers that these limits need and that are not here."""
        return tuple(c for c in _wanted(limits) if c not in self.controllers)


def _wanted(limits: Limits) -> list[str]:
    wanted = {"memory": limits.memory_mib, "pids": limits.pids, "cpu": limits.cpu_quota_milli or limits.cpu_share_milli}
    return [controller for controller, value in wanted.items() if value]


def _v2_writes(controller: str, limits: Limits) -> tuple[tuple[str, str, bool], ...]:
    if controller == "memory":
        # A rank that has lost one of its processes is of no use to its gang: all of it goes.
        return ("memory.max", str(limits.memory_mib << 20), True), ("memory.swap.max", "0", False), ("memory.oom.group", "1", False)
    if controller == "pids":
        return (("pids.max", str(limits.pids), True),)
    quota = f"{limits.cpu_quota_milli * _CPU_PERIOD_US // 1000} {_CPU_PERIOD_US}"
    share = str(max(1, min(10_000, limits.cpu_share_milli // 10)))
    return ((("cpu.max", quota, True),) if limits.cpu_quota_milli else ()) + ((("cpu.weight", share, True),) if limits.cpu_share_milli else ())


def _v1_writes(controller: str, limits: Limits) -> tuple[tuple[str, str, bool], ...]:
    if controller == "memory":
        size = str(limits.memory_mib << 20)
        return ("memory.limit_in_bytes", size, True), ("memory.memsw.limit_in_bytes", size, False)
    if controller == "pids":
        return (("pids.max", str(limits.pids), True),)
    quota = str(max(1000, limits.cpu_quota_milli * _CPU_PERIOD_US // 1000))
    share = str(max(2, limits.cpu_share_milli * 1024 // 1000))
    return ((("cpu.cfs_quota_us", quota, True),) if limits.cpu_quota_milli else ()) + (
        (("cpu.shares", share, True),) if limits.cpu_share_milli else ()
    )


# ---------------------------------------------------------------- detection


def detect(mountinfo: str, own: str) -> Layout:
    """Return the layout that /proc/self/mountinfo and /proc/self/cgroup describe, as far as its directories can be written."""
    mounts = _mounts(mountinfo)
    groups = _own_groups(own)
    v2 = _own_directory(mounts.get("", ("", "")), groups.get("", ""))
    v1: dict[str, str] = {}
    for name, group in groups.items():
        controller = _V1_NAMES.get(name, name)
        if name and controller in CONTROLLERS and name in mounts:
            directory = _own_directory(mounts[name], group)
            if directory:
                v1[controller] = directory
    devices = _own_directory(mounts.get("devices", ("", "")), groups.get("devices", "")) or v2
    controllers: tuple[str, ...] = ()
    if v2:
        known = _read(f"{v2}/cgroup.controllers").split()
        controllers = tuple(c for c in CONTROLLERS if c in known and c not in v1)
    if not v2 and not v1:
        return Layout(reason="this agent may not make any" if mounts else "they are not mounted")
    return Layout(v2, controllers, v1, devices=devices)


def here() -> Layout:
    """Return the layout of this process."""
    return detect(_read("/proc/self/mountinfo"), _read("/proc/self/cgroup"))


def guarding(layout: Layout) -> Layout:
    """Return the layout without `devices` where the kernel does not let us keep any from a group of v2."""
    if layout.devices and layout.devices == layout.v2 and deviceaccess.refusal():
        return msgspec.structs.replace(layout, devices="")
    return layout


def delegate(layout: Layout) -> Layout:
    """Make room in v2: enable the controllers for children of the agent's own group, which has to have no processes of its own for that.

    Returns the layout without what could not be had. The root of the hierarchy is exempt from the rule.
    """
    if not layout.v2_controllers:
        return layout
    wanted = " ".join(f"+{c}" for c in layout.v2_controllers)
    try:
        if os.path.exists(f"{layout.v2}/cgroup.type"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{layout.v2}/{AGENT_GROUP}")
            for pid in _read(f"{layout.v2}/cgroup.procs").split():
                with contextlib.suppress(ProcessLookupError):
                    _write(f"{layout.v2}/{AGENT_GROUP}/cgroup.procs", pid)
        _write(f"{layout.v2}/cgroup.subtree_control", wanted)
    except OSError as e:
        reason = f"the controllers of {layout.v2} are not delegated to it: {e.strerror}; with systemd, give its unit Delegate=yes"
        return msgspec.structs.replace(layout, v2_controllers=(), reason=reason)
    return layout


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Return (root inside the hierarchy, mount point) by v1 controller; v2 by the empty name."""
    found: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        fields, kind = head.split(), tail.split()
        if len(fields) < 6 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.setdefault("", (fields[3], fields[4]))
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                found.setdefault(option, (fields[3], fields[4]))
    return found


def _own_groups(own: str) -> Mapping[str, str]:
    """Return the path of our group by v1 controller; in v2 by the empty name."""
    found: dict[str, str] = {}
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _own_directory(mount: tuple[str, str], group: str) -> str:
    """Return the directory of a group, "" when there is none that we may make children in."""
    root, point = mount
    if not point or not group.startswith("/"):
        return ""
    below = group.removeprefix(root.rstrip("/")) if root != "/" and f"{group}/".startswith(f"{root}/") else group
    # An agent that has moved itself aside, and its successor from the same shell, are children of the group that is meant.
    path = os.path.normpath(f"{point}/{below}".removesuffix(f"/{AGENT_GROUP}"))
    if not os.path.isdir(path):
        path = point
    return path if os.access(path, os.W_OK | os.X_OK) and _is_writable_mount(path) else ""


def _is_writable_mount(path: str) -> bool:
    with contextlib.suppress(OSError):
        return not os.statvfs(path).f_flag & os.ST_RDONLY
    return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
