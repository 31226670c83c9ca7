"""From what people write to a JobSpec, and back. DESIGN section 7; the fields are described for people in docs/jobfile.md.

    text ── strict_yaml / strict_json ──▶ plain objects ── the tables below ──▶ JobSpec ── to_json ──▶ plain objects

Nothing is guessed and nothing is passed over: an unknown field, a value of another type, a number past a bound is a problem, and all problems
of a job are reported at once, each with its place. The readers of single fields are in fields.py, those that only a job needs are here.

Bounds are wide enough for the largest clusters there are and narrow enough that a slip (a GPU count of 10⁹) is refused at the door instead of
waiting for ever. Priorities end at 1,000,000, which leaves room for scores that a site computes.
"""

from __future__ import annotations

import re
from typing import Any, Final

from gangline.core.model import boxfields as box
from gangline.core.model import lifefields as life
from gangline.core.model.fields import (
    NAME,
    NAME_RULE,
    NOTHING_LATER,
    Fields,
    Reading,
    boolean,
    decode,
    duration,
    duration_word,
    list_of,
    one_of,
    read_label,
    read_mapping,
    read_name,
    read_text,
    section,
    whole,
)
from gangline.core.model.jobresources import read_resources, resource_words
from gangline.core.model.jobroles import check_beside_roles, check_roles, role_words, roles_reader, with_resources
from gangline.core.model.problems import MAX_PROBLEMS, BadJob, Problem, child_pointer, show
from gangline.core.model.roles import MAX_LEAVES, full, least
from gangline.core.model.spec import Checkpoint, Elastic, Gang, Health, JobSpec, Preemption, Resources, Restart, TopologyRequest
from gangline.core.model.strict_json import load_json
from gangline.core.model.units import format_duration

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


def parse_json_spec(source: object) -> JobSpec:
    """Return the spec that a JSON text (bytes or str) or an already decoded object describes. Raises BadJob."""
    if isinstance(source, bytes | str):
        source = load_json(source, MAX_BYTES)
    reading = Reading({}, {})
    spec = _job(reading, source)
    if reading.problems or spec is None:
        raise BadJob(reading.problems)
    return spec


def parse_yaml(text: bytes | str, filename: str = "") -> list[JobSpec]:
    """Return the specs of a job file, one for each of its documents and at least one. Raises BadJob with the problems of all documents."""
    from gangline.core.model.strict_yaml import load_yaml  # yaml is not needed where only JSON is read

    problems: list[Problem] = []
    try:
        documents = load_yaml(decode(text, MAX_BYTES), problems)
    except BadJob as bad:
        raise BadJob(bad.problems, filename) from None
    if not documents and not problems:
        problems.append(Problem("", "The file is empty; the smallest job is `command: [python, train.py]`.", "GL-1001"))
    if len(documents) > MAX_JOBS:
        problems.append(Problem("", f"{len(documents):,} jobs in one file are more than the limit of {MAX_JOBS:,}.", "GL-1110"))
    specs: list[JobSpec] = []
    for document in documents[:MAX_JOBS]:
        reading = Reading(document.places, document.key_places)
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
        **_ranks_words(spec),
        "elastic": _elastic_words(spec),
        "topology": _topology_words(spec.topology),
        "time_limit": duration_word(spec.time_limit_s) if spec.time_limit_s else "",
        "command": list(spec.command),
        "env": dict(spec.env),
        "workdir": spec.workdir,
        "checkpoint": {
            "path": spec.checkpoint.path,
            "interval": duration_word(spec.checkpoint.interval_s) if spec.checkpoint.interval_s else "",
        },
        "restart": _restart_words(spec.restart),
        "preemption": {"signal": spec.preemption.signal, "grace": duration_word(spec.preemption.grace_s)},
        "health": {"on_unhealthy": spec.health.on_unhealthy, "stragglers": spec.health.stragglers},
        "on_disconnect": spec.on_disconnect,
        **box.words(spec),
        **life.words(spec),
    }
    return _without_empties(words)


# ---------------------------------------------------------------- reading


def _queue(reading: Reading, at: str, value: Any) -> str | None:
    if type(value) is not str:
        reading.wrong(at, value, "a text")
        return None
    parts = value.split("/", 9)
    if len(parts) <= 8 and all(NAME.fullmatch(part) for part in parts):
        return value
    reading.refuse(at, "GL-1105", f"{show(value)} is not a queue: up to 8 names with a slash between them, each {NAME_RULE}.")
    return None


def _command(reading: Reading, at: str, value: Any) -> tuple[str, ...] | None:
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
        read_text(reading, f"{at}/{i}", item, "a text", MAX_ARG_BYTES)
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


def _env(reading: Reading, at: str, value: Any) -> dict[str, str] | None:
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
            text = read_text(reading, where, item, "a text", MAX_ENV_VALUE_BYTES)
            total += len(name) + len(text or "") + 2
    if total > MAX_ENV_BYTES:
        reading.refuse(at, "GL-1110", f"The variables have {total:,} bytes together, more than the limit of {MAX_ENV_BYTES:,}.")
    return dict(value) if len(reading.problems) == before else None


def _absolute(reading: Reading, at: str, value: Any) -> str | None:
    """Read an absolute path; return it without doubled and trailing slashes and "." parts."""
    text = read_text(reading, at, value, "a text, an absolute path", MAX_PATH_BYTES)
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


def _place(reading: Reading, at: str, value: Any) -> str | None:
    if type(value) is str and _URL.fullmatch(value):
        text = read_text(reading, at, value, "a text", MAX_PATH_BYTES)
        if text and not text.isprintable():
            reading.refuse(at, "GL-1111", f"{show(text)} has control or invisible characters.")
            return None
        return text
    return _absolute(reading, at, value)


# ---------------------------------------------------------------- the tables

_SIGNALS = (
    "SIGHUP", "SIGINT", "SIGQUIT", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGUSR1", "SIGSEGV", "SIGUSR2", "SIGPIPE",
    "SIGALRM", "SIGTERM", "SIGXCPU", "SIGXFSZ", "SIGSYS",
)  # fmt: skip
#: signals by which a program can be asked: it can catch them, and nothing else sends them
_ASKING_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")

_GANG: Fields = {
    "ranks": ("ranks", whole(1, MAX_RANKS)),
    "min_ranks": ("min_ranks", whole(1, MAX_RANKS)),
    "ranks_per_node": ("ranks_per_node", whole(0, 1024)),
}
_ELASTIC: Fields = {
    "grow_after": ("grow_after_s", duration(1.0, 30 * DAY_S)),
    "step": ("step", whole(1, MAX_RANKS)),
}
_CHECKPOINT: Fields = {"path": ("path", _place), "interval": ("interval_s", duration(1.0, 30 * DAY_S))}
_FAIL_CODES: Fields = {"fail": ("fail", list_of(whole(1, 255), "a list of exit codes, as [2, 64]", 255))}
_FAIL_SIGNALS: Fields = {"fail": ("fail", list_of(one_of(*_SIGNALS), "a list of signals, as [SIGABRT]", 64))}
_BACKOFF: Fields = {"initial": ("backoff_initial_s", duration(0.0, 3600.0)), "max": ("backoff_max_s", duration(0.0, DAY_S))}
_RESTART: Fields = {
    "on_rank_failure": ("on_rank_failure", one_of("gang", "rank", "never")),
    "on_node_failure": ("on_node_failure", one_of("reschedule", "fail")),
    "max_restarts": ("max_restarts", whole(0, 10_000)),
    "window": ("window_s", duration(1.0, 366 * DAY_S)),
    "backoff": ("backoff", section(dict, _BACKOFF)),
    "hang_timeout": ("hang_timeout_s", duration(1.0, 30 * DAY_S, zero="to switch it off")),
    "exit_codes": ("exit_codes", section(dict, _FAIL_CODES)),
    "signals": ("signals", section(dict, _FAIL_SIGNALS)),
}
_TOPOLOGY: Fields = {
    "required": ("required", read_label),
    "preferred": ("preferred", read_label),
    "balanced": ("balanced", read_label),
    "spread": ("spread", read_label),
    "max_skew": ("max_skew", whole(1, MAX_RANKS, "Leave the field out for ranks as equal as the room allows.")),
    "name": ("name", read_name),
}
_HEALTH: Fields = {
    "on_unhealthy": ("on_unhealthy", one_of("move", "restart", "warn")),
    "stragglers": ("stragglers", one_of("report", "replace", "ignore")),
}
_PREEMPTION: Fields = {"signal": ("signal", one_of(*_ASKING_SIGNALS)), "grace": ("grace_s", duration(0.0, 3600.0))}


def _restart(reading: Reading, at: str, value: Any) -> Restart | None:
    found = read_mapping(reading, at, value, _RESTART, {})
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


def _gang(reading: Reading, at: str, value: Any) -> Gang | None:
    found = read_mapping(reading, at, value, _GANG, {})
    return None if found is None else _whole_gang(reading, at, value, found)


def _whole_gang(reading: Reading, at: str, value: dict[str, Any], found: dict[str, Any]) -> Gang:
    """Make a gang of the fields that were found, and note where they contradict each other."""
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


def _check_elastic(reading: Reading, spec: JobSpec, value: dict[str, Any]) -> None:
    """The job as a whole: `elastic` says something of gangs of several sizes, and its step leads from the smallest to the largest."""
    if not value.get("elastic"):
        return
    gang, step = spec.gang, spec.elastic.step
    if least(spec) == full(spec):
        reading.refuse("/elastic", "GL-1108", "The job has one size; give min_ranks or min_replicas, the smallest that is of use.")
    elif step and spec.roles:
        reading.refuse("/elastic/step", "GL-1108", "Roles grow by their ranks_per_node, or by whole replicas; a step is for jobs without roles.")
    elif step and ((gang.ranks - gang.min_ranks) % step or step % (gang.ranks_per_node or 1)):
        nodes = f", in whole nodes of {gang.ranks_per_node}" if gang.ranks_per_node else ""
        message = f"Steps of {step} do not lead from min_ranks {gang.min_ranks} to ranks {gang.ranks}{nodes}."
        reading.refuse("/elastic/step", "GL-1108", message)


def _topology(reading: Reading, at: str, value: Any) -> TopologyRequest | None:
    found = read_mapping(reading, at, value, _TOPOLOGY, {})
    if found is None:
        return None
    given = {word: text for word, text in found.items() if text}
    if "name" in given and len(given) == 1 and not any(value.get(word) for word in _TOPOLOGY if word != "name"):
        message = "A topology is named, but no level of it: give `required`, `preferred`, `balanced` or `spread`."
        reading.refuse(at, "GL-1108", message)
    wishes = [word for word in ("preferred", "balanced", "spread") if word in given]
    if len(wishes) > 1:
        message = f"{' and '.join(wishes)} are both given; ranks are kept together, or balanced over few domains, or spread over many."
        reading.refuse(f"{at}/{wishes[-1]}", "GL-1108", message)
    if "max_skew" in given and not any(value.get(word) for word in ("balanced", "spread")):
        message = "max_skew is given, but nothing to balance or to spread: it is how far the numbers of ranks in domains may differ."
        reading.refuse(f"{at}/max_skew", "GL-1108", message)
    return TopologyRequest(**given)


_ROLE: Fields = {
    "name": ("name", read_name),
    "ranks": ("ranks", whole(1, MAX_RANKS)),
    "min_ranks": ("min_ranks", whole(0, MAX_RANKS)),
    "ranks_per_node": ("ranks_per_node", whole(0, 1024)),
    "replicas": ("replicas", whole(1, MAX_LEAVES)),
    "min_replicas": ("min_replicas", whole(0, MAX_LEAVES)),
    "resources": ("resources", read_resources),
    "topology": ("topology", _topology),
    "command": ("command", _command),
    "env": ("env", _env),
}

_JOB: Fields = {
    "name": ("name", read_name),
    "queue": ("queue", _queue),
    "priority": ("priority", whole(0, 1_000_000)),
    "preemptible": ("preemptible", boolean),
    "gang": ("gang", _gang),
    "elastic": ("elastic", section(Elastic, _ELASTIC)),
    "resources": ("resources", read_resources),
    "topology": ("topology", _topology),
    "roles": ("roles", roles_reader(_ROLE, _whole_gang, NOTHING_LATER)),
    "time_limit": ("time_limit_s", duration(1.0, 366 * DAY_S)),
    "command": ("command", _command),
    "env": ("env", _env),
    "workdir": ("workdir", _absolute),
    "checkpoint": ("checkpoint", section(Checkpoint, _CHECKPOINT)),
    "restart": ("restart", _restart),
    "preemption": ("preemption", section(Preemption, _PREEMPTION)),
    "health": ("health", section(Health, _HEALTH)),
    "on_disconnect": ("on_disconnect", one_of("stop", "keep")),
    "array": ("array", life.read_array),
    "depends_on": ("depends_on", life.read_dependencies),
    "hold": ("hold", boolean),
    "begin": ("begin", life.read_moment),
    "deadline": ("deadline", life.read_moment),
    "user": ("user", box.read_user),
    "image": ("image", box.read_image),
    "shm_size": ("shm_mib", box.read_shm),
    "mounts": ("mounts", box.mounts_reader(_absolute)),
}


def _job(reading: Reading, value: Any) -> JobSpec | None:
    """Read a whole job; None when it has problems."""
    if type(value) is not dict:
        message = f"{show(value)} is not a job; a job is a mapping of fields, the smallest is `command: [python, train.py]`."
        reading.refuse("", "GL-1006", message)
        return None
    found = read_mapping(reading, "", value, _JOB)
    assert found is not None
    if value.get("roles"):
        check_beside_roles(reading, value)
        if "roles" in found:
            check_roles(reading, found["roles"], MAX_RANKS)
    elif value.get("command") is None:
        reading.refuse("", "GL-1103", "The field command is missing: a list of texts, as [python, train.py].")
    life.take_apart(reading, found)
    if reading.problems:
        return None
    if "roles" in found:
        found["roles"] = with_resources(found["roles"], found.pop("resources", Resources()))
        found.setdefault("command", ())
    if "preemptible" not in found:
        found["preemptible"] = found.get("priority", 50) < PREEMPTIBLE_BELOW
    spec = JobSpec(**found)
    _check_elastic(reading, spec, value)
    box.check(reading, spec)
    return None if reading.problems else spec


# ---------------------------------------------------------------- and back


def _restart_words(restart: Restart) -> dict[str, Any]:
    return {
        "on_rank_failure": restart.on_rank_failure,
        "on_node_failure": restart.on_node_failure,
        "max_restarts": restart.max_restarts,
        "window": duration_word(restart.window_s),
        "backoff": {"initial": duration_word(restart.backoff_initial_s), "max": duration_word(restart.backoff_max_s)},
        "hang_timeout": duration_word(restart.hang_timeout_s) if restart.hang_timeout_s else "",
        "exit_codes": {"fail": list(restart.fail_exit_codes)},
        "signals": {"fail": list(restart.fail_signals)},
    }


def _elastic_words(spec: JobSpec) -> dict[str, Any]:
    if least(spec) == full(spec):
        return {}
    return {"grow_after": duration_word(spec.elastic.grow_after_s), "step": spec.elastic.step or ""}


def _topology_words(topology: TopologyRequest) -> dict[str, Any]:
    return {word: getattr(topology, word) for word in _TOPOLOGY} if topology else {}


def _ranks_words(spec: JobSpec) -> dict[str, Any]:
    """What ranks there are: of the job itself, or of its roles."""
    if spec.roles:
        return {"roles": [_cleared(role_words(role, resource_words, _topology_words)) for role in spec.roles]}
    gang = {"ranks": spec.gang.ranks, "min_ranks": spec.gang.min_ranks, "ranks_per_node": spec.gang.ranks_per_node}
    return {"gang": gang, "resources": resource_words(spec.resources)}


def _cleared(role: dict[str, Any]) -> dict[str, Any]:
    if "roles" in role:
        role["roles"] = [_cleared(inner) for inner in role["roles"]]
    return _without_empties(role)


def _without_empties(words: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is not given: empty texts, lists and mappings, and counts of 0 whose 0 means that."""
    kept: dict[str, Any] = {}
    for word, value in words.items():
        if word != "env" and isinstance(value, dict):
            value = _without_empties(value)
        if value in ("", [], {}) or (word in ("ranks_per_node", "max_skew") and value == 0):
            continue
        kept[word] = value
    return kept
