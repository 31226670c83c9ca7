"""What the HTTP API says of the queues: declared fields beside what their jobs hold and wait for. docs/api.md. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gangline.core.model.arrays import to_come
from gangline.core.model.gpushares import GPU, charged_milli, in_gpus, uses_of
from gangline.core.model.queues import Amounts, QueueSpec, QueueState, QueueTree, Weights, amount
from gangline.core.model.roles import asked
from gangline.core.model.state import Job, State
from gangline.core.model.topologies import Topology, levels_by_name
from gangline.core.model.usage import Parts, usage_of, usage_of_users
from gangline.core.policy.queues import Queue
from gangline.core.policy.shares import queues_with_shares


class AmountsRow(msgspec.Struct, frozen=True):
    """A quota or a limit; null is unlimited."""

    gpus: float | None
    cpus: float | None
    memory_mib: int | None
    #: GPUs by model, where they are given
    models: dict[str, float]


class WeightsRow(msgspec.Struct, frozen=True):
    """Parts in which siblings divide what is over quota."""

    gpus: float
    cpus: float
    memory: float
    #: by GPU model, where they are given
    models: dict[str, float]


class HeldRow(msgspec.Struct):
    """What jobs that are placed hold."""

    jobs: int = 0
    gpus: float = 0
    cpus: float = 0
    memory_mib: int = 0
    models: dict[str, float] = {}


class PendingRow(msgspec.Struct):
    """What waits."""

    jobs: int = 0
    gpus: float = 0


class UsageRow(msgspec.Struct, frozen=True):
    """What was held on average in the past, as a part of what the nodes had, 0 to 1; what was a half-life ago counts half."""

    gpus: float
    cpus: float
    memory: float


class UserRow(msgspec.Struct):
    """One user of a queue whose users take turns."""

    user: str
    running: int = 0
    gpus: float = 0
    pending: int = 0
    pending_gpus: float = 0
    #: null: the past does not count
    usage: UsageRow | None = None


class QueueRow(msgspec.Struct, frozen=True):
    """One queue with all that is below it."""

    id: str
    #: null at the top
    parent: str | None
    #: jobs go to leaves only
    leaf: bool
    state: QueueState
    #: with the states of the queues above taken into account
    accepts: bool
    starts: bool
    quota: AmountsRow
    limit: AmountsRow
    over_quota_weight: WeightsRow
    priority: int
    #: null: as the parent
    reclaim_min_runtime_s: float | None
    preempt_min_runtime_s: float | None
    usage_half_life_s: float | None
    ageing_per_hour: float | None
    ageing_most: int | None
    #: null: as the parent
    order: str | None
    user_fairness: bool
    allocated: HeldRow
    pending: PendingRow
    #: GPU time that evicted gangs had not saved, lost for the sake of jobs of this queue
    lost_gpu_s: float
    #: what it should have now, GPU models that some queue names included; null before any queue is declared
    fair_share: AmountsRow | None
    #: null: the past does not count
    usage: UsageRow | None
    #: by name; empty where users do not take turns
    users: list[UserRow]


def queue_rows(state: State, now_ms: int) -> list[QueueRow]:
    """Return the queues, parents first. Before any is declared: the default queue, and those that live jobs name."""
    tree = state.queues
    specs = dict(tree.specs)
    held: dict[str, HeldRow] = {}
    pending: dict[str, PendingRow] = {}
    for job in _live_jobs(state):
        for path in _accounts(tree, job):
            specs.setdefault(path, QueueSpec(path))
            if job.active:
                _hold(held.setdefault(path, HeldRow()), state, job)
            else:
                waits = pending.setdefault(path, PendingRow())
                waits.jobs += 1
                waits.gpus = in_gpus(round(waits.gpus * GPU) + asked(job.spec).gpus_milli)
    for array in (state.jobs[job] for job in state.arrays):
        coming = to_come(array)
        for path in _accounts(tree, array) if coming else ():
            specs.setdefault(path, QueueSpec(path))
            waits = pending.setdefault(path, PendingRow())
            waits.jobs += coming
            waits.gpus = in_gpus(round(waits.gpus * GPU) + coming * asked(array.spec).gpus_milli)
    lost: dict[str, int] = {}
    for queue, gpu_ms in state.lost_gpu_ms.items():
        for path in [spec.path for spec in tree.lineage(queue)] if queue in tree.specs else [queue]:
            lost[path] = lost.get(path, 0) + gpu_ms
    shares = queues_with_shares(state, now_ms) if tree.declared else {}
    users = _users(state, now_ms)
    return [
        _row(
            tree, spec, held.get(path, HeldRow()), pending.get(path, PendingRow()), lost.get(path, 0) / 1000, _share(shares.get(path)),
            _usage(usage_of(state.usage, tree, path, now_ms)), [row for _, row in sorted(users.get(path, {}).items())],
        )
        for path, spec in specs.items()
    ]  # fmt: skip


def _users(state: State, now_ms: int) -> dict[str, dict[str, UserRow]]:
    """Return rows of the users of the leaves where they take turns."""
    tree = state.queues
    found: dict[str, dict[str, UserRow]] = {path: {} for path, spec in tree.specs.items() if spec.user_fairness and tree.is_leaf(path)}
    for path, rows in found.items():
        for user, parts in usage_of_users(state.usage, tree, path, now_ms).items():
            rows[user] = UserRow(user)
            rows[user].usage = _usage(parts)
    for job in _live_jobs(state) if found else ():
        queue = found.get(job.spec.queue)
        if queue is None:
            continue
        row = queue.setdefault(job.user, UserRow(job.user, usage=UsageRow(0.0, 0.0, 0.0) if job.spec.queue in tree.half_lives_ms else None))
        if job.active:
            row.running += 1
            row.gpus += in_gpus(sum(charged_milli(r.gpus, r.share) for part in job.parts.values() for r in part.ranks.values()))
        else:
            row.pending += 1
            row.pending_gpus = in_gpus(round(row.pending_gpus * GPU) + asked(job.spec).gpus_milli)
    return found


def _share(queue: Queue | None) -> AmountsRow | None:
    if queue is None:
        return None
    gpus, cpus, memory = queue.fair_share
    return AmountsRow(gpus / 1000, cpus / 1000, memory >> 20, {model: each.fair_share / 1000 for model, each in queue.models.items()})


def _usage(parts: Parts | None) -> UsageRow | None:
    return None if parts is None else UsageRow(*(round(part, 6) for part in parts))


def _live_jobs(state: State) -> Iterator[Job]:
    """Return placed jobs, then waiting ones, each in its order."""
    yield from (state.jobs[job] for job in state.running)
    yield from (state.jobs[job] for _, _, job in state.queue)


def _accounts(tree: QueueTree, job: Job) -> list[str]:
    """Return the queues that a job counts for: its own and those above."""
    return [spec.path for spec in tree.lineage(job.spec.queue)] if tree.declared else [job.spec.queue]


def _hold(row: HeldRow, state: State, job: Job) -> None:
    holds = job.holds()
    row.jobs += 1
    row.gpus = in_gpus(round(row.gpus * GPU) + holds.gpus_milli)
    row.cpus += holds.cpus_milli / 1000
    row.memory_mib += holds.memory_mib
    for node_id, part in job.parts.items():
        node = state.nodes.get(node_id)
        models = {gpu.index: gpu.model for gpu in node.registration.gpus} if node is not None else {}
        for rank in part.ranks.values():
            for gpu in rank.gpus:
                model = models.get(gpu, "")
                milli = GPU if rank.share is None else sum(use.charged for use in uses_of(rank.gpus, rank.share) if use.gpu == gpu)
                row.models[model] = in_gpus(round(row.models.get(model, 0) * GPU) + milli)


def _row(
    tree: QueueTree, spec: QueueSpec, held: HeldRow, pending: PendingRow, lost_gpu_s: float, share: AmountsRow | None, usage: UsageRow | None,
    users: list[UserRow],
) -> QueueRow:  # fmt: skip
    lineage = list(tree.lineage(spec.path)) if spec.path in tree.specs else [spec]
    return QueueRow(
        id=spec.path,
        parent=spec.parent or None if tree.declared else None,
        leaf=not tree.children(spec.path),
        state=spec.state,
        accepts=all(queue.state != "drain" for queue in lineage),
        starts=all(queue.state != "hold" for queue in lineage),
        quota=_amounts(spec.quota),
        limit=_amounts(spec.limit),
        over_quota_weight=_weights(spec.over_quota_weight),
        priority=spec.priority,
        reclaim_min_runtime_s=spec.reclaim_min_runtime_s,
        preempt_min_runtime_s=spec.preempt_min_runtime_s,
        usage_half_life_s=spec.usage_half_life_s,
        ageing_per_hour=spec.ageing_per_hour,
        ageing_most=spec.ageing_most,
        order=spec.order,
        user_fairness=spec.user_fairness,
        allocated=held,
        pending=pending,
        lost_gpu_s=lost_gpu_s,
        fair_share=share,
        usage=usage,
        users=users,
    )


def _amounts(amounts: Amounts) -> AmountsRow:
    return AmountsRow(
        _units(amounts.gpus_milli), _units(amounts.cpus_milli), amounts.memory_mib, {m: each / 1000 for m, each in amounts.models.items()}
    )


def _weights(weights: Weights) -> WeightsRow:
    return WeightsRow(weights.gpus, weights.cpus, weights.memory, weights.models)


def _units(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


def capacity_warnings(state: State, queues: tuple[QueueSpec, ...]) -> list[str]:
    """Return where the quotas of the top queues together are more than all nodes have; empty while no node has joined."""
    nodes = [node.registration for node in state.nodes.values() if node.status == "up"]
    if not nodes:
        return []
    have = {
        "GPUs": sum(len(node.gpus) for node in nodes) * 1000,
        "CPUs": sum(node.cpus_milli for node in nodes),
        "memory": sum(node.memory_mib for node in nodes),
    }
    quotas = [queue.quota for queue in queues if not queue.parent]
    want = {
        "GPUs": sum(quota.gpus_milli or 0 for quota in quotas),
        "CPUs": sum(quota.cpus_milli or 0 for quota in quotas),
        "memory": sum(quota.memory_mib or 0 for quota in quotas),
    }
    return [
        f"the quotas of the top queues are {amount(what, want[what])} together, and the nodes that are up have {amount(what, have[what])}"
        for what in have
        if want[what] > have[what]
    ]


def topology_warnings(state: State, topologies: tuple[Topology, ...]) -> list[str]:
    """Return which nodes would be outside of a declared topology, and how many live jobs ask for what would not be there."""
    nodes = [node for node in state.nodes.values() if node.status == "up"]
    found: list[str] = []
    for topology in topologies:
        outside = [node.id for node in nodes if any(level not in node.registration.labels for level in topology.levels)]
        if outside:
            which = f"{', '.join(outside[:3])}{f' and {len(outside) - 3} more' if len(outside) > 3 else ''}"
            found.append(f"topology {topology.name}: outside of it, without all of its labels: {which}")
    levels = levels_by_name(topologies, ())
    asked = [job.spec.topology for job in state.jobs.values() if job.state != "finished" and job.spec.topology]
    lost = sum(any(level and level not in levels.get(each.name, ()) for level in (each.required, each.preferred)) for each in asked)
    if topologies and lost:
        jobs = "1 live job asks" if lost == 1 else f"{lost} live jobs ask"
        found.append(f"{jobs} for a topology or level that would not be declared, and would wait for it")
    return found
