"""From what operators write about a cluster to what is declared of it, and back. Described for people in docs/queues.md and docs/topology.md.

    text ── strict_yaml / strict_json ──▶ plain objects ── the tables below ──▶ Declaration ── to_words ──▶ plain objects

What is read is a Declaration that no entry has declared yet: only its queues and topologies are given.

As with the job file, nothing is guessed or passed over, and all problems are reported at once, each with its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gangline.core.model.fields import (
    MODEL,
    NAME,
    NAME_RULE,
    Fields,
    Reader,
    Reading,
    boolean,
    decode,
    duration,
    duration_word,
    hundredths,
    list_of,
    number,
    one_of,
    read_label,
    read_mapping,
    section,
    size,
    thousandths_word,
    whole,
)
from gangline.core.model.problems import MAX_PROBLEMS, BadJob, Problem, child_pointer, show
from gangline.core.model.queues import MAX_LEVELS, MAX_QUEUES, Amounts, Change, Declaration, QueueDiff, QueueSpec, Value, Weights
from gangline.core.model.topologies import MAX_DEPTH, MAX_TOPOLOGIES, NODE_LEVEL, Topology, TopologyChange
from gangline.core.model.units import format_size

MAX_BYTES: Final = 1024 * 1024
MAX_MODELS: Final = 64
_DAY_S: Final = 86_400.0
#: each level of queues is two of YAML, and within the last there are quota, models and a model
_YAML_DEPTH: Final = 2 * MAX_LEVELS + 4


def parse_yaml(text: bytes | str, filename: str = "") -> Declaration:
    """Return what a cluster file declares. Raises BadJob with all its problems."""
    from gangline.core.model.strict_yaml import load_yaml  # yaml is not needed where only JSON is read

    problems: list[Problem] = []
    try:
        documents = load_yaml(decode(text, MAX_BYTES), problems, _YAML_DEPTH)
    except BadJob as bad:
        raise BadJob(bad.problems, filename) from None
    if len(documents) > 1:
        problems.append(Problem("", f"{len(documents):,} documents: a cluster file is one, so that the whole tree is in one place.", "GL-1110"))
    declared = Declaration()
    if documents:
        reading = Reading(documents[0].places, documents[0].key_places, "a cluster file")
        declared = _cluster(reading, documents[0].value)
        problems += reading.problems
    elif not problems:
        problems.append(Problem("", "The file is empty; the smallest is `queues: {default: {}}`.", "GL-1001"))
    if problems:
        problems.sort(key=lambda p: (p.line or 0, p.column or 0))
        raise BadJob(problems[:MAX_PROBLEMS], filename)
    return declared


def parse_json(source: object) -> Declaration:
    """Return what a decoded JSON object declares. Raises BadJob."""
    reading = Reading({}, {}, "a cluster file")
    declared = _cluster(reading, source)
    if reading.problems:
        raise BadJob(reading.problems)
    return declared


def to_words(declared: Declaration) -> dict[str, Any]:
    """Return the declaration in the cluster file's words, without defaults; `parse_json` reads the same queues and topologies back from it."""
    top: dict[str, Any] = {}
    below = {"": top}
    for queue in declared.queues:
        words = below[queue.path] = queue_words(queue)
        place = top if not queue.parent else below[queue.parent].setdefault("queues", {})
        place[queue.name] = words
    topologies = {topology.name: list(topology.levels) for topology in declared.topologies}
    return {"topologies": topologies, "queues": top} if topologies else {"queues": top}


def to_yaml(declared: Declaration) -> str:
    """Return the declaration as a cluster file; `parse_yaml` reads the same queues and topologies back from it."""
    return words_to_yaml(to_words(declared))


def words_to_yaml(words: dict[str, Any]) -> str:
    """Return a declaration in the cluster file's words as the file itself."""
    import yaml

    return yaml.safe_dump(words, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


# ---------------------------------------------------------------- reading


def _models(key: str, reader: Reader) -> Reader:
    """Read {H100: {gpus: 32}}; return amounts by model, sorted."""
    inner: Fields = {"gpus": (key, reader)}

    def read(reading: Reading, at: str, value: Any) -> dict[str, Any] | None:
        if type(value) is not dict:
            reading.wrong(at, value, "a mapping of GPU models, as {H100: {gpus: 32}}")
            return None
        if len(value) > MAX_MODELS:
            reading.refuse(at, "GL-1110", f"{len(value):,} models are more than the limit of {MAX_MODELS}.")
            return None
        found: dict[str, Any] = {}
        for model, item in value.items():
            where = child_pointer(at, model[:100])
            if not MODEL.fullmatch(model):
                reading.refuse(where, "GL-1105", f"{show(model)} is not a GPU model: letters, digits, spaces, dots and hyphens.", key=True)
            elif model.upper() in found:
                reading.refuse(where, "GL-1108", f"{show(model)} is given twice.", key=True)
            else:
                given = read_mapping(reading, where, item, inner) or {}
                if type(item) is dict and item.get("gpus") is None:
                    reading.refuse(where, "GL-1103", "How many? Needed is gpus, as {gpus: 32}.")
                found[model.upper()] = given.get(key)
        return {model: found[model] for model in sorted(found)}

    return read


#: far more than any cluster has, and few enough that a slip is noticed
_GPUS = hundredths(0, 10_000_000)
_AMOUNTS: Fields = {
    "gpus": ("gpus_milli", _GPUS),
    "cpus": ("cpus_milli", hundredths(0, 10_000_000)),
    "memory": ("memory_mib", size(0, 1024**4)),
    "models": ("models", _models("each", _GPUS)),
}
_WEIGHT = number(0, 1_000_000)
_WEIGHTS: Fields = {
    "gpus": ("gpus", _WEIGHT),
    "cpus": ("cpus", _WEIGHT),
    "memory": ("memory", _WEIGHT),
    "models": ("models", _models("each", _WEIGHT)),
}
_RUNTIME = duration(0.0, 30 * _DAY_S)
_QUEUE: Fields = {
    "quota": ("quota", section(Amounts, _AMOUNTS)),
    "limit": ("limit", section(Amounts, _AMOUNTS)),
    "over_quota_weight": ("over_quota_weight", section(Weights, _WEIGHTS)),
    "priority": ("priority", whole(0, 1_000_000)),
    "reclaim_min_runtime": ("reclaim_min_runtime_s", _RUNTIME),
    "preempt_min_runtime": ("preempt_min_runtime_s", _RUNTIME),
    "usage_half_life": ("usage_half_life_s", duration(60.0, 366 * _DAY_S, zero="to switch it off")),
    "ageing_per_hour": ("ageing_per_hour", number(0, 1_000_000)),
    "ageing_most": ("ageing_most", whole(0, 1_000_000)),
    "order": ("order", one_of("priority", "shortest_remaining", "shortest_remaining_service", "least_attained")),
    "user_fairness": ("user_fairness", boolean),
    "state": ("state", one_of("open", "hold", "drain")),
}


def _cluster(reading: Reading, value: Any) -> Declaration:
    """Read a whole file; what it returns is only good when there are no problems."""
    if type(value) is not dict:
        reading.refuse("", "GL-1006", f"{show(value)} is not a cluster file; the smallest is `queues: {{default: {{}}}}`.")
        return Declaration()
    queues: list[QueueSpec] = []
    fields: Fields = {"queues": ("queues", _queues_under("", queues)), "topologies": ("topologies", _topologies)}
    found = read_mapping(reading, "", value, fields) or {}
    if "queues" not in found and not reading.problems:
        reading.refuse("", "GL-1103", "The field queues is missing: a mapping of names to queues, as {default: {}}.")
    if len(queues) > MAX_QUEUES:
        reading.refuse("/queues", "GL-1110", f"{len(queues):,} queues are more than the limit of {MAX_QUEUES:,}.")
    return Declaration(tuple(queues), topologies=found.get("topologies", ()))


_LEVELS = "a list of node labels, coarsest first, as [zone, rack]"


def _topologies(reading: Reading, at: str, value: Any) -> tuple[Topology, ...] | None:
    if type(value) is not dict:
        reading.wrong(at, value, "a mapping of names to lists of node labels, as {default: [zone, rack]}")
        return None
    if len(value) > MAX_TOPOLOGIES:
        reading.refuse(at, "GL-1110", f"{len(value):,} topologies are more than the limit of {MAX_TOPOLOGIES}.")
        return None
    found: list[Topology] = []
    for name, item in value.items():
        where = child_pointer(at, name[:100])
        if not NAME.fullmatch(name):
            reading.refuse(where, "GL-1105", f"{show(name)} is not the name of a topology: {NAME_RULE}.", key=True)
            continue
        found.append(Topology(name, _levels(reading, where, item) or ()))
    return tuple(found)


def _levels(reading: Reading, at: str, value: Any) -> tuple[str, ...] | None:
    levels: tuple[str, ...] | None = list_of(read_label, _LEVELS, MAX_DEPTH)(reading, at, value)
    if levels is None:
        return None
    if NODE_LEVEL in levels:
        reading.refuse(at, "GL-1108", f"{NODE_LEVEL} is the finest level of every topology and is not declared; leave it out.")
    elif len(levels) < len(value):
        reading.refuse(at, "GL-1108", "A level is given twice.")
    elif not all(levels) or not levels:
        reading.refuse(at, "GL-1103", f"There is no level in it: needed is {_LEVELS}.")
    return levels


def _queues_under(parent: str, queues: list[QueueSpec]) -> Reader:
    """Return the reader of the queues below one; it appends them to `queues`, each before those below it."""

    def read(reading: Reading, at: str, value: Any) -> bool | None:
        if type(value) is not dict:
            reading.wrong(at, value, "a mapping of names to queues")
            return None
        if not value and not parent:
            reading.refuse(at, "GL-1103", "There is no queue in it; jobs need one, and `default: {}` is unlimited.")
            return None
        if value and parent.count("/") + 2 > MAX_LEVELS:
            reading.refuse(at, "GL-1004", f"Queues are at most {MAX_LEVELS} levels deep.", key=True)
            return None
        for name, item in value.items():
            _queue(reading, child_pointer(at, name[:100]), name, parent, item, queues)
        return True

    return read


def _queue(reading: Reading, at: str, name: str, parent: str, value: Any, queues: list[QueueSpec]) -> None:
    if not NAME.fullmatch(name):
        reading.refuse(at, "GL-1105", f"{show(name)} is not the name of a queue: {NAME_RULE}.", key=True)
        return
    path = f"{parent}/{name}" if parent else name
    below: list[QueueSpec] = []
    found = read_mapping(reading, at, {} if value is None else value, {**_QUEUE, "queues": ("queues", _queues_under(path, below))})
    if found is not None:
        found.pop("queues", None)
        queues += [QueueSpec(path, **found), *below]


# ---------------------------------------------------------------- and back


def _weight_word(weight: float) -> int | float:
    return int(weight) if weight.is_integer() else weight


def _models_words(models: dict[str, Any], word: Callable[[Any], Any]) -> dict[str, Any]:
    return {"models": {model: {"gpus": word(each)} for model, each in models.items()}} if models else {}


def amounts_words(amounts: Amounts) -> dict[str, Any]:
    """Return amounts in the file's words, those that are given."""
    words = {"gpus": amounts.gpus_milli, "cpus": amounts.cpus_milli}
    found: dict[str, Any] = {word: thousandths_word(milli) for word, milli in words.items() if milli is not None}
    if amounts.memory_mib is not None:
        found["memory"] = format_size(amounts.memory_mib)
    return found | _models_words(amounts.models, thousandths_word)


def weights_words(weights: Weights) -> dict[str, Any]:
    """Return weights in the file's words, all but those of models that are not given."""
    words = {"gpus": weights.gpus, "cpus": weights.cpus, "memory": weights.memory}
    return {word: _weight_word(weight) for word, weight in words.items()} | _models_words(weights.models, _weight_word)


def queue_words(queue: QueueSpec) -> dict[str, Any]:
    """Return a queue in the file's words, without what it has by default and without the queues below it."""
    plain = weights_words(Weights())
    words: dict[str, Any] = {
        "quota": amounts_words(queue.quota),
        "limit": amounts_words(queue.limit),
        "over_quota_weight": {word: weight for word, weight in weights_words(queue.over_quota_weight).items() if plain.get(word) != weight},
        "priority": queue.priority if queue.priority != 100 else None,
    }
    for word in ("reclaim_min_runtime", "preempt_min_runtime", "usage_half_life"):
        seconds = getattr(queue, f"{word}_s")
        words[word] = None if seconds is None else duration_word(seconds)
    words["ageing_per_hour"] = None if queue.ageing_per_hour is None else _weight_word(queue.ageing_per_hour)
    words["ageing_most"] = queue.ageing_most
    words["order"] = queue.order
    words["user_fairness"] = queue.user_fairness or None
    words["state"] = queue.state if queue.state != "open" else None
    return {word: value for word, value in words.items() if value is not None and value != {}}


# ---------------------------------------------------------------- differences in words


def change_words(change: Change) -> tuple[str, Value, Value]:
    """Return the field of a change and its old and new value in the file's words; None is what is not given."""
    field, *parts = change.field.split(".", 2)
    if len(parts) == 2:
        word = f"{field}.models.{parts[1]}.gpus"
    elif parts:
        word = f"{field}.{parts[0].removesuffix('_milli').removesuffix('_mib')}"
    else:
        word = field.removesuffix("_s")
    return word, _value_word(change.field, change.old), _value_word(change.field, change.new)


def _value_word(field: str, value: Value) -> Value:
    if value is None or isinstance(value, str | bool):
        return value
    if field.endswith("_s"):
        return duration_word(value)
    if field.startswith("over_quota_weight.") or field == "ageing_per_hour":
        return _weight_word(float(value))
    if field.endswith(".memory_mib"):
        return format_size(int(value))
    return thousandths_word(int(value)) if "." in field else value


def diff_words(diff: QueueDiff, topologies: list[TopologyChange]) -> dict[str, Any]:
    """Return a difference as the API tells it: queues that come with what they are given, that go, and what changes; the same of topologies."""
    changed = [(change.queue, *change_words(change)) for change in diff.changed]
    return {
        "added": [{"queue": queue.path, "fields": queue_words(queue)} for queue in diff.added],
        "removed": [queue.path for queue in diff.removed],
        "changed": [{"queue": queue, "field": field, "old": old, "new": new} for queue, field, old, new in changed],
        "reordered": bool(diff.order),
        "topologies": [{"topology": each.name, "old": _list(each.old), "new": _list(each.new)} for each in topologies],
    }


def _list(levels: tuple[str, ...] | None) -> list[str] | None:
    return None if levels is None else list(levels)
