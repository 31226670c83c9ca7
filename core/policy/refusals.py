"""Why a job waits: the constraint that bound, with its numbers.

Amounts in `need` and `have` are in the units of a vector (requests.py), or counts where the name says so (`ranks`, `nodes`). `holders` names
the queues or jobs that hold what is missing, where that is known.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gangline.core.policy import migplan
from gangline.core.policy.gangs import LIVE, Job, Rank, alive, charge_of, next_chunk
from gangline.core.policy.holds import Hold
from gangline.core.policy.models import closed_models, tightest
from gangline.core.policy.nodes import Node
from gangline.core.policy.predicates import right_kind
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import GPU, RESOURCES, Request, Vector, add, mig_gpus
from gangline.core.policy.world import World

#: label of a node that says of which model its GPUs are; no declared topology can have it as a level
MODEL_LEVEL = "gangline/gpu-model"
#: codes of gangs that more room would help
ROOM = frozenset({
    "not_enough_gpus", "not_enough_cpus", "not_enough_memory", "not_enough_mig", "fragmented", "no_domain_fits", "no_one_model", "reserved_for",
    "maintenance",
})  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    """Why a job's next chunk is not placed."""

    code: str
    message: str
    need: dict[str, int] = field(default_factory=dict)
    have: dict[str, int] = field(default_factory=dict)
    holders: tuple[str, ...] = ()


def named(vector: Vector) -> dict[str, int]:
    """Return a vector with its names, without what is zero."""
    return {name: amount for name, amount in zip(RESOURCES, vector, strict=True) if amount}


def reserved_for(holds: list[Hold]) -> Refusal:
    """There would be room, but it is kept for others."""
    named_holds = ", ".join(f"{h.name} ({when(h.starts_ms)})" for h in holds[:3]) + (f" and {len(holds) - 3} more" if len(holds) > 3 else "")
    message = f"there is room, but it is kept for {named_holds}; what has a time limit and ends before may use it"
    code = "maintenance" if all(h.maintenance for h in holds) else "reserved_for"
    return Refusal(code, message, holders=tuple(h.name for h in holds))


def when(at_ms: int | None) -> str:
    """Return a log time for people, UTC."""
    if not at_ms:
        return "as soon as it has come together"
    return f"from {datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"


def gang_incomplete(job: Job) -> Refusal:
    """Too few of its ranks can still run."""
    short = next((p for p in job.podsets if not alive(p)), job.podsets[0])
    have = sum(1 for r in short.ranks if r.state in LIVE)
    where = f" of subgroup {short.name}" if job.single is None else ""
    need, have = short.min_ranks * short.unit, have * short.unit
    message = f"needs {need} ranks{where}, of which only {have} can still run"
    return Refusal("gang_incomplete", message, {"ranks": need}, {"ranks": have})


@functools.lru_cache(maxsize=8_192)
def over_bound(kind: str, queue: str, r: int, need: int, have: int) -> Refusal:
    """A queue's limit, or its quota for work that cannot be preempted, does not allow it."""
    which = "limit" if kind == "over_limit" else "quota for work that cannot be preempted"
    message = f"needs {amount(r, need)}, but queue {queue} has {amount(r, max(have, 0))} left of its {which}"
    return Refusal(kind, message, {RESOURCES[r]: need}, {RESOURCES[r]: have}, (queue,))


def over_model_bound(queue: Queue, need: int, left: dict[str, int]) -> Refusal:
    """A queue's limits of GPU models, or its quotas of them for work that cannot be preempted, do not allow it. Amounts in thousandths."""
    limited = all(max(0, queue.models[model].left(True)) <= value for model, value in left.items())
    kind = "over_limit" if limited else "over_quota"
    which = "limit" if kind == "over_limit" else "quota for work that cannot be preempted"
    has = ", ".join(f"{value / 1000:g} {model}" for model, value in left.items())
    message = f"needs {amount(0, need)}, but queue {queue.name} has {has} left of its {which} by GPU model"
    return Refusal(kind, message, {RESOURCES[0]: need}, {RESOURCES[0]: sum(left.values())}, (queue.name,))


def no_such_topology(topology: str, level: str) -> Refusal:
    """The job names a topology, or a level, that the cluster does not have."""
    if level:
        return Refusal("unknown_topology", f"wants to be placed by level {level} of topology {topology}, which has no such level")
    return Refusal("unknown_topology", f"wants to be placed by topology {topology}, which the cluster does not have")


def no_labels(need: int, topology: str, levels: tuple[str, ...]) -> Refusal:
    """No node that could be used is inside of the topology."""
    message = f"no node that it could use carries all labels of topology {topology} ({', '.join(levels)})"
    return Refusal("outside_topology", message, {"ranks": need}, {"ranks": 0})


def no_domain(need: int, level: str, domains: int, best: int) -> Refusal:
    """No single domain of the level holds so many ranks."""
    message = f"needs room for {need} ranks in one domain of {level}; the best of {domains} has room for {best}"
    return Refusal("no_domain_fits", message, {"ranks": need}, {"ranks": best, "domains": domains})


def no_one_model(need: int, models: int, best: int) -> Refusal:
    """There are GPUs for so many ranks, but not of one model."""
    message = f"needs GPUs of one model for {need} ranks; the best of {models} models has room for {best}"
    return Refusal("no_one_model", message, {"ranks": need}, {"ranks": best})


def no_domain_for_roles(need: Vector, level: str, best: Vector, domains: int) -> Refusal:
    """No single domain of the level holds ranks of several kinds; `best` is what is free in the one that comes nearest."""
    where = f"in one domain of {level}; the best of {domains} has"
    short = next((r for r in range(3) if need[r] > best[r]), None)
    if short is None:
        message = f"needs room for ranks of several kinds {where} enough in all, but not on its single nodes"
    else:
        message = f"needs {amount(short, need[short])} {where} {amount(short, best[short])}"
    return Refusal("no_domain_fits", message, named(need), {**_of_these(need, best), "domains": domains})


def skew_too_large(units: int, level: str, max_skew: int, domains: int) -> Refusal:
    """There would be room, but not so that the numbers in the domains of a level differ by so little."""
    message = f"numbers of ranks in the {domains} domains of {level} may differ by {max_skew} at most, and room is not where that needs it"
    return Refusal("skew_too_large", message, {"units": units}, {"domains": domains})


def none_fit(world: World, job: Job, request: Request, need: Vector) -> Refusal:
    """No node has room for a rank of the job with this plain request, or not for all; its next chunk, unplaced, asks for `need` in all."""
    free = world.free_later()
    if any(free) and not job.queue.models:
        return _short(request, need, free)
    chunk = next_chunk(job)
    return does_not_fit(world, next(r for r in chunk if r.request is request), chunk, world.nodes)


def does_not_fit(world: World, rank: Rank, ranks: list[Rank], nodes: list[Node]) -> Refusal:
    """No node has room for one of the ranks: say what is short, in all or on every single node."""
    request = rank.request
    need = charge_of(ranks, world.smallest_device_mib)
    # The chunk's first ranks may have found places before this one did not.
    found = charge_of([r for r in ranks if r.counts], world.smallest_device_mib)
    closed = closed_models(rank.job, request.vector(world.largest_device_mib)[0])
    if closed:
        allowed = [n for n in nodes if n.model not in closed]
        if not any(n.gpus for n in allowed):
            queue, left = tightest(rank.job, closed)
            return over_model_bound(queue, need[0], left)
        nodes = allowed
    nodes = nodes if nodes is world.nodes and request.plain and any(world.free_later()) else [n for n in nodes if n.pods_later > 0]
    if not nodes:
        return Refusal("no_nodes", "no node takes new ranks: all are lost, cordoned or draining")
    if request.plain and nodes is world.nodes:
        return _short(request, need, add(world.free_later(), found))
    fitting = [n for n in nodes if request.nodes is None or n.name in request.nodes]
    if not fitting:
        wanted = ", ".join(request.nodes or ()) or "none"
        return Refusal("no_node_allowed", f"may only run on certain nodes ({wanted}), and none of these is there", {}, {"nodes": len(nodes)})
    fitting = [n for n in fitting if not (request.count or request.mig or request.legacy_mig) or right_kind(n, request)]
    if not fitting:
        return Refusal("no_such_device", "no node gives devices of the kind that it asks for", {}, {"nodes": len(nodes)})
    if request.mig and world.partitions:
        short = _short_of_instances(rank, ranks, fitting)
        if short is not None:
            return short
    gpus = sum(max(0, n.later_milli) for n in fitting) + _mig_room(request, fitting)
    free = (gpus, sum(max(0, n.cpu_later) for n in fitting), sum(max(0, n.memory_later) for n in fitting))
    return _short(request, need, add(free, found))


def _short(request: Request, need: Vector, have: Vector) -> Refusal:
    for r in range(3):
        if need[r] > have[r]:
            message = f"needs {amount(r, need[r])}; {amount(r, have[r])} idle or soon so"
            return Refusal(f"not_enough_{('gpus', 'cpus', 'memory')[r]}", message, named(need), _of_these(need, have))
    message = f"needs a node with room for {_words(request)}; enough is idle in all, but no node with that much is left"
    return Refusal("fragmented", message, named(need), _of_these(need, have))


def _of_these(need: Vector, have: Vector) -> dict[str, int]:
    """Return what there is of everything that is needed."""
    return {name: have[r] for r, name in enumerate(RESOURCES) if need[r]}


def amount(resource: int, value: int) -> str:
    """Return an amount of a resource (its index in a vector) in words."""
    if resource == 0:
        return f"{value / 1000:g} GPU{'' if value == 1000 else 's'}"
    return f"{value / 1000:g} CPUs" if resource == 1 else f"{value / (1 << 30):.3g} GiB of memory"


def _short_of_instances(rank: Rank, ranks: list[Rank], nodes: list[Node]) -> Refusal | None:
    """Of which profile there is too little room in all; None when there is enough."""
    rest = [r for r in ranks if not r.counts]
    for profile, _ in rank.request.mig:
        need = sum(count for r in rest for p, count in r.request.mig if p == profile)
        have = sum(migplan.count(node, profile) for node in nodes)
        if need > have:
            found = sum(count for r in ranks if r.counts for p, count in r.request.mig if p == profile)
            message = f"needs {need + found} MIG instances of {profile}; there is room for {have + found} on GPUs that are idle, or soon so"
            return Refusal("not_enough_mig", message, {"instances": need + found}, {"instances": have + found})
    return None


def _mig_room(request: Request, nodes: list[Node]) -> int:
    """What the nodes have room for of the profiles, in thousandths of GPUs of quota."""
    return sum(migplan.count(n, p) * mig_gpus(p) * GPU for n in nodes for p, _ in request.mig)


def _words(request: Request) -> str:
    parts = []
    if request.whole:
        parts.append(f"{request.count} whole GPU{'' if request.count == 1 else 's'}")
    elif request.memory_mib:
        parts.append(f"{request.memory_mib} MiB of {'a GPU' if request.count == 1 else f'each of {request.count} GPUs'}")
    elif request.count:
        parts.append(f"{request.milli / GPU:g} of {'a GPU' if request.count == 1 else f'each of {request.count} GPUs'}")
    parts += [f"{count} of MIG profile {profile}" for profile, count in request.mig]
    if request.cpu_milli:
        parts.append(amount(1, request.cpu_milli))
    if request.memory_bytes:
        parts.append(amount(2, request.memory_bytes))
    return ", ".join(parts) or "one more rank"
