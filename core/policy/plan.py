"""What would be decided about a job that is not submitted: the real passes, on a world with that job in it, which is then put back. Pure.

A scheduler that leads keeps such a world anyway (mirror.py); the job is put into it, and everything is taken back. Elsewhere one is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from gangline.core.model.events import PlacedPart
from gangline.core.model.foldlife import is_met, set_conditions
from gangline.core.model.roles import placed, wrong_sizes
from gangline.core.model.spec import JobSpec
from gangline.core.model.state import Job, Scratch, State
from gangline.core.policy.gangs import Rank
from gangline.core.policy.mirror import Mirror
from gangline.core.policy.nodes import Place
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.report import Action, Decisions
from gangline.core.policy.schedule import PASSES, plain_amounts, reserved_places
from gangline.core.policy.session import run_session

#: nodes and gangs of which a world is built in a fraction of a second
SMALL = 2_000
#: stands for the job; no id that we make looks like this
PLANNED = "(planned)"


@dataclass(frozen=True)
class Displaced:
    """A gang that would be asked to leave for the job."""

    job: str
    action: Action
    ranks: int


@dataclass(frozen=True)
class Plan:
    """What would be decided. `reason` is there when it would wait; amounts are those of the log."""

    outcome: Literal["starts", "evicts", "waits"]
    parts: tuple[PlacedPart, ...] = ()
    displaced: tuple[Displaced, ...] = ()
    reason: Refusal | None = None


def cheap(state: State) -> bool:
    """Whether a plan costs no more than a cycle: the world is kept here, or is soon built."""
    kept = isinstance(state.scratch.mirror, Mirror) and not state.scratch.everything_moved
    return kept or len(state.nodes) + len(state.queue) + len(state.running) <= SMALL


def plan(state: State, spec: JobSpec, now_ms: int, user: str = "") -> Plan:
    """Return what would be decided about a job if it were submitted at this log time, as the last of its priority."""
    job = Job(
        id=PLANNED, spec=spec, number=state.submitted + 1, submitted_at_ms=now_ms, submitted_index=state.index, user=user,
        since_ms=now_ms,
    )  # fmt: skip
    set_conditions(job, now_ms)
    job.waits_for = {each.job: each.when for each in spec.depends_on if not is_met(state, each.job, each.when)}
    supposed = msgspec.structs.replace(state, jobs={**state.jobs, PLANNED: job}, scratch=Scratch())
    supposed.scratch.poison = dict(state.scratch.poison)
    kept = state.scratch.mirror
    if not isinstance(kept, Mirror) or state.scratch.everything_moved:
        mirror = Mirror()
        mirror.sync(supposed, now_ms)
        return _decide(mirror, job)
    try:
        kept.sync(state, now_ms)
        return _with_job(kept, supposed, job, now_ms)
    except BaseException:
        state.scratch.everything_moved = True  # whatever is left in it is not kept
        raise


def _with_job(mirror: Mirror, supposed: State, job: Job, now_ms: int) -> Plan:
    supposed.scratch.everything_moved = False
    supposed.scratch.moved[PLANNED] = None
    mirror.sync(supposed, now_ms)
    found = _decide(mirror, job)
    mirror.take_back()
    del supposed.jobs[PLANNED]
    supposed.scratch.moved[PLANNED] = None
    mirror.sync(supposed, now_ms)
    return found


def _decide(mirror: Mirror, job: Job) -> Plan:
    decisions = run_session(mirror.world, PASSES, mirror.placer)
    places = [(p.rank, p.place) for p in decisions.placements if p.rank.job.name == PLANNED]
    displaced = _displaced(decisions)
    if places:
        return Plan("starts", mirror.placement(job, places).parts, displaced)
    if displaced:
        reserved = [(r.rank, r.place) for r in decisions.reservations if r.rank.job.name == PLANNED]
        return Plan("evicts", _parts_later(mirror, job, reserved), displaced)
    why = mirror.barred.get(PLANNED) or reserved_places(decisions).get(PLANNED)
    why = why or next((why for jobs, why in decisions.refusals if any(j.name == PLANNED for j in jobs)), None)
    if why is None:
        return Plan("waits")
    return Plan("waits", reason=Refusal(why.code, why.message, plain_amounts(why.need), plain_amounts(why.have), why.holders))


def _parts_later(mirror: Mirror, job: Job, places: list[tuple[Rank, Place]]) -> tuple[PlacedPart, ...]:
    """Return where the job would be once the others have left; nothing when its smallest size is not all there."""
    parts, role_sizes = mirror.placement(job, places)
    sizes = placed(job.spec, role_sizes, sum(len(p.ranks) for p in parts))
    return () if wrong_sizes(job.spec, sizes) else parts


def _displaced(decisions: Decisions) -> tuple[Displaced, ...]:
    ranks: dict[tuple[str, Action], int] = {}
    for eviction in decisions.evictions:
        if eviction.beneficiary == PLANNED:
            key = (eviction.rank.job.name, eviction.action)
            ranks[key] = ranks.get(key, 0) + 1
    return tuple(Displaced(job, action, count) for (job, action), count in ranks.items())
