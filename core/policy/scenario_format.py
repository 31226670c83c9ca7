"""Scenario files: from parsed JSON to a what-if world.

A scenario is a small cluster with queues and jobs, the passes to run on it, and what must come out (docs/scenarios.md). Everything is checked
here: an unknown field, a wrong type or a name that stands for nothing is a `BadScenario` that says where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gangline.core.policy.gangs import Constraint, Job, Member, Podset, PodsetGroup, Rank, RankState
from gangline.core.policy.nodes import Node, NodeSpec, Place
from gangline.core.policy.numa import ZoneUse
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.requests import GPU, UNLIMITED, Affinity, Request, share_of_memory
from gangline.core.policy.world import Options, World

Raw = dict[str, Any]

STATES = {
    "pending": RankState.PENDING,
    "binding": RankState.BINDING,
    "running": RankState.RUNNING,
    "pipelined": RankState.PENDING,
    "releasing": RankState.RELEASING,
    "stuck-releasing": RankState.STUCK,
    "succeeded": RankState.SUCCEEDED,
    "failed": RankState.FAILED,
}
HOLDING = ("binding", "running", "releasing", "stuck-releasing")

_SCENARIO = {
    "id", "what", "actions", "kind", "rounds_until", "rounds_after", "call_bounds", "predicates_off", "placement",
    "default_staleness_grace_s", "nodes", "topology", "topologies", "queues", "jobs", "expected", "source", "adjustments",
}  # fmt: skip
_NODE = {
    "name", "gpus", "gpu_memory_mib", "cpu_milli", "memory_mib", "memory_bytes", "mig", "mig_strategy", "physical_gpus", "labels",
    "max_pods", "numa",
}  # fmt: skip
_QUEUE = {
    "name", "parent", "level", "created", "quota_gpus", "limit_gpus", "over_quota_weight", "priority", "reclaim_min_runtime_s",
    "quota_cpu_milli", "limit_cpu_milli", "quota_memory_mib", "limit_memory_mib", "quota_memory_bytes", "limit_memory_bytes",
    "preempt_min_runtime_s",
}  # fmt: skip
_JOB = {
    "name", "queue", "priority", "priority_class", "preemptible", "min_ranks", "order", "age_minutes", "gpus_per_rank",
    "gpu_memory_mib_per_rank", "gpu_fraction_devices", "mig_per_rank", "cpu_milli_per_rank", "memory_mib_per_rank", "memory_bytes_per_rank",
    "subgroups", "topology", "node_affinity", "ranks", "deleted_in_test", "started_s_ago", "stale_for_s", "staleness_grace_s",
    "preemption_delay_s", "best_effort", "qos", "namespace",
}  # fmt: skip
_RANK = {
    "state", "node", "gpu_groups", "gpus", "mig", "subgroup", "order_label", "allowed_nodes", "pod_affinity", "legacy_mig",
    "numa_placement",
}  # fmt: skip


class BadScenario(ValueError):
    """A scenario that cannot be run: what is wrong, and where."""


@dataclass
class RankFact:
    """Where one rank is at the start of a round."""

    state: str
    node: str = ""
    devices: tuple[int, ...] = ()
    zones: ZoneUse = ()


@dataclass
class Facts:
    """What changes from round to round: by job name its ranks, and since how many seconds it runs."""

    ranks: dict[str, list[RankFact]] = field(default_factory=dict)
    started_s_ago: dict[str, float | None] = field(default_factory=dict)


def check(raw: object) -> Raw:
    """Return the scenario if its fields are known and its names resolve; raise BadScenario if not."""
    if not isinstance(raw, dict):
        raise BadScenario("a scenario must be an object")
    where = f"scenario {raw.get('id', '?')}"
    _fields(raw, _SCENARIO, {"id", "actions", "kind", "nodes", "queues", "jobs", "expected"}, where)
    nodes, queues = set(), set()
    for node in _list(raw, "nodes", where):
        _fields(node, _NODE, {"name", "gpus"}, f"{where}, node {node.get('name', '?')}")
        nodes.add(node["name"])
    for queue in _list(raw, "queues", where):
        _fields(queue, _QUEUE, {"name", "parent"}, f"{where}, queue {queue.get('name', '?')}")
        queues.add(queue["name"])
    for queue in raw["queues"]:
        if queue["parent"] is not None and queue["parent"] not in queues:
            raise BadScenario(f"{where}, queue {queue['name']}: there is no queue {queue['parent']!r}")
    for job in _list(raw, "jobs", where):
        _check_job(job, nodes, queues, where)
    for action in raw["actions"]:
        if action not in ("allocate", "consolidate", "reclaim", "preempt", "evict-stale-gangs"):
            raise BadScenario(f"{where}: there is no action {action!r}")
    if raw["kind"] not in ("single-pass", "cycle"):
        raise BadScenario(f"{where}: kind is {raw['kind']!r}, neither single-pass nor cycle")
    return raw


def _check_job(job: object, nodes: set[str], queues: set[str], where: str) -> None:
    if not isinstance(job, dict):
        raise BadScenario(f"{where}: a job must be an object")
    where = f"{where}, job {job.get('name', '?')}"
    _fields(job, _JOB, {"name", "queue", "priority", "ranks"}, where)
    if job["queue"] not in queues:
        raise BadScenario(f"{where}: there is no queue {job['queue']!r}")
    for at, rank in enumerate(_list(job, "ranks", where)):
        _fields(rank, _RANK, {"state", "node"}, f"{where}, rank {at}")
        if rank["state"] not in STATES:
            raise BadScenario(f"{where}, rank {at}: there is no state {rank['state']!r}")
        if rank["node"] is not None and rank["node"] not in nodes:
            raise BadScenario(f"{where}, rank {at}: there is no node {rank['node']!r}")


def _fields(value: object, known: set[str], needed: set[str], where: str) -> None:
    if not isinstance(value, dict):
        raise BadScenario(f"{where}: must be an object")
    unknown = sorted(set(value) - known)
    if unknown:
        raise BadScenario(f"{where}: unknown field {unknown[0]!r}")
    missing = sorted(needed - set(value))
    if missing:
        raise BadScenario(f"{where}: the field {missing[0]!r} is missing")


def _list(value: Raw, name: str, where: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list):
        raise BadScenario(f"{where}: {name} must be a list")
    return found


# ---------------------------------------------------------------- requests


def milli(gpus: float) -> int:
    """Return GPUs in thousandths."""
    return round(gpus * GPU)


def bytes_of(value: Raw, name: str) -> int | None:
    """Return an amount of memory that is given exactly in bytes, or else rounded in MiB."""
    exact = value.get(f"{name}_bytes")
    if exact is not None:
        return int(exact)
    mib = value.get(f"{name}_mib")
    return None if mib is None else round(mib * 1024 * 1024)


def memory_of_rank(job: Raw) -> int:
    """Return the bytes of memory that each rank of a job asks for."""
    exact = job.get("memory_bytes_per_rank")
    return int(exact) if exact is not None else round((job.get("memory_mib_per_rank") or 0) * 1024 * 1024)


def request_of(job: Raw, rank: Raw) -> Request:
    """Return what one rank asks for."""
    gpus = rank.get("gpus", job.get("gpus_per_rank")) or 0
    memory_mib = (job.get("gpu_memory_mib_per_rank") or 0) if rank.get("gpus") is None else 0
    mig = rank.get("mig", job.get("mig_per_rank")) or {}
    devices = job.get("gpu_fraction_devices") or 1
    count, part = (int(gpus), GPU) if float(gpus).is_integer() else (devices, milli(gpus))
    if memory_mib:
        count, part = devices, 0
    allowed = rank.get("allowed_nodes")
    if allowed is None and job.get("node_affinity"):
        allowed = job["node_affinity"].get("allowed_nodes")
    return Request(
        count=count,
        milli=part if count else GPU,
        memory_mib=int(memory_mib),
        mig=tuple(sorted((p, int(c)) for p, c in mig.items() if c)),
        cpu_milli=0 if job.get("best_effort") else int(job.get("cpu_milli_per_rank") or 0),
        memory_bytes=0 if job.get("best_effort") else memory_of_rank(job),
        nodes=None if allowed is None else tuple(sorted(allowed)),
        affinity=_affinity(rank.get("pod_affinity"), job.get("namespace")),
        zone_bound=job.get("qos") == "Guaranteed",
        legacy_mig=bool(rank.get("legacy_mig")),
    )


def _affinity(raw: Raw | None, namespace: str | None) -> Affinity | None:
    if not raw:
        return None
    labels = dict(raw.get("labels") or {})
    if namespace:
        labels["namespace"] = namespace
    return Affinity(tuple(sorted(labels.items())), raw.get("attract_within_label") or "", raw.get("repel_within_label") or "")


# ---------------------------------------------------------------- the first facts


def first_facts(raw: Raw) -> Facts:
    """Return where the ranks are at the start, device labels turned into device numbers."""
    facts = Facts()
    labels = _device_labels(raw)
    busy: dict[str, set[int]] = {name: set(of.values()) for name, of in labels.items()}
    leaving: dict[str, list[int]] = {}
    for reserved in (False, True):
        for job in raw["jobs"]:
            known = facts.ranks.setdefault(job["name"], [RankFact(r["state"]) for r in job["ranks"]])
            facts.started_s_ago[job["name"]] = job.get("started_s_ago")
            for fact, rank in zip(known, job["ranks"], strict=True):
                if rank["state"] in ("succeeded", "failed"):
                    fact.node = rank["node"] or ""
                if rank["node"] is None or reserved != (rank["state"] == "pipelined") or rank["state"] not in (*HOLDING, "pipelined"):
                    continue
                request, name = request_of(job, rank), rank["node"]
                fact.node, fact.zones = name, _zone_use(raw, name, rank)
                if request.whole:
                    fact.devices = _whole(raw, name, request.count, busy.setdefault(name, set()), leaving, reserved)
                    if rank["state"] == "releasing":
                        leaving.setdefault(name, []).extend(fact.devices)
                elif request.count:
                    fact.devices = tuple(sorted(labels[name][g] for g in rank["gpu_groups"]))
    return facts


def _device_labels(raw: Raw) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, None]] = {}
    for job in raw["jobs"]:
        for at, rank in enumerate(job["ranks"]):
            if rank["node"] is None or rank["state"] not in (*HOLDING, "pipelined"):
                continue
            request = request_of(job, rank)
            if request.count and not request.whole:
                groups = rank.get("gpu_groups")
                if not groups or len(groups) != request.count:
                    raise BadScenario(f"scenario {raw['id']}, job {job['name']}, rank {at}: a share needs as many gpu_groups as devices")
                found.setdefault(rank["node"], {}).update(dict.fromkeys(groups))
    sizes = {n["name"]: n["gpus"] for n in raw["nodes"]}
    out: dict[str, dict[str, int]] = {}
    for name, groups in found.items():
        numbers: dict[str, int] = {}
        for label in sorted(groups, key=lambda g: (not g.isdigit(), int(g) if g.isdigit() else 0, g)):
            wanted = int(label) if label.isdigit() else -1
            free = [d for d in range(sizes[name]) if d not in numbers.values()]
            if not free:
                raise BadScenario(f"scenario {raw['id']}, node {name}: more device labels than devices")
            numbers[label] = wanted if wanted in free else free[0]
        out[name] = numbers
    return out


def _whole(raw: Raw, name: str, count: int, busy: set[int], leaving: dict[str, list[int]], reserved: bool) -> tuple[int, ...]:
    size = next(n["gpus"] for n in raw["nodes"] if n["name"] == name)
    free = [d for d in range(size) if d not in busy]
    if reserved:
        free = [*leaving.get(name, []), *free]
    if len(free) < count:
        raise BadScenario(f"scenario {raw['id']}, node {name}: more devices are held than there are")
    chosen = free[:count]
    busy.update(chosen)
    leaving[name] = [d for d in leaving.get(name, []) if d not in chosen]
    return tuple(sorted(chosen))


# ---------------------------------------------------------------- NUMA


def quantity(text: object, resource: str) -> int:
    """Return an amount as Kubernetes writes it in the units of a vector: CPU in milli-cores, memory in bytes, devices in thousandths."""
    value = str(text)
    if resource == "memory":
        for suffix, factor in (("Ki", 1024), ("Mi", 1024**2), ("Gi", 1024**3), ("Ti", 1024**4), ("k", 1000), ("M", 10**6), ("G", 10**9)):
            if value.endswith(suffix):
                return round(float(value[: -len(suffix)]) * factor)
        return round(float(value))
    if value.endswith("m"):
        return round(float(value[:-1]))
    return round(float(value) * 1000)


def _triple(amounts: Raw) -> tuple[int | None, int | None, int | None]:
    gpu = next((a for k, a in amounts.items() if k == "gpu" or k.endswith("/gpu")), None)
    cpu, memory = amounts.get("cpu"), amounts.get("memory")
    return (
        None if gpu is None else quantity(gpu, "gpu"),
        None if cpu is None else quantity(cpu, "cpu"),
        None if memory is None else quantity(memory, "memory"),
    )


def _zone_use(raw: Raw, name: str, rank: Raw) -> ZoneUse:
    placement = rank.get("numa_placement")
    if not placement:
        return ()
    node = next(n for n in raw["nodes"] if n["name"] == name)
    ids = [z["id"] for z in node["numa"]["zones"]]
    return tuple((ids.index(z), tuple(a or 0 for a in _triple(used))) for z, used in sorted(placement.items()))  # type: ignore[misc]


def _zones(raw: Raw, node: Raw, first: Facts) -> tuple[Any, ...]:
    """Zones with what would be idle if none of the scenario's own ranks held anything: what is available now, and what they hold."""
    if not node.get("numa"):
        return ()
    out = []
    for at, zone in enumerate(node["numa"]["zones"]):
        idle = list(_triple(zone["available"]))
        for ranks in first.ranks.values():
            for fact in ranks:
                for z, used in fact.zones:
                    if fact.node == node["name"] and z == at and fact.state in HOLDING:
                        idle = [None if i is None else i + u for i, u in zip(idle, used, strict=True)]
        out.append((_triple(zone["allocatable"]), tuple(idle)))
    return tuple(out)


# ---------------------------------------------------------------- the world


def build(raw: Raw, facts: Facts, first: Facts) -> World:
    """Return the world at the start of a round."""
    world = World(_options(raw))
    world.add_nodes(_node(raw, n, first) for n in raw["nodes"])
    for topology in [raw["topology"]] if raw.get("topology") else []:
        world.topologies[topology["name"]] = tuple(topology["levels"])
    for name, levels in (raw.get("topologies") or {}).items():
        world.topologies[name] = tuple(levels)
    left = sorted(raw["queues"], key=lambda q: q["name"])
    while left:
        ready = [q for q in left if q["parent"] is None or q["parent"] in world.queues]
        if not ready:
            raise BadScenario(f"scenario {raw['id']}: queue {left[0]['name']} is its own ancestor")
        for queue in ready:
            world.add_queue(_queue(queue))
        left = [q for q in left if q not in ready]
    for job in raw["jobs"]:
        _add_job(world, job, facts)
    return world


def _options(raw: Raw) -> Options:
    placement = raw.get("placement") or {}
    plugins = placement.get("plugins_limited_to")

    def has(plugin: str) -> bool:
        return plugins is None or plugin in plugins

    return Options(
        gpu_nodes=placement.get("nodes_for_gpu_work", "binpack"),
        cpu_nodes=placement.get("nodes_for_cpu_work", "binpack"),
        share_devices=placement.get("devices_for_shares", "pack"),
        quotas=has("proportion"),
        priorities=has("priority"),
        prefer_ready=has("nodeavailability"),
        prefer_shared=has("gpusharingorder"),
        staleness_grace_s=raw.get("default_staleness_grace_s", 60),
    )


def _node(raw: Raw, node: Raw, first: Facts) -> NodeSpec:
    return NodeSpec(
        name=node["name"],
        gpus=int(node["gpus"]),
        gpu_memory_mib=int(node.get("gpu_memory_mib") or 0),
        cpu_milli=int(node.get("cpu_milli") or 0),
        memory_bytes=bytes_of(node, "memory") or 0,
        max_pods=int(node.get("max_pods", 110)),
        labels=dict(node.get("labels") or {}),
        mig=dict(node["mig"]) if node.get("mig") is not None else None,
        mig_strategy=node.get("mig_strategy") or ("mixed" if node.get("mig") is not None else ""),
        numa_policy=(node.get("numa") or {}).get("policy", ""),
        zones=_zones(raw, node, first),
    )


def _queue(queue: Raw) -> QueueSpec:
    def bound(value: float | None, scale: int = 1) -> int:
        return UNLIMITED if value is None else round(value * scale)

    return QueueSpec(
        name=queue["name"],
        parent=queue["parent"] or "",
        quota=(bound(queue.get("quota_gpus"), GPU), bound(queue.get("quota_cpu_milli")), bound(bytes_of(queue, "quota_memory"))),
        limit=(bound(queue.get("limit_gpus"), GPU), bound(queue.get("limit_cpu_milli")), bound(bytes_of(queue, "limit_memory"))),
        weight=(float(queue.get("over_quota_weight") or 0), 1, 1),
        priority=queue.get("priority", 100),
        created=queue.get("created", 0),
        reclaim_min_runtime_s=queue.get("reclaim_min_runtime_s"),
        preempt_min_runtime_s=queue.get("preempt_min_runtime_s"),
    )


def _add_job(world: World, raw: Raw, facts: Facts) -> None:
    tree = raw.get("subgroups")
    minimum = raw.get("min_ranks")
    root = _group(tree) if tree else PodsetGroup("", None, [Podset("", len(raw["ranks"]) if minimum is None else minimum)])
    job = Job(
        raw["name"],
        world.queues[raw["queue"]],
        priority=raw["priority"],
        preemptible=raw.get("preemptible", raw["priority"] < 100),
        order=raw.get("order", 0),
        root=root,
    )
    job.constraint = _constraint(raw.get("topology"))
    job.age_s = raw["age_minutes"] * 60.0 if raw.get("age_minutes") is not None else None
    job.started_s_ago = facts.started_s_ago.get(raw["name"])
    job.preemption_delay_s = raw.get("preemption_delay_s") or 0.0
    job.stale_for_s = raw.get("stale_for_s")
    grace = raw.get("staleness_grace_s")
    job.staleness_grace_s = float("inf") if grace == "never" else grace
    podsets = {p.name: p for p in job.podsets}
    places: dict[int, tuple[RankState, Place | None]] = {}
    for at, (rank_raw, fact) in enumerate(zip(raw["ranks"], facts.ranks[raw["name"]], strict=True)):
        rank = Rank(job, at, f"{raw['name']}-{at}", world.intern(request_of(raw, rank_raw)), rank_raw.get("order_label"))
        name = rank_raw.get("subgroup") or job.podsets[0].name
        if job.single is None and name not in podsets:
            raise BadScenario(f"job {raw['name']}, rank {at}: there is no podset {name!r}")
        rank.podset = job.single or podsets[name]
        rank.podset.ranks.append(rank)
        job.ranks.append(rank)
        place = _place(world.node_by_name[fact.node], rank.request, fact) if fact.node else None
        places[at] = (STATES[fact.state], place)
    world.add_job(job, places)


def _place(node: Node, request: Request, fact: RankFact) -> Place:
    part = GPU if request.whole else request.milli or share_of_memory(request.memory_mib, node.spec.gpu_memory_mib)
    return Place(node, fact.devices, part if fact.devices else 0, fact.zones)


def _group(raw: Raw) -> PodsetGroup:
    members: list[Member] = [
        Podset(m["name"], m["min_ranks"], _constraint(m.get("topology"))) if m["kind"] == "podset" else _group(m) for m in raw["members"]
    ]
    return PodsetGroup(raw["name"], raw.get("min_members"), members, _constraint(raw.get("topology")))


def _constraint(raw: Raw | None) -> Constraint | None:
    if not raw or not raw.get("topology"):
        return None
    return Constraint(raw["topology"], raw.get("required_level") or "", raw.get("preferred_level") or "")
