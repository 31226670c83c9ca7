"""What the HTTP API says of a job and of a node: docs/api.md. Pure.

Times that have not come yet and values that nobody has reported are null. Values of environment variables that look like secrets are hidden.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from gangline.core.model.arrays import array_text, count, indices_text, size, to_come
from gangline.core.model.documents import RestartNotice
from gangline.core.model.gpushares import in_gpus
from gangline.core.model.jobfile import to_json
from gangline.core.model.roles import Leaf, asked, least, leaves
from gangline.core.model.spec import ArraySpec, JobSpec, Role
from gangline.core.model.state import Job, Node, Rank
from gangline.leader.gpurows import PartedGpuRow, ShareRow, parted_rows, share_row
from gangline.leader.healthrows import worst

#: names of environment variables whose values are never shown: the log keeps what was submitted, the API does not repeat it
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|(^|_)KEY($|_)|APIKEY|ACCESS_KEY", re.IGNORECASE)
HIDDEN = "(hidden)"


#: a job as a list shows it: an array waits until one of its elements has run
ShownState = Literal["queued", "placed", "preparing", "running", "restarting", "preempting", "resizing", "finished"]
SHOWN_STATES: frozenset[str] = frozenset(get_args(ShownState))


class ElementsRow(msgspec.Struct, frozen=True):
    """How far an array is, in elements."""

    total: int
    #: not jobs yet
    to_come: int
    queued: int
    #: placed, on the way there or on the way out
    active: int
    succeeded: int
    failed: int
    cancelled: int
    at_most: int | None
    #: indices as people write them
    indices: str
    failed_indices: str


class DependencyRow(msgspec.Struct, frozen=True):
    """A job that has to get somewhere first."""

    job: str
    when: str


class JobRow(msgspec.Struct, frozen=True, gc=False):
    """One line of the job list."""

    id: str
    name: str
    queue: str
    user: str
    priority: int
    state: ShownState
    #: succeeded, failed or cancelled; null before the end
    outcome: str | None
    generation: int
    ranks: int
    gpus: float
    nodes: list[str]
    submitted_at_ms: int
    started_at_ms: int | None
    ended_at_ms: int | None
    #: why it waits, leaves, came back or ended; empty while all is well
    reason: str
    #: of an element: the id of its array, and its index there
    array: str | None
    array_index: int | None
    #: of an array: how far it is
    elements: ElementsRow | None
    held: bool


class RankRow(msgspec.Struct, frozen=True):
    """One rank of the current placement."""

    rank: int
    #: "" in a job without roles
    role: str
    gpus: tuple[int, ...]
    state: Literal["waiting", "running", "exited"]
    exit_code: int | None
    #: null: it has its GPUs whole
    share: ShareRow | None


class RoleRow(msgspec.Struct, frozen=True):
    """One role of a job, all of its replicas together."""

    name: str
    #: placed now, asked for, and the fewest that are worth starting
    ranks: int
    asked_ranks: int
    min_ranks: int
    #: placed now with all of their ranks, and asked for
    replicas: int
    asked_replicas: int
    #: of each rank
    gpus: float
    #: where it is, in order of node rank
    nodes: list[str]


class PartRow(msgspec.Struct, frozen=True):
    """What of a gang is on one node."""

    node: str
    ranks: list[RankRow]


class CheckpointRow(msgspec.Struct, frozen=True):
    """The last checkpoint that the job reported."""

    step: int
    path: str


class DeferredRow(msgspec.Struct, frozen=True):
    """The recorded witness of why a gang is not placed."""

    code: str
    message: str
    need: dict[str, int]
    have: dict[str, int]


class WholeJob(JobRow, frozen=True):
    """Everything about one job that is not history."""

    spec: dict[str, Any]
    cause: str | None
    exit_code: int | None
    #: empty in a job without roles
    roles: list[RoleRow]
    placement: list[PartRow]
    restarts: int
    last_restart: RestartNotice | None
    step: int | None
    checkpoint: CheckpointRow | None
    deferred: DeferredRow | None
    master: str | None
    #: GPU time that it lost in restarts and evictions, since its last checkpoint each time; and that gangs lost that were evicted for it
    lost_gpu_s: float
    cost_gpu_s: float
    #: what has to happen first
    waits_for: list[DependencyRow]
    held_by: str | None
    begin_at_ms: int | None
    deadline_ms: int | None


class NodeRow(msgspec.Struct, frozen=True):
    """One node."""

    id: str
    state: Literal["up", "lost"]
    schedulable: bool
    cordoned: bool
    draining: bool
    reason: str
    address: str
    gpus_total: int
    #: those of which nothing is held
    gpus_free: int
    gpus_parted: list[PartedGpuRow]
    #: models on this node joined by a comma; mostly one
    gpu_model: str
    cpus_total: float
    cpus_free: float
    memory_total_mib: int
    memory_free_mib: int
    #: ids of the jobs that hold something here, in order of placement
    jobs: list[str]
    labels: dict[str, str]
    agent_version: str
    lease_ttl_s: float
    #: worst state of the node and its GPUs (GET /v1/nodes/{id}/health says more), and how many of them are given to nobody
    health: str
    gpus_withdrawn: int
    spare: bool


def job_row(job: Job) -> JobRow:
    """Return the line of the job list."""
    spec = job.spec
    holds = job.holds() if job.parts else asked(spec)
    return JobRow(
        job.id, spec.name, spec.queue, job.user, spec.priority, shown_state(job), job.outcome or None, job.generation, holds.ranks,
        holds.gpus, list(job.parts), job.submitted_at_ms, job.started_at_ms or None, job.ended_at_ms or None, reason_of(job),
        job.array or None, job.array_index if job.array else None, elements_row(job), job.held,
    )  # fmt: skip


def shown_state(job: Job) -> ShownState:
    """Return the state of a job as people see it."""
    if job.state == "array":
        return "running" if job.started_at_ms else "queued"
    return job.state


def elements_row(job: Job) -> ElementsRow | None:
    """Return how far an array is, None for a job that is none."""
    elements, spec = job.elements, job.spec.array
    if elements is None or spec is None:
        return None
    coming = to_come(job)
    ended = {word: count(runs) for word, runs in (("succeeded", elements.succeeded), ("failed", elements.failed))}
    live = len(elements.live)
    return ElementsRow(
        total=size(spec), to_come=coming, queued=elements.queued, active=live - elements.queued, **ended,
        cancelled=size(spec) - coming - live - sum(ended.values()), at_most=spec.at_most or None, indices=array_text(ArraySpec(spec.ranges)),
        failed_indices=indices_text(spec, elements.failed),
    )  # fmt: skip


def whole_job(job: Job) -> WholeJob:
    """Return everything about a job; its spec in the job file's words."""
    ended = job.state == "finished"
    deferral = job.deferral
    every = leaves(job.spec)
    return WholeJob(
        **msgspec.structs.asdict(job_row(job)),
        spec=shown_spec(job.spec),
        cause=job.cause or None,
        exit_code=job.exit_code if ended else None,
        roles=_role_rows(job) if job.spec.roles else [],
        placement=[
            PartRow(node, [_rank_row(r, rank, every[rank.leaf].name) for r, rank in part.ranks.items()]) for node, part in job.parts.items()
        ],
        restarts=job.restarts,
        last_restart=job.restart,
        step=job.step if job.step >= 0 else None,
        checkpoint=CheckpointRow(job.checkpoint_step, job.checkpoint_path) if job.checkpoint_step >= 0 else None,
        deferred=DeferredRow(deferral.code, deferral.message, deferral.need, deferral.have) if deferral is not None else None,
        master=master(job),
        lost_gpu_s=job.lost_gpu_ms / 1000,
        cost_gpu_s=job.cost_gpu_ms / 1000,
        waits_for=[DependencyRow(other, when) for other, when in job.waits_for.items()],
        held_by=job.held_by or None,
        begin_at_ms=job.begin_at_ms or None,
        deadline_ms=job.deadline_ms or None,
    )


def node_row(node: Node) -> NodeRow:
    """Return the line of the node list, which is all there is about a node."""
    reg = node.registration
    return NodeRow(
        id=reg.node,
        state=node.status,
        schedulable=node.schedulable,
        cordoned=node.cordoned,
        draining=node.draining,
        reason=node.reason,
        address=reg.address,
        gpus_total=len(reg.gpus),
        gpus_free=len(node.free_gpus),
        gpus_parted=parted_rows(node),
        gpu_model=", ".join(dict.fromkeys(g.model for g in reg.gpus)),
        cpus_total=reg.cpus_milli / 1000,
        cpus_free=node.free_cpus_milli / 1000,
        memory_total_mib=reg.memory_mib,
        memory_free_mib=node.free_memory_mib,
        jobs=list(node.holdings),
        labels=reg.labels,
        agent_version=reg.agent_version,
        lease_ttl_s=reg.lease_ttl_s,
        health=worst(node),
        gpus_withdrawn=sum(not gpu.healthy for gpu in reg.gpus),
        spare=node.spare,
    )


def master(job: Job) -> str | None:
    """Return where the ranks of the current generation meet, as host:port, None before that is known."""
    if not job.master_addr:
        return None
    host = f"[{job.master_addr}]" if ":" in job.master_addr else job.master_addr
    return f"{host}:{job.master_port}"


def shown_spec(spec: JobSpec) -> dict[str, Any]:
    """Return the spec in the job file's words, without its secrets."""
    return to_json(without_secrets(spec))


def without_secrets(spec: JobSpec) -> JobSpec:
    """Return the spec with the values of secret variables hidden."""
    return msgspec.structs.replace(spec, env=_hidden(spec.env), roles=tuple(map(_role_without_secrets, spec.roles)))


def _role_without_secrets(role: Role) -> Role:
    return msgspec.structs.replace(role, env=_hidden(role.env), roles=tuple(map(_role_without_secrets, role.roles)))


def _hidden(env: dict[str, str]) -> dict[str, str]:
    return {k: HIDDEN if _SECRET.search(k) else v for k, v in env.items()}


def reason_of(job: Job) -> str:
    """Return why a job waits, leaves, came back or ended; empty while all is well."""
    if job.state == "finished":
        return job.message
    if job.stop:
        return job.stop
    if job.state == "array":
        return _array_reason(job)
    if job.state == "queued":
        return job.deferral.message if job.deferral is not None else job.restart.message if job.restart is not None else ""
    if job.state in ("preempting", "resizing") and job.notice is not None:
        return job.notice.message
    return job.restart.message if job.state == "restarting" and job.restart is not None else ""


def _array_reason(job: Job) -> str:
    """How far an array is, in words; and why it does not go on when it does not."""
    row = elements_row(job)
    assert row is not None
    words = {"active": "running", "to_come": "to come"}
    counts = {word: getattr(row, word) for word in ("active", "queued", "to_come", "succeeded", "failed", "cancelled")}
    text = f"of {row.total}: " + ", ".join(f"{n} {words.get(word, word)}" for word, n in counts.items() if n)
    if job.deferral is None and job.held:
        return f"held; {text}"
    return f"{job.deferral.message}; {text}" if job.deferral is not None else text


def _role_rows(job: Job) -> list[RoleRow]:
    sizes = job.sizes() if job.parts else (0,) * len(leaves(job.spec))
    nodes: dict[int, dict[str, None]] = {}
    for node, part in job.parts.items():
        for rank in part.ranks.values():
            nodes.setdefault(rank.leaf, {})[node] = None
    by_role: dict[int, list[tuple[Leaf, int, int]]] = {}
    for leaf, there, fewest in zip(leaves(job.spec), sizes, least(job.spec), strict=True):
        by_role.setdefault(leaf.role, []).append((leaf, there, fewest))
    rows = []
    for found in by_role.values():
        leaf = found[0][0]
        used = {node: None for each, _, _ in found for node in nodes.get(each.index, ())}
        rows.append(RoleRow(
            leaf.name, sum(size for _, size, _ in found), len(found) * leaf.gang.ranks, sum(fewest for _, _, fewest in found),
            sum(size == leaf.gang.ranks for _, size, _ in found), len(found), in_gpus(leaf.resources.charged_milli()),
            [n for n in job.parts if n in used],
        ))  # fmt: skip
    return rows


def _rank_row(number: int, rank: Rank, role: str) -> RankRow:
    state: Literal["waiting", "running", "exited"] = "exited" if rank.exited else "running" if rank.started else "waiting"
    return RankRow(number, role, rank.gpus, state, rank.exit_code if rank.exited else None, share_row(rank.share))
