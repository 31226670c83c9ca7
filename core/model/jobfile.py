"""From what people write to a JobSpec, and back. DESIGN section 7; the fields are described for people in docs/jobfile.md.

    text ── strict_yaml / strict_json ──▶ plain objects ── the tables below ──▶ JobSpec ── to_json ──▶ plain objects

Nothing is guessed and nothing is passed over: an unknown field, a value of another type, a number past a bound is a problem, and all problems
of a job are reported at once, each with its place. A reader is a function (reading, pointer, value) → the spec's value, or None after it has
reported what is wrong. A null is a field that was not given.

Bounds are wide enough for the largest clusters there are and narrow enough that a slip (a GPU count of 10⁹) is refused at the door instead of
waiting for ever. Priorities end at 1,000,000, which leaves room for scores that a site computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from gangline.core.model.nearest import nearest
from gangline.core.model.problems import MAX_PROBLEMS, BadJob, Odd, Problem, child_pointer, show, show_text
from gangline.core.model.spec import Checkpoint, Gang, JobSpec, Preemption, Resources, Restart
from gangline.core.model.strict_json import load_json
from gangline.core.model.units import format_duration, format_size, nearest_size, parse_duration, parse_size

MAX_BYTES: Final = 256 * 1024
#: documents in one file, and the most that a batch submission takes
MAX_JOBS: Final = 1_000
MAX_RANKS: Final = 100_000
MAX_ARGS: Final = 4_096
#: Linux refuses to start a program with an argument or variable of 128 KiB (MAX_ARG_STRLEN)
MAX_ARG_BYTES: Final = 131_071
MAX_ENV: Final = 512
MAX_ENV_VALUE_BYTES: Final = 32 * 1024
MAX_ENV_BYTES: Final = 128 * 1024
MAX_PATH_BYTES: Final = 4_095
#: a job below it is preemptible unless it says otherwise
PREEMPTIBLE_BELOW: Final = 100

DAY_S: Final = 86_400.0

Places = Mapping[str, tuple[int, int]]


def parse_json_spec(source: object) -> JobSpec:
    """Return the spec that a JSON text (bytes or str) or an already decoded object describes. Raises BadJob."""
    if isinstance(source, bytes | str):
        source = load_json(source, MAX_BYTES)
    reading = _Reading({}, {})
    spec = _job(reading, source)
    if reading.problems or spec is None:
        raise BadJob(reading.problems)
    return spec


def parse_yaml(text: bytes | str, filename: str = "") -> list[JobSpec]:
    """Return the specs of a job file, one for each of its documents and at least one. Raises BadJob with the problems of all documents."""
    from gangline.core.model.strict_yaml import load_yaml  # yaml is not needed where only JSON is read

    problems: list[Problem] = []
    try:
        documents = load_yaml(_decode(text), problems)
    except BadJob as bad:
        raise BadJob(bad.problems, filename) from None
    if not documents and not problems:
        problems.append(Problem("", "The file is empty; the smallest job is `command: [python, train.py]`.", "GL-1001"))
    if len(documents) > MAX_JOBS:
        problems.append(Problem("", f"{len(documents):,} jobs in one file are more than the limit of {MAX_JOBS:,}.", "GL-1110"))
    specs: list[JobSpec] = []
    for document in documents[:MAX_JOBS]:
        reading = _Reading(document.places, document.key_places)
        spec = _job(reading, document.value)
        problems += reading.problems
        if spec is not None:
            specs.append(spec)
    if problems:
        problems.sort(key=lambda p: (p.line or 0, p.column or 0))
        raise BadJob(problems[:MAX_PROBLEMS], filename)
    return specs


def to_json(spec: JobSpec) -> dict[str, Any]:
    """Return the spec in the job file's words with every default written out; `parse_json_spec` reads the same spec back from it."""
    words: dict[str, Any] = {
        "name": spec.name,
        "queue": spec.queue,
        "priority": spec.priority,
        "preemptible": spec.preemptible,
        "gang": {"ranks": spec.gang.ranks, "min_ranks": spec.gang.min_ranks, "ranks_per_node": spec.gang.ranks_per_node},
        "resources": {
            "gpus": spec.resources.gpus,
            "gpu_model": list(spec.resources.gpu_models),
            "cpus": _cpus_word(spec.resources.cpus_milli),
            "memory": format_size(spec.resources.memory_mib) if spec.resources.memory_mib else "",
        },
        "time_limit": _duration_word(spec.time_limit_s) if spec.time_limit_s else "",
        "command": list(spec.command),
        "env": dict(spec.env),
        "workdir": spec.workdir,
        "checkpoint": {
            "path": spec.checkpoint.path,
            "interval": _duration_word(spec.checkpoint.interval_s) if spec.checkpoint.interval_s else "",
        },
        "restart": _restart_words(spec.restart),
        "preemption": {"signal": spec.preemption.signal, "grace": _duration_word(spec.preemption.grace_s)},
        "on_disconnect": spec.on_disconnect,
    }
    return _without_empties(words)


# ---------------------------------------------------------------- reading


class _Reading:
    """The problems of one document, and where its values stand."""

    __slots__ = ("_key_places", "_places", "problems")

    def __init__(self, places: Places, key_places: Places) -> None:
        self.problems: list[Problem] = []
        self._places = places
        self._key_places = key_places

    def refuse(self, at: str, code: str, message: str, near: str = "", *, key: bool = False) -> None:
        """Note a problem with the value at a pointer, or with its key."""
        if len(self.problems) >= MAX_PROBLEMS:
            return
        place = (self._key_places if key else self._places).get(at) or self._places.get(at) or self._places.get("")
        line, column = place or (None, None)
        self.problems.append(Problem(at, message, code, near, line, column))

    def wrong(self, at: str, value: object, rule: str) -> None:
        """Note that a value is of another type than the field's."""
        if isinstance(value, Odd):
            self.refuse(at, "GL-1102", f"{show(value)} is {value.kind}; needed is {rule}. Put a text in quotes, write a number in plain digits.")
        elif rule.startswith("a text") and isinstance(value, bool | int | float):
            kind = "true or false" if isinstance(value, bool) else "a number"
            self.refuse(at, "GL-1102", f"{show(value)} is {kind}; needed is {rule}. Put it in quotes.", f'"{show(value)}"')
        elif isinstance(value, str) and rule.startswith(("a whole number", "a number", "true")) and _UNQUOTABLE.fullmatch(value):
            self.refuse(at, "GL-1102", f"{show(value)} is a text; needed is {rule}. Leave the quotes out.", value)
        else:
            self.refuse(at, "GL-1102", f"{show(value)} is not {rule}.")


_UNQUOTABLE = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?|true|false")

Reader = Callable[[_Reading, str, Any], Any]
#: word in the file → (attribute of the spec, reader)
Fields = Mapping[str, tuple[str, Reader]]
#: word of a field that this version does not have → what to say
Later = Mapping[str, str]
_NOTHING_LATER: Later = {}


def _mapping(reading: _Reading, at: str, value: Any, fields: Fields, later: Later) -> dict[str, Any] | None:
    """Read a mapping by a table of fields; return the attributes that were given and are right."""
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of fields")
        return None
    found: dict[str, Any] = {}
    for word, item in value.items():
        field = fields.get(word)
        if field is None:
            _no_such_field(reading, at, word, item, fields, later)
        elif item is not None:
            attribute, reader = field
            result = reader(reading, f"{at}/{word}", item)
            if result is not None:
                found[attribute] = result
    return found


def _no_such_field(reading: _Reading, at: str, word: object, item: object, fields: Fields, later: Later) -> None:
    text = word if isinstance(word, str) else str(type(word).__name__)
    pointer = child_pointer(at, text if len(text) <= 100 else f"{text[:100]}...")
    if text in later:
        if item is not None and item != [] and item != {} and item != "":
            reading.refuse(pointer, "GL-1109", later[text], key=True)
        return
    where = f"`{at[1:].replace('/', '.')}`" if at else "a job"
    near = nearest(text, fields)
    known = "" if near else f"; its fields are {', '.join(fields)}"
    reading.refuse(pointer, "GL-1101", f'"{show_text(text)}" is not a field of {where}{known}.', near, key=True)


def _section(make: Callable[..., Any], fields: Fields, later: Later = _NOTHING_LATER) -> Reader:
    def read(reading: _Reading, at: str, value: Any) -> Any:
        found = _mapping(reading, at, value, fields, later)
        return None if found is None else make(**found)

    return read


def _whole(low: int, high: int, note: str = "") -> Reader:
    rule = f"a whole number from {low:,} to {high:,}"

    def read(reading: _Reading, at: str, value: Any) -> int | None:
        if type(value) is not int:
            reading.wrong(at, value, rule)
            return None
        if low <= value <= high:
            return value
        hint = f" {note}" if note and value == 0 else ""
        reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.{hint}")
        return None

    return read


def _boolean(reading: _Reading, at: str, value: Any) -> bool | None:
    if type(value) is bool:
        return value
    reading.wrong(at, value, "true or false")
    return None


def _one_of(*words: str) -> Reader:
    rule = f"a text, one of {', '.join(words)}"

    def read(reading: _Reading, at: str, value: Any) -> str | None:
        if type(value) is not str:
            reading.wrong(at, value, rule)
        elif value in words:
            return value
        else:
            reading.refuse(at, "GL-1106", f"{show(value)} is not one of {', '.join(words)}.", nearest(value, words))
        return None

    return read


def _text(reading: _Reading, at: str, value: Any, rule: str, limit: int) -> str | None:
    """Read a text that the kernel can take: no NUL, encodable, bounded in bytes."""
    if type(value) is not str:
        reading.wrong(at, value, rule)
        return None
    if "\0" in value:
        reading.refuse(at, "GL-1111", f"{show(value)} has a NUL character, which no program can be given.")
        return None
    size = len(value)
    if not value.isascii():
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            reading.refuse(at, "GL-1111", f"{show(value)} has half of a surrogate pair and cannot be written as UTF-8.")
            return None
    if size > limit:
        reading.refuse(at, "GL-1110", f"A text of {size:,} bytes is longer than the limit of {limit:,}.")
        return None
    return value


_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_NAME_RULE = "1 to 64 of a-z, 0-9, dot, underscore and hyphen, first and last a letter or digit"


def _name(reading: _Reading, at: str, value: Any) -> str | None:
    if type(value) is not str:
        reading.wrong(at, value, "a text")
    elif not value or _NAME.fullmatch(value):
        return value
    else:
        reading.refuse(at, "GL-1105", f"{show(value)} is not a name: {_NAME_RULE}.", _nearest_name(value))
    return None


def _nearest_name(value: str) -> str:
    guess = re.sub(r"[^a-z0-9._-]+", "-", value[:64].lower()).strip("-._")
    return guess if len(value) <= 64 and guess and "/" not in value else ""


def _queue(reading: _Reading, at: str, value: Any) -> str | None:
    if type(value) is not str:
        reading.wrong(at, value, "a text")
        return None
    parts = value.split("/", 9)
    if len(parts) <= 8 and all(_NAME.fullmatch(part) for part in parts):
        return value
    reading.refuse(at, "GL-1105", f"{show(value)} is not a queue: up to 8 names with a slash between them, each {_NAME_RULE}.")
    return None


def _duration(low: float, high: float, *, zero: str = "") -> Reader:
    """Read a duration. `zero` says what a 0 means; without it, a 0 is refused unless `low` is 0."""
    rule = f'"24h", "90m", "1h30m" or a number of seconds, from {format_duration(low)} to {format_duration(high)}'
    if zero:
        rule = f"{rule}, or 0 {zero}"

    def read(reading: _Reading, at: str, value: Any) -> float | None:
        if type(value) is str:
            if not value:
                return None
            seconds = parse_duration(value)
            if seconds is None:
                lower = value.lower().replace(" ", "")
                near = lower if lower != value and parse_duration(lower) is not None else ""
                reading.refuse(at, "GL-1105", f"{show(value)} is not a duration: needed is {rule}.", near)
                return None
        elif type(value) is int or (type(value) is float and math.isfinite(value)):
            seconds = float(value) if -(10**15) < value < 10**15 else math.inf
        else:
            reading.wrong(at, value, f"a duration: {rule}")
            return None
        if low <= seconds <= high or (zero and seconds == 0):
            return seconds
        hint = "" if seconds else " Leave the field out for none."
        reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.{hint}")
        return None

    return read


def _memory(reading: _Reading, at: str, value: Any) -> int | None:
    rule = 'a size with its unit MiB, GiB or TiB, as "64GiB", from 1MiB to 64TiB'
    if type(value) is not str:
        if type(value) is int and 0 < value < 10**9:
            reading.refuse(at, "GL-1105", f"{value} has no unit: needed is {rule}.", f"{value}GiB" if value <= 4096 else f"{value}MiB")
        else:
            reading.wrong(at, value, rule)
        return None
    if not value:
        return None
    mib = parse_size(value)
    if mib is None:
        reading.refuse(at, "GL-1105", f"{show(value)} is not a size: needed is {rule}.", nearest_size(value))
    elif 1 <= mib <= 64 * 1024 * 1024:
        return mib
    else:
        reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.")
    return None


def _cpus(reading: _Reading, at: str, value: Any) -> int | None:
    rule = "a number from 0.01 to 4,096, to the hundredth"
    if type(value) is not int and type(value) is not float:
        reading.wrong(at, value, rule)
        return None
    if not 0.01 <= value <= 4096:
        reading.refuse(at, "GL-1104", f"{show(value)} is out of bounds: needed is {rule}.")
        return None
    milli = round(value * 1000)
    if milli % 10 or abs(milli - value * 1000) > 1e-6:
        reading.refuse(at, "GL-1104", f"{show(value)} is too fine: needed is {rule}.", f"{max(0.01, round(value, 2)):g}")
        return None
    return milli


_MODEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?")


def _models(reading: _Reading, at: str, value: Any) -> tuple[str, ...] | None:
    rule = 'a text as "H100" or a list of up to 16'
    items = value if type(value) is list else [value]
    if len(items) > 16:
        reading.refuse(at, "GL-1110", f"{len(items):,} models are more than the limit of 16.")
        return None
    models: list[str] = []
    for i, item in enumerate(items):
        where = at if items is not value else f"{at}/{i}"
        if type(item) is not str:
            reading.wrong(where, item, rule)
        elif not _MODEL.fullmatch(item):
            reading.refuse(where, "GL-1105", f"{show(item)} is not a GPU model: letters, digits, spaces, dots and hyphens, up to 64.")
        elif item.upper() in models:
            reading.refuse(where, "GL-1108", f"{show(item)} is given twice.")
        else:
            models.append(item.upper())
    return tuple(models) if len(models) == len(items) else None


def _command(reading: _Reading, at: str, value: Any) -> tuple[str, ...] | None:
    rule = "a list of texts, as [python, train.py]"
    if type(value) is str and value:
        message = f"{show(value)} is one text; needed is {rule}. No shell reads it; to have one, name it."
        reading.refuse(at, "GL-1102", message, f"[sh, -c, {show(value)}]")
        return None
    if type(value) is not list:
        reading.wrong(at, value, rule)
        return None
    if not value:
        reading.refuse(at, "GL-1103", f"The command is empty; needed is {rule}.")
        return None
    if len(value) > MAX_ARGS:
        reading.refuse(at, "GL-1110", f"{len(value):,} arguments are more than the limit of {MAX_ARGS:,}.")
        return None
    before = len(reading.problems)
    for i, item in enumerate(value):
        _text(reading, f"{at}/{i}", item, "a text", MAX_ARG_BYTES)
    if value[0] == "":
        reading.refuse(f"{at}/0", "GL-1103", "The program's name is empty.")
    return tuple(value) if len(reading.problems) == before else None


#: set for each rank by Gangline: a job's own value would split the gang, or name devices that it does not hold
_RESERVED = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "ROLE_NAME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
})  # fmt: skip
_RESERVED_PREFIXES = ("MASTER_", "GANGLINE_", "TORCHELASTIC_")
#: they change what is run rather than how: the command has to say that itself. LD_LIBRARY_PATH is not among them, CUDA libraries need it
_DENIED = {
    "PATH": "name the program by an absolute path, or run it by [env, PATH=..., program]",
    "LD_PRELOAD": "run the program by [env, LD_PRELOAD=..., program]",
    "LD_AUDIT": "run the program by [env, LD_AUDIT=..., program]",
}
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _env(reading: _Reading, at: str, value: Any) -> dict[str, str] | None:
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of names to texts")
        return None
    if len(value) > MAX_ENV:
        reading.refuse(at, "GL-1110", f"{len(value):,} variables are more than the limit of {MAX_ENV}.")
        return None
    before = len(reading.problems)
    total = 0
    for name, item in value.items():
        where = f"{at}/{name}"
        if type(name) is not str or not _ENV_NAME.fullmatch(name):
            where = child_pointer(at, str(name)[:100])
            message = f"{show(name)} is not a name of a variable: letters, digits and _, up to 128, no digit first."
            reading.refuse(where, "GL-1105", message, key=True)
        elif name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
            reading.refuse(where, "GL-1107", f"{name} is set by Gangline for each rank and cannot be given.", key=True)
        elif name in _DENIED:
            reading.refuse(where, "GL-1107", f"{name} is refused, it changes which code is run: {_DENIED[name]}.", key=True)
        elif item is None:
            reading.refuse(where, "GL-1102", "null is not a text; write '' for an empty value.")
        else:
            text = _text(reading, where, item, "a text", MAX_ENV_VALUE_BYTES)
            total += len(name) + len(text or "") + 2
    if total > MAX_ENV_BYTES:
        reading.refuse(at, "GL-1110", f"The variables have {total:,} bytes together, more than the limit of {MAX_ENV_BYTES:,}.")
    return dict(value) if len(reading.problems) == before else None


def _absolute(reading: _Reading, at: str, value: Any) -> str | None:
    """Read an absolute path; return it without doubled and trailing slashes and "." parts."""
    text = _text(reading, at, value, "a text, an absolute path", MAX_PATH_BYTES)
    if not text:
        return text
    if not text.startswith("/"):
        reading.refuse(at, "GL-1105", f"{show(text)} is not an absolute path; a job may start on any node, so the path begins with a slash.")
    elif not text.isprintable():
        reading.refuse(at, "GL-1111", f"{show(text)} has control or invisible characters.")
    elif ".." in text.split("/"):
        reading.refuse(at, "GL-1105", f'{show(text)} has a ".." in it; write the path that is meant.')
    else:
        return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))
    return None


_URL = re.compile(r"[a-z][a-z0-9+.-]{1,31}://.+")


def _place(reading: _Reading, at: str, value: Any) -> str | None:
    if type(value) is str and _URL.fullmatch(value):
        text = _text(reading, at, value, "a text", MAX_PATH_BYTES)
        if text and not text.isprintable():
            reading.refuse(at, "GL-1111", f"{show(text)} has control or invisible characters.")
            return None
        return text
    return _absolute(reading, at, value)


def _list(item_reader: Reader, rule: str, limit: int) -> Reader:
    def read(reading: _Reading, at: str, value: Any) -> tuple[Any, ...] | None:
        if type(value) is not list:
            reading.wrong(at, value, rule)
            return None
        if len(value) > limit:
            reading.refuse(at, "GL-1110", f"{len(value):,} entries are more than the limit of {limit}.")
            return None
        items = [item_reader(reading, f"{at}/{i}", item) for i, item in enumerate(value)]
        return tuple(dict.fromkeys(items)) if None not in items else None

    return read


# ---------------------------------------------------------------- the tables

_SIGNALS = (
    "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE",
    "SIGALRM", "SIGTERM", "SIGXCPU", "SIGXFSZ", "SIGSYS",
)  # fmt: skip
#: signals by which a program can be asked: it can catch them, and nothing else sends them
_ASKING_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

_GANG: Fields = {
    "ranks": ("ranks", _whole(1, MAX_RANKS)),
    "min_ranks": ("min_ranks", _whole(1, MAX_RANKS)),
    "ranks_per_node": ("ranks_per_node", _whole(0, 1024)),
}
_RESOURCES: Fields = {
    "gpus": ("gpus", _whole(1, 64, "Leave the field out for a job without GPUs.")),
    "gpu_model": ("gpu_models", _models),
    "cpus": ("cpus_milli", _cpus),
    "memory": ("memory_mib", _memory),
}
_CHECKPOINT: Fields = {"path": ("path", _place), "interval": ("interval_s", _duration(1.0, 30 * DAY_S))}
_FAIL_CODES: Fields = {"fail": ("fail", _list(_whole(1, 255), "a list of exit codes, as [2, 64]", 255))}
_FAIL_SIGNALS: Fields = {"fail": ("fail", _list(_one_of(*_SIGNALS), "a list of signals, as [SIGABRT]", 64))}
_BACKOFF: Fields = {"initial": ("backoff_initial_s", _duration(0.0, 3600.0)), "max": ("backoff_max_s", _duration(0.0, DAY_S))}
_RESTART: Fields = {
    "on_rank_failure": ("on_rank_failure", _one_of("gang", "rank", "never")),
    "on_node_failure": ("on_node_failure", _one_of("reschedule", "fail")),
    "max_restarts": ("max_restarts", _whole(0, 10_000)),
    "window": ("window_s", _duration(1.0, 366 * DAY_S)),
    "backoff": ("backoff", _section(dict, _BACKOFF)),
    "hang_timeout": ("hang_timeout_s", _duration(1.0, 30 * DAY_S, zero="to switch it off")),
    "exit_codes": ("exit_codes", _section(dict, _FAIL_CODES)),
    "signals": ("signals", _section(dict, _FAIL_SIGNALS)),
}
_PREEMPTION: Fields = {"signal": ("signal", _one_of(*_ASKING_SIGNALS)), "grace": ("grace_s", _duration(0.0, 3600.0))}

_RESOURCES_LATER: Later = {
    "gpu_share": "Parts of a GPU (gpu_share) are not in this version; ask for whole ones by `gpus`.",
    "gpu_memory": "Placing by GPU memory (gpu_memory) is not in this version; name models by `gpu_model`.",
    "mig": "MIG slices (mig) are not in this version; ask for whole GPUs by `gpus`.",
}
_JOB_LATER: Later = {
    "roles": "Roles (roles) are not in this version; a job has one kind of rank, described by `gang`, `resources` and `command`.",
    "topology": "Topology rules (topology) are not in this version; `gang.ranks_per_node` keeps ranks together on nodes.",
    "image": "Container images (image) are not in this version; the command runs as a process on the node.",
    "mounts": "Mounts (mounts) are not in this version; the command sees the node's own file systems.",
    "user": "Running as another user (user) is not in this version; ranks run as the agent's user.",
    "depends_on": "Dependencies (depends_on) are not in this version; `gangline wait JOB && gangline submit FILE` does it from outside.",
    "array": "Job arrays (array) are not in this version; submit one file for each member, or a file with several documents.",
}


def _restart(reading: _Reading, at: str, value: Any) -> Restart | None:
    found = _mapping(reading, at, value, _RESTART, {})
    if found is None:
        return None
    found.update(found.pop("backoff", {}))
    found["fail_exit_codes"] = found.pop("exit_codes", {}).get("fail", ())
    found["fail_signals"] = found.pop("signals", {}).get("fail", ())
    restart = Restart(**found)
    if restart.backoff_initial_s > restart.backoff_max_s:
        initial, most = format_duration(restart.backoff_initial_s), format_duration(restart.backoff_max_s)
        reading.refuse(f"{at}/backoff", "GL-1108", f"The first delay, {initial}, is longer than the longest, {most}.")
    return restart


def _gang(reading: _Reading, at: str, value: Any) -> Gang | None:
    found = _mapping(reading, at, value, _GANG, {})
    if found is None:
        return None
    ranks = found.setdefault("ranks", 1)
    fewest = found.setdefault("min_ranks", ranks)
    each = found.get("ranks_per_node", 0)
    if fewest > ranks:
        reading.refuse(f"{at}/min_ranks", "GL-1108", f"min_ranks {fewest} is more than ranks {ranks}.")
    for word, count in {"ranks": ranks, "min_ranks": fewest}.items():
        if each and count % each and (word in value or word == "ranks"):
            near = f"{max(1, count // each) * each}"
            message = f"{word} {count} is not a multiple of ranks_per_node {each}, so a node would be filled in part."
            reading.refuse(f"{at}/{word}" if word in value else at, "GL-1108", message, near)
    return Gang(**found)


_JOB: Fields = {
    "name": ("name", _name),
    "queue": ("queue", _queue),
    "priority": ("priority", _whole(0, 1_000_000)),
    "preemptible": ("preemptible", _boolean),
    "gang": ("gang", _gang),
    "resources": ("resources", _section(Resources, _RESOURCES, _RESOURCES_LATER)),
    "time_limit": ("time_limit_s", _duration(1.0, 366 * DAY_S)),
    "command": ("command", _command),
    "env": ("env", _env),
    "workdir": ("workdir", _absolute),
    "checkpoint": ("checkpoint", _section(Checkpoint, _CHECKPOINT)),
    "restart": ("restart", _restart),
    "preemption": ("preemption", _section(Preemption, _PREEMPTION)),
    "on_disconnect": ("on_disconnect", _one_of("stop", "keep")),
}


def _job(reading: _Reading, value: Any) -> JobSpec | None:
    """Read a whole job; None when it has problems."""
    if type(value) is not dict:
        message = f"{show(value)} is not a job; a job is a mapping of fields, the smallest is `command: [python, train.py]`."
        reading.refuse("", "GL-1006", message)
        return None
    found = _mapping(reading, "", value, _JOB, _JOB_LATER)
    assert found is not None
    if value.get("command") is None:
        reading.refuse("", "GL-1103", "The field command is missing: a list of texts, as [python, train.py].")
    resources = found.get("resources")
    if resources is not None and resources.gpu_models and value["resources"].get("gpus") is None:
        reading.refuse("/resources/gpu_model", "GL-1108", "gpu_model is given, but no gpus: say how many a rank needs.")
    if reading.problems:
        return None
    if "preemptible" not in found:
        found["preemptible"] = found.get("priority", 50) < PREEMPTIBLE_BELOW
    return JobSpec(**found)


def _decode(text: bytes | str) -> str:
    """Return the text of a file: UTF-8 with or without a byte order mark, bounded before anything looks at it."""
    if len(text) > MAX_BYTES:
        raise BadJob([Problem("", f"{len(text):,} bytes are more than the limit of {MAX_BYTES:,} (256 KiB).", "GL-1002")])
    if isinstance(text, str):
        return text.removeprefix("\ufeff")
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise BadJob([Problem("", f"Not UTF-8: byte {error.start} cannot be decoded.", "GL-1001", line=line, column=1)]) from None


# ---------------------------------------------------------------- and back


def _restart_words(restart: Restart) -> dict[str, Any]:
    return {
        "on_rank_failure": restart.on_rank_failure,
        "on_node_failure": restart.on_node_failure,
        "max_restarts": restart.max_restarts,
        "window": _duration_word(restart.window_s),
        "backoff": {"initial": _duration_word(restart.backoff_initial_s), "max": _duration_word(restart.backoff_max_s)},
        "hang_timeout": _duration_word(restart.hang_timeout_s) if restart.hang_timeout_s else "",
        "exit_codes": {"fail": list(restart.fail_exit_codes)},
        "signals": {"fail": list(restart.fail_signals)},
    }


def _without_empties(words: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is not given: empty texts, lists and mappings, and counts of 0 whose 0 means that."""
    kept: dict[str, Any] = {}
    for word, value in words.items():
        if word != "env" and isinstance(value, dict):
            value = _without_empties(value)
        if value in ("", [], {}) or (word in ("gpus", "ranks_per_node") and value == 0):
            continue
        kept[word] = value
    return kept


def _duration_word(seconds: float) -> str | float:
    text = format_duration(seconds)
    return text if parse_duration(text) == seconds else seconds


def _cpus_word(milli: int) -> int | float:
    return milli // 1000 if milli % 1000 == 0 else milli / 1000
