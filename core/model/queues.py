"""Queues as they are declared: who gets how much of the cluster, and what is done with what is left over. docs/queues.md.

A declaration is the whole tree at once, as a flat tuple: every queue after its parent, and before its parent's next child; the order among
siblings is that of the file, and an older sibling is one that stands before. Jobs go to leaves. Before anything is declared there is one
queue, `default`, open and unlimited, and the queue that a job names is only a word.

What the policy makes of it (fair share, reclaim) is in core/policy. Here is what is declared, how two declarations differ, and what looks wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec

from gangline.core.model.fields import thousandths_word
from gangline.core.model.topologies import Topology
from gangline.core.model.units import format_size

#: the queue that there is before any is declared, and the one of a job that names none
DEFAULT_QUEUE: Final = "default"
MAX_QUEUES: Final = 2_000
#: names in a path
MAX_LEVELS: Final = 8
#: points of priority that waiting adds at most, where no queue says otherwise
AGEING_MOST: Final = 10

QueueState = Literal["open", "hold", "drain"]
#: which of two jobs of equal priority is first: the older; or by service (core/policy/service.py)
QueueOrder = Literal["priority", "shortest_remaining", "shortest_remaining_service", "least_attained"]
#: how a job that names a queue is refused
QueueRefusal = Literal["unknown", "parent", "drains"]


class Amounts(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """So much of each resource; None is unlimited. Thousandths, so that sums are exact and a share of a GPU can be an amount."""

    gpus_milli: int | None = None
    cpus_milli: int | None = None
    memory_mib: int | None = None
    #: thousandths of GPUs by model, sorted; a model that is not named is bounded by `gpus_milli` alone
    models: dict[str, int] = {}


class Weights(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Parts in which siblings divide what is left beyond their quotas; 0 gets nothing of it."""

    gpus: float = 1.0
    cpus: float = 1.0
    memory: float = 1.0
    #: by GPU model, sorted; a model that is not named has the weight of `gpus`
    models: dict[str, float] = {}


class QueueSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """One queue, a leaf or a parent."""

    #: names from the top with a slash between: research/nlp
    path: str
    #: what it is entitled to; what is within quota is never reclaimed, and only there may gangs run that are not preemptible
    quota: Amounts = Amounts()
    #: what it never exceeds
    limit: Amounts = Amounts()
    over_quota_weight: Weights = Weights()
    #: among its siblings: the larger gets what is left over first
    priority: int = 100
    #: a gang is not reclaimed from (preempted in) this queue before it has run so long; None: as the parent, at the top 0
    reclaim_min_runtime_s: float | None = None
    preempt_min_runtime_s: float | None = None
    #: age at which past usage counts half against the queue; 0: the past does not count; None: as the parent, at the top 0
    usage_half_life_s: float | None = None
    #: users of this queue take turns, each as far as the others have come
    user_fairness: bool = False
    #: hold: accepts jobs and starts none. drain: accepts none, and those that it has run out. Holds for all queues below
    state: QueueState = "open"
    #: points of priority that a job gains for each hour of waiting, and how many it gains at most; None: as the parent, at the top 0 and 10
    ageing_per_hour: float | None = None
    ageing_most: int | None = None
    #: what decides between jobs of one priority; None: as the parent, at the top "priority"
    order: QueueOrder | None = None

    @property
    def name(self) -> str:
        """The last name of its path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> str:
        """The path of its parent, "" at the top."""
        return self.path.rpartition("/")[0]


class Declaration(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """The queues and topologies as they stand in the state, and the entry that declared them; index 0: nothing was declared yet."""

    queues: tuple[QueueSpec, ...] = ()
    index: int = 0
    at_ms: int = 0
    by: str = ""
    reason: str = ""
    topologies: tuple[Topology, ...] = ()


class QueueTree:
    """A declaration to be asked. Never changed: another declaration makes another tree."""

    __slots__ = ("_children", "_orders", "ages", "declaration", "half_lives_ms", "specs")

    def __init__(self, declaration: Declaration | None = None) -> None:
        """Raises ValueError when the declaration is not a tree in order."""
        self.declaration = declaration or Declaration()
        queues = self.declaration.queues or (QueueSpec(DEFAULT_QUEUE),)
        #: by path, parents before children; the implicit default queue when nothing is declared
        self.specs = {queue.path: queue for queue in queues}
        self._children = _children(queues)
        #: in some queue, jobs gain priority by waiting
        self.ages = any(queue.ageing_per_hour for queue in queues)
        self._orders: dict[str, QueueOrder] = {}
        if tuple(self.specs.values()) != in_order(queues):
            raise ValueError("the queues are not a tree in order: each once, after its parent and before its parent's next child")
        #: by path, only of queues where past usage counts
        self.half_lives_ms = {path: ms for path in self.specs if (ms := round(self.usage_half_life_s(path) * 1000)) > 0}
        for path, spec in self.specs.items():
            self._orders[path] = spec.order or self._orders.get(spec.parent, "priority")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueueTree) and self.declaration == other.declaration

    def __hash__(self) -> int:
        return self.declaration.index

    @property
    def declared(self) -> bool:
        """Somebody has declared queues; before that, the queue that a job names is only a word."""
        return bool(self.declaration.queues)

    @property
    def index(self) -> int:
        """Index of the entry that declared the queues, 0 before the first."""
        return self.declaration.index

    def children(self, path: str = "") -> tuple[str, ...]:
        """Paths of the queues right below one, oldest first; of those at the top without a path."""
        return tuple(self._children.get(path, ()))

    def is_leaf(self, path: str) -> bool:
        """Jobs can go there."""
        return path in self.specs and path not in self._children

    def leaves(self) -> Iterator[str]:
        """Paths of the queues that jobs go to, in order."""
        return (path for path in self.specs if path not in self._children)

    def leaf_of(self, queue: str) -> str:
        """Path of the leaf that a job which names `queue` is accounted to."""
        return queue if self.declared else DEFAULT_QUEUE

    def lineage(self, path: str) -> Iterator[QueueSpec]:
        """The queue and its ancestors, nearest first."""
        while path:
            yield self.specs[path]
            path = path.rpartition("/")[0]

    def refusal(self, queue: str) -> QueueRefusal | None:
        """Why a job that names this queue is not accepted, None when it is."""
        if not self.declared:
            return None
        if queue not in self.specs:
            return "unknown"
        if queue in self._children:
            return "parent"
        return "drains" if any(spec.state == "drain" for spec in self.lineage(queue)) else None

    def starts(self, queue: str) -> bool:
        """Jobs of this queue may be placed: neither it nor an ancestor is on hold."""
        return all(spec.state != "hold" for spec in self.lineage(self.leaf_of(queue)))

    def usage_half_life_s(self, path: str) -> float:
        """Half-life of past usage in a queue, its own or the nearest ancestor's; 0: the past does not count."""
        return next((spec.usage_half_life_s for spec in self.lineage(path) if spec.usage_half_life_s is not None), 0.0)

    def order(self, path: str) -> QueueOrder:
        """What decides between jobs of one priority in a queue, its own or the nearest ancestor's."""
        return self._orders[path]

    def ageing(self, path: str) -> tuple[float, int]:
        """Points of priority that a waiting job of a queue gains in an hour, and at most; each of its own or the nearest ancestor's."""
        if not self.ages:
            return 0.0, 0
        lineage = list(self.lineage(path))
        per_hour = next((spec.ageing_per_hour for spec in lineage if spec.ageing_per_hour is not None), 0.0)
        return per_hour, next((spec.ageing_most for spec in lineage if spec.ageing_most is not None), AGEING_MOST)


def in_order(queues: Iterable[QueueSpec]) -> tuple[QueueSpec, ...]:
    """Return the queues as a declaration has them. Queues whose parent is not among them are left out."""
    queues = list(queues)
    specs, children = {queue.path: queue for queue in queues}, _children(queues)
    found: list[QueueSpec] = []
    waiting = list(reversed(children.get("", ())))
    while waiting:
        path = waiting.pop()
        found.append(specs[path])
        waiting += reversed(children.get(path, ()))
    return tuple(found)


def _children(queues: Iterable[QueueSpec]) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for queue in queues:
        if queue.path:
            children.setdefault(queue.parent, []).append(queue.path)
    return children


# ---------------------------------------------------------------- differences

Value = int | float | str | bool | None


class Change(msgspec.Struct, frozen=True, gc=False):
    """One field of one queue: `quota.gpus_milli`, `limit.models.H100`, `state`. None is what is not given."""

    queue: str
    field: str
    old: Value
    new: Value


class QueueDiff(msgspec.Struct, frozen=True, gc=False):
    """What makes one declaration of another."""

    added: tuple[QueueSpec, ...] = ()
    removed: tuple[QueueSpec, ...] = ()
    changed: tuple[Change, ...] = ()
    #: all paths in their new order, when that is another than the old one with what is new behind its older siblings
    order: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.order)


def diff(old: tuple[QueueSpec, ...], new: tuple[QueueSpec, ...]) -> QueueDiff:
    """Return what leads from one declaration to another: `patched(old, diff(old, new)) == new`."""
    before, after = {queue.path: queue for queue in old}, {queue.path: queue for queue in new}
    changed: list[Change] = []
    for path, queue in after.items():
        if path in before and before[path] != queue:
            changed += _changes(before[path], queue)
    found = QueueDiff(
        added=tuple(queue for queue in new if queue.path not in before),
        removed=tuple(queue for queue in old if queue.path not in after),
        changed=tuple(changed),
    )
    if [queue.path for queue in patched(old, found)] == list(after):
        return found
    return msgspec.structs.replace(found, order=tuple(after))


def patched(old: tuple[QueueSpec, ...], changes: QueueDiff) -> tuple[QueueSpec, ...]:
    """Return the declaration that a difference leads to."""
    specs = {queue.path: queue for queue in old}
    for queue in changes.removed:
        del specs[queue.path]
    for change in changes.changed:
        specs[change.queue] = _with(specs[change.queue], change)
    for queue in changes.added:
        specs[queue.path] = queue
    if changes.order:
        return tuple(specs[path] for path in changes.order)
    return in_order(specs.values())


def _changes(old: QueueSpec, new: QueueSpec) -> Iterator[Change]:
    before, after = fields(old), fields(new)
    for field in dict.fromkeys([*before, *after]):
        if before.get(field) != after.get(field):
            yield Change(new.path, field, before.get(field), after.get(field))


def fields(queue: QueueSpec) -> dict[str, Value]:
    """Return the fields of a queue by name, without its path; those of models only as far as they are given."""
    found: dict[str, Value] = {}
    for field in QueueSpec.__struct_fields__[1:]:
        value = getattr(queue, field)
        if not isinstance(value, Amounts | Weights):
            found[field] = value
            continue
        for part, amount in msgspec.structs.asdict(value).items():
            if part == "models":
                found |= {f"{field}.models.{model}": each for model, each in amount.items()}
            else:
                found[f"{field}.{part}"] = amount
    return found


def _with(queue: QueueSpec, change: Change) -> QueueSpec:
    field, *parts = change.field.split(".", 2)
    if not parts:
        return msgspec.structs.replace(queue, **{field: change.new})
    inner = getattr(queue, field)
    value: object = change.new
    if len(parts) == 2:
        models = {**inner.models, parts[1]: change.new}
        value = {model: models[model] for model in sorted(models) if models[model] is not None}
    return msgspec.structs.replace(queue, **{field: msgspec.structs.replace(inner, **{parts[0]: value})})


# ---------------------------------------------------------------- what looks wrong

#: resource in words → its name in Amounts
_RESOURCES = {"GPUs": "gpus_milli", "CPUs": "cpus_milli", "memory": "memory_mib"}


def warnings(queues: tuple[QueueSpec, ...]) -> list[str]:
    """Return what can be declared and is probably not meant, a sentence each."""
    found: list[str] = []
    for queue in queues:
        found += _own_warnings(queue)
    children = _children(queues)
    specs = {queue.path: queue for queue in queues}
    for parent, paths in children.items():
        found += _family_warnings(specs.get(parent), [specs[path] for path in paths])
    return found


def _own_warnings(queue: QueueSpec) -> Iterator[str]:
    for resource, name in _RESOURCES.items():
        quota, limit = getattr(queue.quota, name), getattr(queue.limit, name)
        if quota is not None and limit is not None and quota > limit:
            yield f"{queue.path}: its quota of {amount(resource, quota)} is more than its limit of {amount(resource, limit)}"
    for model, quota in queue.quota.models.items():
        limit = queue.limit.models.get(model)
        if limit is not None and quota > limit:
            yield f"{queue.path}: its quota of {amount(model, quota)} is more than its limit of {amount(model, limit)}"
    together, whole = sum(queue.quota.models.values()), queue.quota.gpus_milli
    if whole is not None and together > whole:
        yield f"{queue.path}: its quotas by model are {amount('GPUs', together)} together, more than its quota of {amount('GPUs', whole)}"


def _family_warnings(parent: QueueSpec | None, children: list[QueueSpec]) -> Iterator[str]:
    """What is odd about the quotas of siblings, the top queues among them."""
    for resource, name in _RESOURCES.items():
        quotas = {child.path: getattr(child.quota, name) for child in children}
        missing = [path for path, quota in quotas.items() if quota is None]
        together = sum(quota for quota in quotas.values() if quota is not None)
        whole = getattr(parent.quota, name) if parent is not None else None
        if parent is not None and whole is not None:
            if together > whole:
                yield f"{parent.path}: {_beyond(resource, together, whole)}"
            if missing:
                yield f"{_some(missing)}: no quota of {resource} means unlimited, and {parent.path} above has {amount(resource, whole)}"
        elif resource == "GPUs" and missing and len(missing) < len(children):
            yield f"{_some(missing)}: no quota of GPUs means unlimited, so nothing is ever reclaimed there for the other queues beside it"
    if parent is not None:
        for model, whole in parent.quota.models.items():
            together = sum(child.quota.models.get(model, 0) for child in children)
            if together > whole:
                yield f"{parent.path}: {_beyond(model, together, whole)}"


def _beyond(resource: str, together: int, whole: int) -> str:
    return f"the quotas of its queues are {amount(resource, together)} together, more than its own {amount(resource, whole)}"


def _some(paths: list[str]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{', '.join(paths[:3])} and {len(paths) - 3} more"


def amount(resource: str, value: int) -> str:
    """Return an amount in words: "64 GPUs", "0.5 H100", "12.5 CPUs", "2TiB"."""
    return format_size(value) if resource == "memory" else f"{thousandths_word(value)} {resource}"
