"""What stands around a rank, decided by the agent and built by its supervisor (boxed.py): from a job's spec and the node's rules.

A rank of the agent's own user, without limits, mounts or image has no box: it costs nothing.
"""

from __future__ import annotations

import os
import pwd

import msgspec

from gangline.core.model.documents import DesiredRank
from gangline.core.model.roles import of_role
from gangline.core.model.spec import JobSpec
from gangline.nodeagent.cgroups import Group, Layout, Limits
from gangline.nodeagent.nodefile import NodeRules


class Refused(Exception):
    """The job cannot run on this node; the message says why, for people."""


class User(msgspec.Struct, frozen=True):
    """An account of this node, as the kernel and programs know it."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


class Container(msgspec.Struct, frozen=True):
    """What the supervisor has to know of a rank's container. Its command is the launch's: the runtime's `run`, in the foreground."""

    #: "docker" has its containers under a daemon instead of below the supervisor
    runtime: str
    #: the runtime and its flags
    program: tuple[str, ...]
    name: str
    #: where the environment is written for the runtime to read, relative to the state directory, and what it is
    env_file: str
    env_text: str


class Box(msgspec.Struct, frozen=True):
    """What a supervisor is told, see boxed.py."""

    groups: tuple[Group, ...] = ()
    #: None: the supervisor's own
    user: User | None = None
    #: uid and gid whose the private working directory is to be; None: the supervisor's
    owner: tuple[int, int] | None = None
    #: (resource, soft, hard)
    rlimits: tuple[tuple[int, int, int], ...] = ()
    #: (source, target, read only), outer ones first
    mounts: tuple[tuple[str, str, bool], ...] = ()
    memory_mib: int = 0
    container: Container | None = None


def find_user(name: str) -> User:
    """Return an account by its name or number. May ask a directory on the network. Raises Refused."""
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except KeyError:
        if not name.isdecimal():
            raise Refused(f"this node has no user {name}") from None
        return User(name, int(name), int(name), (int(name),), "/", "/bin/sh")
    except OSError as e:
        raise Refused(f"the user {name} cannot be looked up: {e.strerror}") from None
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir or "/", entry.pw_shell or "/bin/sh")


def user_of(spec: JobSpec, rules: NodeRules) -> User | None:
    """Return whom the job's ranks run as here, None for the agent's own user. May wait for a directory service. Raises Refused."""
    name = spec.user or rules.ranks.user
    me = os.geteuid()
    user = find_user(name) if name else None
    if user is not None and user.uid == 0 and spec.user:
        raise Refused(f"{spec.user} is the superuser here: ranks do not run as that because a job says so")
    if user is not None and user.uid == me:
        user = None
    if user is not None and me != 0:
        agent = pwd.getpwuid(me).pw_name if _is_known(me) else str(me)
        raise Refused(f"ranks cannot run as {user.name}: the agent of this node runs as {agent}, and only root may change to another user")
    if rules.ranks.refuse_root and (me if user is None else user.uid) == 0:
        raise Refused("this node does not run ranks as the superuser: name a user in the job (user), or give the node a default one")
    return user


def limits_of(spec: JobSpec, rank: DesiredRank, rules: NodeRules) -> Limits:
    """Return what a rank may use."""
    what, ours = of_role(spec, rank.role).resources, rules.ranks
    return Limits(
        memory_mib=what.memory_mib if ours.memory else 0,
        pids=ours.pids,
        cpu_quota_milli=what.cpus_milli if ours.cpus == "quota" else 0,
        cpu_share_milli=what.cpus_milli if ours.cpus == "share" else 0,
    )


def groups_of(layout: Layout, base: str, name: str, limits: Limits, rules: NodeRules) -> tuple[Group, ...]:
    """Return the control groups of a rank; none where nothing is limited."""
    return layout.of_rank(base, name, limits) if limits and rules.ranks.cgroups else ()


def _is_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
