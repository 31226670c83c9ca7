"""What the HTTP API says of a job that is not submitted: what would be decided about it now. docs/api.md. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model.events import PlacedPart
from gangline.core.model.spec import JobSpec
from gangline.core.model.state import State
from gangline.core.policy.capacity import impossible
from gangline.core.policy.plan import Plan
from gangline.core.policy.refusals import Refusal
from gangline.leader.gpurows import ShareRow, share_row


class PlannedPartRow(msgspec.Struct, frozen=True):
    """Ranks that would be on one node, and the GPUs of each."""

    node: str
    ranks: list[int]
    gpus: list[tuple[int, ...]]
    #: of each rank; null: it would have its GPUs whole
    shares: list[ShareRow | None]


class DisplacedRow(msgspec.Struct, frozen=True):
    """A gang that would be asked to leave."""

    job: str
    name: str
    user: str
    queue: str
    gpus: float
    #: reclaim, preempt or consolidate
    by: str


class ReasonRow(msgspec.Struct, frozen=True):
    """Why it would wait."""

    code: str
    message: str
    need: dict[str, int]
    have: dict[str, int]
    #: queues or jobs that hold what is missing, where that is known
    holders: tuple[str, ...]


class PlanRow(msgspec.Struct, frozen=True):
    """The whole answer."""

    name: str
    outcome: Literal["starts", "evicts", "waits"]
    message: str
    placement: list[PlannedPartRow]
    evicted: list[DisplacedRow]
    reason: ReasonRow | None
    #: why it can never run on the nodes that are up
    impossible: str | None


def plan_row(state: State, spec: JobSpec, found: Plan) -> PlanRow:
    """Return what would be decided about a job, in words and numbers."""
    never = impossible(state, spec)
    return PlanRow(
        name=spec.name,
        outcome=found.outcome,
        message=_message(found, never),
        placement=[_planned(part) for part in found.parts],
        evicted=[_displaced(state, d.job, d.action) for d in found.displaced],
        reason=_reason(found.reason) if found.reason is not None else None,
        impossible=never or None,
    )


def _planned(part: PlacedPart) -> PlannedPartRow:
    return PlannedPartRow(part.node, [r.rank for r in part.ranks], [r.gpus for r in part.ranks], [share_row(r.share) for r in part.ranks])


def _message(found: Plan, never: str) -> str:
    ranks, nodes = sum(len(part.ranks) for part in found.parts), len(found.parts)
    where = f"{ranks} rank{'' if ranks == 1 else 's'} on {nodes} node{'' if nodes == 1 else 's'}"
    gangs = len({d.job for d in found.displaced})
    if found.outcome == "starts":
        return f"would start now: {where}"
    if found.outcome == "evicts":
        return f"would have {gangs} gang{'' if gangs == 1 else 's'} leave, and then start{f': {where}' if ranks else ''}"
    return f"would wait: {never or (found.reason.message if found.reason is not None else 'nothing says why')}"


def _reason(why: Refusal) -> ReasonRow:
    return ReasonRow(why.code, why.message, why.need, why.have, why.holders)


def _displaced(state: State, job_id: str, action: str) -> DisplacedRow:
    job = state.jobs[job_id]
    return DisplacedRow(job.id, job.spec.name, job.user, job.spec.queue, job.holds().gpus, action)
