"""What the HTTP API says of why a job is where it is: the record, beside who holds what it waits for. docs/api.md. Pure."""

from __future__ import annotations

from heapq import nsmallest
from typing import Literal

import msgspec

from gangline.core.model.documents import RestartNotice, StopNotice
from gangline.core.model.gpushares import GPU, in_gpus
from gangline.core.model.narrate import duration
from gangline.core.model.roles import asked, full
from gangline.core.model.state import Deferral, Job, State
from gangline.core.policy.capacity import ends_ms, impossible
from gangline.core.policy.estimate import Estimate, end_of, start_of
from gangline.core.policy.resize import grows_from_ms
from gangline.core.policy.service import waiting_key
from gangline.leader.rows import ShownState, reason_of, shown_state

#: holders that are named
MAX_HOLDERS = 10
#: reasons that are about one queue, not about the whole cluster
_OF_QUEUES = ("over_limit", "over_quota")
#: reasons that have nothing to do with what others hold
_OF_ITSELF = ("held", "dependency", "before_begin", "array_turn")
#: amounts of a witness → unit and how many of them make one
_UNITS = {
    "gpus": ("GPU", 1), "gpus_milli": ("GPU", 1000), "cpus_milli": ("CPU", 1000), "memory_mib": ("GiB of memory", 1024), "ranks": ("rank", 1),
    "nodes": ("node", 1), "instances": ("MIG instance", 1),
}  # fmt: skip


class WitnessRow(msgspec.Struct, frozen=True):
    """Why a gang waits, as it was recorded: numbers are those of the entry, not of now."""

    code: str
    message: str
    need: dict[str, int]
    have: dict[str, int]
    index: int
    #: null when the entry is no longer in the log
    at_ms: int | None


class OrderRow(msgspec.Struct, frozen=True):
    """Place among those that wait in one queue; the first has position 1."""

    queue: str
    position: int
    waiting: int
    gpus_ahead: float


class QueueHolderRow(msgspec.Struct):
    """What the placed gangs of one queue hold."""

    queue: str
    jobs: int = 0
    gpus: float = 0


class HolderRow(msgspec.Struct, frozen=True):
    """One placed gang."""

    job: str
    name: str
    user: str
    queue: str
    gpus: float
    state: ShownState
    since_ms: int
    #: by its time limit, or its notice; null when it has neither
    ends_at_ms: int | None


class HoldersRow(msgspec.Struct, frozen=True):
    """Who holds what a gang waits for: in its queue when that is what bounds it, else everywhere."""

    queue: str | None
    jobs: int
    gpus: float
    queues: list[QueueHolderRow]
    largest: list[HolderRow]


class RecordRow(msgspec.Struct, frozen=True):
    """One entry of the log that made it so."""

    index: int
    at_ms: int
    event: str
    message: str


class WhyRow(msgspec.Struct, frozen=True):
    """The whole answer."""

    job: str
    name: str
    state: ShownState
    since_ms: int
    #: the answer in one sentence
    message: str
    witness: WitnessRow | None
    order: OrderRow | None
    holders: HoldersRow | None
    would_change: list[str]
    #: why it can never run on the nodes that are up; null when it could, or does
    impossible: str | None
    last_restart: RestartNotice | None
    notice: StopNotice | None
    outcome: str | None
    cause: str | None
    records: list[RecordRow]


def why_row(state: State, job: Job, now_ms: int, witness_at_ms: int | None, records: list[RecordRow]) -> WhyRow:
    """Return why a job is in its state. `witness_at_ms` is the time of the entry with the witness, `records` are the entries behind the rest."""
    waits = shown_state(job) == "queued"
    deferral = job.deferral if job.state in ("queued", "array") else None
    never = impossible(state, job.spec) if waits else ""
    return WhyRow(
        job=job.id,
        name=job.spec.name,
        state=shown_state(job),
        since_ms=job.since_ms,
        message=_message(job, now_ms),
        witness=_witness(deferral, witness_at_ms) if deferral is not None else None,
        order=order_row(state, job, now_ms) if job.state == "queued" and job.id in state.jobs else None,
        holders=_holders(state, job, now_ms, deferral) if waits and (deferral is None or deferral.code not in _OF_ITSELF) else None,
        would_change=_would_change(job, deferral, never),
        impossible=never or None,
        last_restart=job.restart,
        notice=job.notice,
        outcome=job.outcome or None,
        cause=job.cause or None,
        records=records,
    )


class WhenRow(msgspec.Struct, frozen=True):
    """When a job starts or ends, as far as that can be told, and what says so."""

    job: str
    name: str
    state: ShownState
    #: "start" of one that waits, "end" of any other
    of: Literal["start", "end"]
    #: null: cannot be told, or never
    at_ms: int | None
    #: from the time of the answer, 0 when it is due
    in_s: float | None
    basis: str
    order: OrderRow | None
    gpus_without_limit: float | None
    started_at_ms: int | None


def when_row(state: State, job: Job, now_ms: int) -> WhenRow:
    """Return when a waiting job may start, when a placed one ends at the latest, and when one that is over ended."""
    waits = shown_state(job) == "queued"
    if job.state == "finished":
        found = Estimate(job.ended_at_ms or None, f"it is over: {job.outcome}")
    elif job.elements is not None and not waits:
        found = Estimate(None, f"unknown: its elements end one by one, {reason_of(job)}")
    else:
        found = start_of(state, job, now_ms) if waits else end_of(job, now_ms)
    return WhenRow(
        job=job.id,
        name=job.spec.name,
        state=shown_state(job),
        of="start" if waits else "end",
        at_ms=found.at_ms,
        in_s=None if found.at_ms is None else max(0.0, (found.at_ms - now_ms) / 1000),
        basis=found.basis,
        order=order_row(state, job, now_ms) if job.state == "queued" and job.id in state.jobs else None,
        gpus_without_limit=found.gpus_without_limit if waits else None,
        started_at_ms=job.started_at_ms or None,
    )


def _witness(deferral: Deferral, at_ms: int | None) -> WitnessRow:
    return WitnessRow(deferral.code, deferral.message, deferral.need, deferral.have, deferral.index, at_ms)


def _message(job: Job, now_ms: int) -> str:
    if job.state == "finished":
        return f"{job.outcome}: {job.message}" if job.message else job.outcome
    if job.stop:
        return f"is being stopped: {job.stop}"
    if job.state == "array":
        return reason_of(job)
    if job.state == "queued":
        if job.deferral is not None:
            return job.deferral.message
        if job.not_before_ms > now_ms:
            return f"is not placed again before its back-off is over{_after(job)}"
        return f"nothing is recorded about it yet{_after(job)}"
    if job.state == "preempting" and job.notice is not None:
        return f"was asked to leave ({job.notice.cause}): {job.notice.message}"
    if job.resize is not None:
        return f"goes on with {job.resize.world_size} ranks instead of {job.world_size}: {job.resize.message}"
    return {
        "placed": "has its place and is being prepared there",
        "preparing": "is being prepared, and starts when all of its nodes are ready",
        "restarting": "starts again",
        "preempting": "was asked to leave",
    }.get(job.state, f"runs as generation {job.generation}{_size(job, now_ms)}") + _after(job)


def _size(job: Job, now_ms: int) -> str:
    """What may become of the size of a gang that runs and could be larger."""
    start_ms = grows_from_ms(job)
    if start_ms is None:
        return ""
    wait_s = (start_ms - now_ms) / 1000
    when = f"in {duration(wait_s)} at the earliest" if wait_s > 0 else "as soon as there is room that nobody waits for"
    return f" with {job.world_size} of up to {sum(full(job.spec))} ranks, and grows {when}"


def _after(job: Job) -> str:
    return f", after {job.restart.cause}: {job.restart.message}" if job.restart is not None else ""


def order_row(state: State, job: Job, now_ms: int) -> OrderRow:
    """Return the place of a waiting job in its queue."""
    tree = state.queues
    own, ahead, gpus, waiting = tree.leaf_of(job.spec.queue), 0, 0, 0
    key = waiting_key(state, job, now_ms)
    for _, _, other_id in state.queue:
        other = state.jobs[other_id]
        if tree.leaf_of(other.spec.queue) != own:
            continue
        waiting += 1
        if waiting_key(state, other, now_ms) < key:
            ahead += 1
            gpus += asked(other.spec).gpus_milli
    return OrderRow(own, ahead + 1, max(waiting, ahead + 1), in_gpus(gpus))


def _holders(state: State, job: Job, now_ms: int, deferral: Deferral | None) -> HoldersRow:
    within = state.queues.leaf_of(job.spec.queue) if deferral is not None and deferral.code in _OF_QUEUES else None
    placed = [state.jobs[j] for j in state.running]
    if within is not None:
        placed = [other for other in placed if _shares_bound(state, other, within)]
    queues: dict[str, QueueHolderRow] = {}
    for other in placed:
        row = queues.setdefault(other.spec.queue, QueueHolderRow(other.spec.queue))
        row.jobs += 1
        row.gpus = in_gpus(round(row.gpus * GPU) + other.holds().gpus_milli)
    largest = [_holder(other, now_ms) for other in nsmallest(MAX_HOLDERS, placed, key=lambda j: (-_gpus(j), j.order))]
    in_order = sorted(queues.values(), key=lambda row: (-row.gpus, row.queue))
    total = in_gpus(sum(round(row.gpus * GPU) for row in in_order))
    return HoldersRow(within, len(placed), total, in_order, largest)


def _shares_bound(state: State, other: Job, leaf: str) -> bool:
    """Whether a job is charged to the same top queue: any queue on the way there may be the one whose bound is reached."""
    return state.queues.leaf_of(other.spec.queue).partition("/")[0] == leaf.partition("/")[0]


def _holder(job: Job, now_ms: int) -> HolderRow:
    spec = job.spec
    since = job.running_since_ms or job.since_ms
    return HolderRow(job.id, spec.name, job.user, spec.queue, _gpus(job), shown_state(job), since, ends_ms(job, now_ms))


def _gpus(job: Job) -> float:
    return job.holds().gpus


def _would_change(job: Job, deferral: Deferral | None, never: str) -> list[str]:
    """Return what is missing by the recorded numbers, and what is in the way now."""
    if job.state not in ("queued", "array"):
        return []
    if never:
        return ["other nodes, or a smaller gang: it could not run even if everything else had left"]
    if deferral is None:
        return []
    out = [_more(name, deferral.need[name] - have) for name, have in deferral.have.items() if deferral.need.get(name, 0) > have]
    if deferral.code in _OF_QUEUES:
        word = "limit" if deferral.code == "over_limit" else "quota"
        out = [f"{missing} within the {word} of its queue" for missing in out] or [f"a higher {word} of its queue"]
    if deferral.code == "queue_held":
        out.append("its queue being opened")
    if deferral.code == "held":
        out.append("its release, by `gangline release`")
    if deferral.code == "dependency":
        out += [f"{other}: {when}" for other, when in list(job.waits_for.items())[:MAX_HOLDERS]]
    if deferral.code == "reserved":
        out.append("the end of the gangs that are leaving its place")
    return out


def _more(name: str, missing: int) -> str:
    unit, each = _UNITS.get(name, (name, 1))
    count = f"{missing / each:.4g}"
    return f"{count} more {unit}{'' if count == '1' or unit.endswith('memory') else 's'}"
