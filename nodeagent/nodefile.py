"""What an operator writes about one node's isolation, containers and volumes (`gangline agent --config FILE`), described in docs/nodes.md.

Read like job files: nothing is guessed, and all problems are reported at once, each with its place.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from gangline.core.model.fields import (
    NAME,
    NAME_RULE,
    Fields,
    Reading,
    boolean,
    decode,
    duration,
    one_of,
    read_mapping,
    read_text,
    section,
    size,
    whole,
)
from gangline.core.model.problems import BadJob, Problem, child_pointer, show
from gangline.nodeagent.checks import Check

MAX_BYTES: Final = 256 * 1024
#: the words of `rlimits`; sizes are in bytes, cpu in seconds, as setrlimit has them
RLIMITS: Final[Mapping[str, int]] = {
    "core": resource.RLIMIT_CORE, "cpu": resource.RLIMIT_CPU, "data": resource.RLIMIT_DATA, "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "stack": resource.RLIMIT_STACK,
}  # fmt: skip
_UNLIMITED: Final = "unlimited"

RuntimeName = Literal["podman", "docker", "apptainer", "none"]


class RankRules(msgspec.Struct, frozen=True):
    """How ranks are kept apart on this node."""

    #: whether control groups are used at all
    cgroups: bool = True
    #: what is enforced of what a job asks for: its memory; its CPUs never exceeded ("quota") or only when all are busy ("share")
    memory: bool = True
    #: GPUs that a rank does not have are closed to it
    devices: bool = True
    cpus: Literal["none", "share", "quota"] = "none"
    #: processes and threads of one rank; 0 for no limit
    pids: int = 0
    #: the user of jobs that name none; "" for the agent's
    user: str = ""
    #: jobs that would run as the superuser are refused
    refuse_root: bool = False
    #: (resource, limit); -1 is unlimited
    rlimits: tuple[tuple[int, int], ...] = ()


class ContainerRules(msgspec.Struct, frozen=True):
    """How containers are run on this node."""

    #: "": the first of podman, docker and apptainer that there is
    runtime: RuntimeName | Literal[""] = ""
    #: put before the runtime's command, as --runtime=runc; and into each `run`, as --ulimit=nofile=1024:1024
    flags: tuple[str, ...] = ()
    run_flags: tuple[str, ...] = ()
    #: whether images that are not here are fetched
    pull: bool = True


class Volume(msgspec.Struct, frozen=True):
    """A folder of this node that jobs mount by its name."""

    path: str
    read_only: bool = False
    #: "server:/export" that has to be mounted at the path, or the volume is not there; "" for a plain folder
    nfs: str = ""


class NodeRules(msgspec.Struct, frozen=True):
    """The whole file."""

    ranks: RankRules = RankRules()
    containers: ContainerRules = ContainerRules()
    volumes: dict[str, Volume] = {}
    #: below them are the paths of the node that jobs may mount
    mount_paths: tuple[str, ...] = ("/",)
    #: a checkpoint directory with less free space is refused
    checkpoint_free_mib: int = 64
    #: the site's own checks of the node
    checks: tuple[Check, ...] = ()


def load(path: Path | None) -> NodeRules:
    """Return the rules in a file, the defaults for None. Raises BadJob with all its problems, OSError."""
    return NodeRules() if path is None else parse(path.read_bytes(), str(path))


def parse(text: bytes | str, filename: str = "") -> NodeRules:
    """Return the rules in the text of a file. Raises BadJob with all its problems."""
    from gangline.core.model.strict_yaml import load_yaml  # yaml is not needed where there is no file

    problems: list[Problem] = []
    try:
        documents = load_yaml(decode(text, MAX_BYTES), problems)
    except BadJob as bad:
        raise BadJob(bad.problems, filename) from None
    if len(documents) > 1:
        problems.append(Problem("", f"{len(documents):,} documents: the file of a node is one.", "GL-1110"))
    found: dict[str, Any] = {}
    if documents:
        reading = Reading(documents[0].places, documents[0].key_places, "a node file")
        found = read_mapping(reading, "", documents[0].value, _NODE) or {}
        problems += reading.problems
    if problems:
        raise BadJob(problems, filename)
    return NodeRules(**found)


def _path(reading: Reading, at: str, value: Any) -> str | None:
    text = read_text(reading, at, value, "a text, an absolute path", 4095)
    if text is None or (text.startswith("/") and text.isprintable() and ".." not in text.split("/")):
        return text if not text else "/" + "/".join(part for part in text.split("/") if part not in ("", "."))
    reading.refuse(at, "GL-1105", f'{show(text)} is not an absolute path without "..".')
    return None


def _texts(reading: Reading, at: str, value: Any) -> tuple[str, ...] | None:
    if type(value) is not list:
        reading.wrong(at, value, "a list of texts, as [--runtime, runc]")
        return None
    items = [read_text(reading, f"{at}/{i}", item, "a text", 4095) for i, item in enumerate(value)]
    return tuple(item for item in items if item is not None) if None not in items else None


def _paths(reading: Reading, at: str, value: Any) -> tuple[str, ...] | None:
    if type(value) is not list:
        reading.wrong(at, value, "a list of absolute paths, as [/data, /home]")
        return None
    items = [_path(reading, f"{at}/{i}", item) for i, item in enumerate(value)]
    return tuple(item for item in items if item is not None) if None not in items else None


def _user(reading: Reading, at: str, value: Any) -> str | None:
    if type(value) is int and value > 0:
        return str(value)
    return read_text(reading, at, value, "a text, the name of a user", 64)


def _rlimits(reading: Reading, at: str, value: Any) -> tuple[tuple[int, int], ...] | None:
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of limits, as {nofile: 65536, core: 0}")
        return None
    found = []
    for word, limit in value.items():
        where = child_pointer(at, str(word))
        if word not in RLIMITS:
            reading.refuse(where, "GL-1101", f"{show(word)} is not a limit; there are {', '.join(RLIMITS)}.", key=True)
        elif limit == _UNLIMITED:
            found.append((RLIMITS[word], resource.RLIM_INFINITY))
        elif type(limit) is int and 0 <= limit < 2**62:
            found.append((RLIMITS[word], limit))
        else:
            reading.wrong(where, limit, f"a whole number from 0 on, or {_UNLIMITED}")
    return tuple(found)


def _volumes(reading: Reading, at: str, value: Any) -> dict[str, Volume] | None:
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of names to volumes, as {datasets: {path: /mnt/datasets, read_only: true}}")
        return None
    found = {}
    for name, item in value.items():
        where = child_pointer(at, str(name))
        if type(name) is not str or not NAME.fullmatch(name):
            reading.refuse(where, "GL-1105", f"{show(name)} is not a name: {NAME_RULE}.", key=True)
            continue
        volume = read_mapping(reading, where, item, _VOLUME)
        if volume is not None and item.get("path") is None:
            reading.refuse(where, "GL-1103", "The volume has no path: the absolute path at which this node has it.")
        elif volume is not None and "path" in volume:
            found[name] = Volume(**volume)
    return found


def _checks(reading: Reading, at: str, value: Any) -> tuple[Check, ...] | None:
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of names to checks, as {disks: {command: [/usr/local/bin/check-disks], every: 60s}}")
        return None
    found = []
    for name, item in value.items():
        where = child_pointer(at, str(name))
        if type(name) is not str or not NAME.fullmatch(name):
            reading.refuse(where, "GL-1105", f"{show(name)} is not a name: {NAME_RULE}.", key=True)
            continue
        check = read_mapping(reading, where, item, _CHECK)
        if check is not None and not check.get("command") and not item.get("command"):
            reading.refuse(where, "GL-1103", "The check has no command: a list of texts, the first an absolute path.")
        elif check is not None and check.get("command"):
            if not check["command"][0].startswith("/"):
                reading.refuse(f"{where}/command", "GL-1105", f"{show(check['command'][0])} is not an absolute path.")
            found.append(Check(name, **check))
    return tuple(found)


_CHECK: Fields = {
    "command": ("command", _texts),
    "every": ("every_s", duration(1.0, 86_400.0)),
    "timeout": ("timeout_s", duration(0.1, 3600.0)),
}
_RANKS: Fields = {
    "cgroups": ("cgroups", boolean),
    "memory": ("memory", boolean),
    "devices": ("devices", boolean),
    "cpus": ("cpus", one_of("none", "share", "quota")),
    "pids": ("pids", whole(0, 4 << 20)),
    "user": ("user", _user),
    "refuse_root": ("refuse_root", boolean),
    "rlimits": ("rlimits", _rlimits),
}
_CONTAINERS: Fields = {
    "runtime": ("runtime", one_of("podman", "docker", "apptainer", "none")),
    "flags": ("flags", _texts),
    "run_flags": ("run_flags", _texts),
    "pull": ("pull", boolean),
}
_VOLUME: Fields = {
    "path": ("path", _path),
    "read_only": ("read_only", boolean),
    "nfs": ("nfs", lambda reading, at, value: read_text(reading, at, value, "a text, as server:/export", 4095)),
}
_NODE: Fields = {
    "ranks": ("ranks", section(RankRules, _RANKS)),
    "containers": ("containers", section(ContainerRules, _CONTAINERS)),
    "volumes": ("volumes", _volumes),
    "mount_paths": ("mount_paths", _paths),
    "checkpoint_free": ("checkpoint_free_mib", size(1, 1 << 30)),
    "checks": ("checks", _checks),
}
