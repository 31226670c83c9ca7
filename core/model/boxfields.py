"""The fields of a job file that say what its ranks run in: user, image, shm_size, mounts. Described for people in docs/jobfile.md."""

from __future__ import annotations

import re
from typing import Any, Final

from gangline.core.model.fields import NAME, NAME_RULE, Fields, Reader, Reading, boolean, read_mapping, read_text, size
from gangline.core.model.problems import show
from gangline.core.model.spec import JobSpec, Mount
from gangline.core.model.units import format_size

MAX_MOUNTS: Final = 64
MAX_PATH_BYTES: Final = 4_095
_USER = re.compile(r"[a-z_][a-z0-9_.-]{0,31}")
_USER_RULE: Final = "the name of a user (up to 32 of a-z, 0-9, _, . and -, no digit first) or a number from 1 on"
_MAX_UID: Final = 2**32 - 2
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9._/:@+-]{0,510}")
#: the command lines of container runtimes take these apart
_UNFIT: Final = frozenset(',:"')
#: a mount over one of these would take from the rank what the kernel and the node give it
_KEPT: Final = ("/proc", "/sys", "/dev")
#: /dev/shm is made by `shm_size`
read_shm = size(1, 4 << 20)


def read_user(reading: Reading, at: str, value: Any) -> str | None:
    """Read the user that ranks run as: a name, or a number as it is written; the superuser is refused."""
    if type(value) is int and 1 <= value <= _MAX_UID:
        return str(value)
    if type(value) is not str and type(value) is not int:
        reading.wrong(at, value, f"a text, {_USER_RULE}")
        return None
    if value == "":
        return None
    text = str(value)
    if text == "root" or (text.isdecimal() and not 1 <= int(text[:12]) <= _MAX_UID):
        reading.refuse(at, "GL-1105", f"{show(value)} is refused: no job makes its ranks run as the superuser; needed is {_USER_RULE}.")
    elif text.isascii() and (text.isdecimal() or _USER.fullmatch(text)):
        return text
    else:
        reading.refuse(at, "GL-1105", f"{show(value)} is not a user: needed is {_USER_RULE}.")
    return None


def read_image(reading: Reading, at: str, value: Any) -> str | None:
    """Read the reference of a container image, or the absolute path of an image file."""
    if type(value) is not str:
        reading.wrong(at, value, "a text, the name of an image, as registry.example/train:24.1")
    elif not value or _IMAGE.fullmatch(value):
        return value
    else:
        reading.refuse(at, "GL-1105", f"{show(value)} is not the name of an image: letters, digits and . _ / : @ + -, up to 511.")
    return None


def mounts_reader(absolute: Reader) -> Reader:
    """Read the list of what ranks see at other places; `absolute` reads an absolute path."""

    def source(reading: Reading, at: str, value: Any) -> str | None:
        """An absolute path of the node, or the name of a volume, with a path below it after a slash."""
        if type(value) is str and value and not value.startswith("/"):
            volume, _, below = value.partition("/")
            if NAME.fullmatch(volume) and (not below or _is_plain(below)):
                return value if read_text(reading, at, value, "a text", MAX_PATH_BYTES) else None
            message = f"{show(value)} is neither an absolute path nor a volume: {NAME_RULE}, and after a slash a path below it."
            reading.refuse(at, "GL-1105", message)
            return None
        return _fit(reading, at, absolute(reading, at, value))

    def target(reading: Reading, at: str, value: Any) -> str | None:
        path = _fit(reading, at, absolute(reading, at, value))
        if path is not None and (path == "/" or any(path == kept or path.startswith(f"{kept}/") for kept in _KEPT)):
            reading.refuse(at, "GL-1105", f"{show(path)} cannot be mounted over: /, /proc, /sys and /dev are the node's.")
            return None
        return path

    fields: Fields = {"source": ("source", source), "target": ("target", target), "read_only": ("read_only", boolean)}

    def read(reading: Reading, at: str, value: Any) -> tuple[Mount, ...] | None:
        if type(value) is not list:
            reading.wrong(at, value, "a list of mounts, as [{source: datasets, target: /data, read_only: true}]")
            return None
        if len(value) > MAX_MOUNTS:
            reading.refuse(at, "GL-1110", f"{len(value):,} mounts are more than the limit of {MAX_MOUNTS}.")
            return None
        found = [_mount(reading, f"{at}/{i}", item, fields) for i, item in enumerate(value)]
        mounts = [one for one in found if one is not None]
        seen: set[str] = set()
        for i, one in enumerate(found):
            if one is not None and one.target in seen:
                reading.refuse(f"{at}/{i}/target", "GL-1108", f"{show(one.target)} is the target of two mounts.")
            elif one is not None:
                seen.add(one.target)
        return tuple(mounts) if len(mounts) == len(found) else None

    return read


def _mount(reading: Reading, at: str, value: Any, fields: Fields) -> Mount | None:
    found = read_mapping(reading, at, value, fields)
    if found is None:
        return None
    if "source" not in found:
        if value.get("source") is None:
            reading.refuse(at, "GL-1103", "The mount has no source: an absolute path of the node, or the name of a volume.")
        return None
    if "target" not in found:
        if value.get("target") is not None:
            return None
        if not found["source"].startswith("/"):
            reading.refuse(at, "GL-1103", "The mount has no target: the absolute path at which ranks see the volume.")
            return None
        found["target"] = found["source"]
    return Mount(**found)


def _is_plain(path: str) -> bool:
    """Whether a path below a volume has nothing in it that leads out of it, or that a command line takes apart."""
    return path.isprintable() and not (_UNFIT & set(path)) and not {"", ".", ".."} & set(path.removesuffix("/").split("/"))


def _fit(reading: Reading, at: str, path: str | None) -> str | None:
    if path and _UNFIT & set(path):
        reading.refuse(at, "GL-1105", f"{show(path)} has a comma, a colon or a quote in it, which container runtimes take apart.")
        return None
    return path or None


def check(reading: Reading, spec: JobSpec) -> None:
    """The job as a whole: fields of containers beside an image, and a checkpoint directory that can be written."""
    if spec.shm_mib and not spec.image:
        reading.refuse("/shm_size", "GL-1108", "shm_size is for containers; processes have the node's /dev/shm. Give an image, or leave it out.")
    if spec.checkpoint.path.startswith("/"):
        over = [m for m in spec.mounts if f"{spec.checkpoint.path}/".startswith(f"{m.target}/")]
        if over and max(over, key=lambda m: len(m.target)).read_only:
            reading.refuse("/checkpoint/path", "GL-1108", "The checkpoint directory is on a read-only mount: nothing could be saved there.")


def words(spec: JobSpec) -> dict[str, Any]:
    """Return these fields in the job file's words; empty where they are not given."""
    return {
        "user": spec.user,
        "image": spec.image,
        "shm_size": format_size(spec.shm_mib) if spec.shm_mib else "",
        "mounts": [
            {"source": m.source, "target": m.target, **({"read_only": True} if m.read_only else {})} for m in spec.mounts
        ],
    }  # fmt: skip
