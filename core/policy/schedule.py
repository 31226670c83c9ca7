"""The passes, run on the mirror of the state: what they decide, as events.

    state ─▶ mirror ─▶ allocate, backfill, consolidate, reclaim, preempt, grow, reserve
                           ─▶ gang_placed, gang_preempting, gang_resizing, gangs_deferred, gang_reserved

A gang that has to make room gives up what it can do without (`gang_resizing`, resize.py), if that is enough. Otherwise it is asked to leave
(`gang_preempting`), with its own grace; it is queued again when it has left, and then competes for a place in the order of the queues. What it
leaves is earmarked for the gang that it makes room for (earmarks.py). Gangs are placed whole by construction, so there are no stale ones to
evict. Gangs are moved for others (consolidate.py) only where the loss of their work is known, and is worth it (moves.py).
"""

from __future__ import annotations

from types import TracebackType

from gangline.core.model import events as ev
from gangline.core.model.state import Job, State
from gangline.core.policy import gangs, resize, sizes
from gangline.core.policy.earmarks import earmarked
from gangline.core.policy.ledger import Ledger
from gangline.core.policy.lostwork import Losses
from gangline.core.policy.mirror import Mirror
from gangline.core.policy.moves import AGAIN_MS as MOVES_AGAIN_MS
from gangline.core.policy.moves import Moves
from gangline.core.policy.nodes import Place
from gangline.core.policy.profile import Profile
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.report import Action, Decisions
from gangline.core.policy.reserve import holds_of, reserve
from gangline.core.policy.session import run_session
from gangline.core.policy.waiting import Tail

#: the passes that change the cluster, in order
PASSES: tuple[Action, ...] = ("allocate", "consolidate", "reclaim", "preempt", "grow")
#: waiting gangs are looked at again after this time although nothing has happened: the protection of those that run may have ended
LOOK_AGAIN_MS = 15_000
#: why a gang is asked to leave, by the pass that needs its place
_CAUSES: dict[Action, str] = {"consolidate": "consolidated", "reclaim": "reclaimed", "preempt": "preempted"}
#: jobs named in one gangs_deferred event, which keeps the event small
_DEFERRED_TOGETHER = 500
#: jobs that the rules trip over in one cycle, at most; more than that is no fault of jobs
_POISON_TRIES = 8


def schedule(state: State, now_ms: int) -> list[ev.LogEvent]:
    """Return what the passes decide now: placements, gangs asked to leave, and a reason for every gang that waits where it has changed."""
    if not state.scratch.queue_dirty:
        return []
    state.scratch.queue_dirty = False
    state.scratch.looked_ms = now_ms
    mirror = state.scratch.mirror
    if not isinstance(mirror, Mirror):
        mirror = state.scratch.mirror = Mirror()
        state.scratch.everything_moved = True
    for _ in range(_POISON_TRIES):
        try:
            mirror.sync(state, now_ms)
            mirror.world.first = earmarked(state, now_ms)
            profile = Profile(state, now_ms)
            mirror.world.holds = holds_of(state, profile)
            mirror.world.losses, mirror.world.ledger = Losses(state, now_ms), Ledger(state, now_ms)
            waiting = mirror.world.waiting_groups()
            mirror.world.moves = moves = Moves(state, now_ms) if now_ms - state.scratch.moves_ms >= MOVES_AGAIN_MS else None
            passes = PASSES if moves is not None and moves.movable else [p for p in PASSES if p != "consolidate"]
            if moves is not None:
                state.scratch.moves_ms = now_ms
            decisions = run_session(mirror.world, passes, mirror.placer) if waiting else Decisions()
            state.scratch.withheld |= {job.name: why for job, why in decisions.withheld.items()}
            events = _events(state, mirror, decisions, now_ms)
            if all(isinstance(e, ev.GangsDeferred) for e in events):
                # Who moves now is not in the profile yet; the next session of the cycle, which moves nobody, sees all.
                events += reserve(mirror.world, mirror.placer, decisions, profile)
            mirror.take_back()
            # What was decided becomes true before the next look; the last look finds nothing. Where only reasons were written, the next look
            # would see the same world, and decide the same.
            state.scratch.queue_dirty = not all(isinstance(e, ev.GangsDeferred) for e in events)
            return events
        except Exception as e:  # noqa: BLE001 - a job that the rules trip over must not stop all the others
            culprit = _blamed(e.__traceback__)
            state.scratch.faults[culprit or "policy"] = f"{type(e).__name__}: {e}"
            state.scratch.everything_moved = True
            if not culprit:
                return []
            state.scratch.poison[culprit] = f"the scheduler's rules failed on this job: {type(e).__name__}: {e}"
    return []


def _blamed(traceback: TracebackType | None) -> str:
    """Return the job that was being looked at when the rules failed, "" when nothing says so."""
    found = ""
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            if isinstance(value, gangs.Job):
                found = value.name.partition("@")[0]
        traceback = traceback.tb_next
    return found


def _events(state: State, mirror: Mirror, decisions: Decisions, now_ms: int) -> list[ev.LogEvent]:
    moved = [*_evicted(state, mirror, decisions, now_ms), *_grown(state, mirror, decisions, now_ms)]
    return [*_placed(state, mirror, decisions), *moved, *_deferred(state, mirror, decisions)]


def _placed(state: State, mirror: Mirror, decisions: Decisions) -> list[ev.LogEvent]:
    places: dict[str, list[tuple[gangs.Rank, Place]]] = {}
    for p in decisions.placements:
        places.setdefault(p.rank.job.name, []).append((p.rank, p.place))
    out: list[ev.LogEvent] = []
    for job_id, found in places.items():
        job = state.jobs[job_id]
        if job.active:
            continue  # it grows
        why = "first in order that fits" if job.restart is None else f"placed again after {job.restart.cause}"
        if job_id in mirror.world.first:
            why = "on the room that was made for it"
        placement = mirror.placement(job, found)
        parts, role_sizes = sizes.cut(job.spec, placement) or placement
        out.append(ev.GangPlaced(job=job_id, generation=job.generation + 1, parts=parts, reason=why, role_sizes=role_sizes))
    return out


def _grown(state: State, mirror: Mirror, decisions: Decisions, now_ms: int) -> list[ev.LogEvent]:
    """Gangs that go on with more ranks than they run with."""
    out: list[ev.LogEvent] = []
    for engine in dict.fromkeys(p.rank.job for p in decisions.placements):
        job = state.jobs[engine.name]
        larger = _working(state, mirror, job, engine) if job.active else None
        if larger is not None and larger.ranks > job.world_size:
            out.append(resize.grow(job, larger, now_ms))
    return out


def _working(state: State, mirror: Mirror, job: Job, engine: gangs.Job) -> sizes.Placement | None:
    """Return the placement of the ranks that have a place after the session, cut to a size that the gang may have; None: too few."""
    return resize.cut_to_fit(state, job, mirror.resized(job, engine))


def _evicted(state: State, mirror: Mirror, decisions: Decisions, now_ms: int) -> list[ev.LogEvent]:
    """Gangs that make room: with what they can do without, if that is enough, or whole."""
    causes: dict[gangs.Job, tuple[Action, str]] = {}
    moved: dict[gangs.Job, bool] = {}
    for e in decisions.evictions:
        causes.setdefault(e.rank.job, (e.action, e.beneficiary))
        moved[e.rank.job] = moved.get(e.rank.job, True) and e.moved
    out: list[ev.LogEvent] = []
    for engine, (action, beneficiary) in causes.items():
        job_id = engine.name
        job = state.jobs[job_id]
        cause, message = _CAUSES[action], f"makes room for {_called(state, beneficiary)}"
        smaller = _working(state, mirror, job, engine) if sizes.is_elastic(job.spec) else None
        if smaller is not None:
            out.append(resize.shrink(job, smaller, message, beneficiary, now_ms))
            continue
        if job.state == "restarting":
            out.append(
                ev.GangRequeued(
                    job=job_id, generation=job.generation, cause=cause, failure_class="infrastructure", message=message, beneficiary=beneficiary,
                    not_before_ms=job.not_before_ms if job.not_before_ms > now_ms else 0,
                )
            )  # fmt: skip
        else:
            grace_s = job.spec.preemption.grace_s
            deadline_ms = int(now_ms + grace_s * 1000)
            out.append(
                ev.GangPreempting(
                    job=job_id, generation=job.generation, cause=cause, message=message, deadline_ms=deadline_ms, grace_s=grace_s,
                    beneficiary=beneficiary, moved=moved[engine],
                )
            )  # fmt: skip
    return out


def _called(state: State, job_id: str) -> str:
    job = state.jobs.get(job_id)
    return f"{job.spec.name} ({job_id})" if job is not None and job.spec.name else job_id


def _deferred(state: State, mirror: Mirror, decisions: Decisions) -> list[ev.LogEvent]:
    """A reason is written when its code changes; numbers alone that change do not make an event."""
    groups: dict[tuple[object, ...], tuple[Refusal, list[str]]] = {}
    waiting = mirror.world.waiting
    # One that is placed may have been refused what it could have beyond its minimum.
    given = {p.rank.job.name for p in decisions.placements}

    def tell(name: str, why: Refusal) -> str:
        """Return the code that was recorded last, "" when it will be another one, or may be."""
        if name in given:
            return ""  # the first reason counts: a pass before the one that helped may have refused it, too
        given.add(name)
        job = state.jobs.get(name)
        if job is None or job.state != "queued":
            return ""
        if job.deferral is None or job.deferral.code != why.code:
            same = (why.code, why.message, tuple(why.need.items()), tuple(why.have.items()))
            groups.setdefault(same, (why, []))[1].append(name)
            return ""
        return job.deferral.code

    for name in list(mirror.barred_untold):
        if tell(name, mirror.barred[name]) == mirror.barred[name].code:
            del mirror.barred_untold[name]
    for name, why in reserved_places(decisions).items():
        waiting.told(mirror.world.jobs[name], tell(name, why))
    for jobs, why in decisions.refusals:
        for job in jobs.untold(why.code) if isinstance(jobs, Tail) else jobs:
            waiting.told(job, tell(job.name, why))
    out: list[ev.LogEvent] = []
    # In an order that does not depend on how the mirror came about: a leader that took over must write what the one before would have.
    for why, names in sorted(groups.values(), key=lambda g: min(state.jobs[j].order for j in g[1])):
        names.sort(key=lambda j: state.jobs[j].order)
        for at in range(0, len(names), _DEFERRED_TOGETHER):
            some = tuple(names[at : at + _DEFERRED_TOGETHER])
            out.append(
                ev.GangsDeferred(jobs=some, code=why.code, message=why.message, need=plain_amounts(why.need), have=plain_amounts(why.have))
            )
    return out


def reserved_places(decisions: Decisions) -> dict[str, Refusal]:
    """Return why those wait that have their places as soon as others have left them, by name.

    An elastic gang may be placed and still have reservations, for ranks beyond its minimum; they are for those that know how to grow.
    """
    placed = {p.rank.job.name for p in decisions.placements}
    nodes: dict[str, dict[str, None]] = {}
    for r in decisions.reservations:
        if not r.moved and r.rank.job.name not in placed:
            nodes.setdefault(r.rank.job.name, {})[r.place.node.name] = None
    out: dict[str, Refusal] = {}
    for job, names in nodes.items():
        where = ", ".join(sorted(names)[:4]) + (" and others" if len(names) > 4 else "")
        out[job] = Refusal("reserved", f"has its place on {where} as soon as what is leaving it has left")
    return out


def plain_amounts(amounts: dict[str, int]) -> dict[str, int]:
    """Amounts as the log has them: whole GPUs where they are whole, CPUs in thousandths, memory in MiB."""
    out: dict[str, int] = {}
    for name, amount in amounts.items():
        if name == "gpu":
            out["gpus" if amount % 1000 == 0 else "gpus_milli"] = amount // 1000 if amount % 1000 == 0 else amount
        elif name == "cpu":
            out["cpus_milli"] = amount
        elif name == "memory":
            out["memory_mib"] = amount >> 20
        else:
            out[name] = amount
    return out
