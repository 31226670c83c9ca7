"""Reservations that people declare, in time: what happens at their start and end, and what they keep from whom. Pure.

    declared ──────────────▶ start ──────────────────────────▶ end
      who would not have ended  │ maintenance: the nodes are     │ drained nodes take ranks again, the
      by the start is kept off  │ drained; else: who is there    │ reservation is gone
                                │ without being an owner, and    │
                                │ can be preempted, is asked     │
                                │ to leave; owners may come in   │

Before the start a job may use what is kept if it ends in time, by its time limit or, where it has none, by what jobs like it took. One of which
nothing is known may as well, if it can be preempted: it is moved at the start, which is worth it only if that is not soon (`LEAD_MS`). What is
kept for owners may be used until then by whatever can be preempted, also if its limit is later. From the start on it is theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.core.model import events as ev
from gangline.core.model.foldlosses import unsaved_gpu_ms
from gangline.core.model.reservations import WHOLE, Declared, KeptNode, Reservation
from gangline.core.model.state import Job, Node, State
from gangline.core.policy.holds import Hold, Want
from gangline.core.policy.profile import Profile

#: a job that will have to leave at the start is not started so shortly before
LEAD_MS = 600_000
#: a job that ends in time by what is known is late by so much at most
SLACK_MS = 60_000
_ALL = 1 << 20
_MIB = 1 << 20


def step(state: State, now_ms: int) -> list[ev.LogEvent]:
    """Return what the starts and ends of reservations call for now."""
    out: list[ev.LogEvent] = []
    for declared in state.reservations.values():
        if declared.over:
            out += [*_undrains(state, declared), ev.ReservationRemoved(name=declared.reservation.name, reason="its nodes are given back")]
        elif now_ms >= declared.reservation.end_ms:
            out.append(ev.ReservationRemoved(name=declared.reservation.name, reason="its end has come"))
        elif now_ms >= declared.reservation.start_ms and not declared.begun:
            out.append(ev.ReservationBegun(name=declared.reservation.name))
            out += _drains(state, declared.reservation) if declared.reservation.maintenance else _leave(state, declared.reservation, now_ms)
    return out


def due_ms(state: State, now_ms: int) -> int | None:
    """Return the log time of the next start or end."""
    moments = (at for d in state.reservations.values() for at in (d.reservation.start_ms, d.reservation.end_ms))
    return min((at for at in moments if at > now_ms), default=None)


def drain_reason(reservation: Reservation) -> str:
    """Return the reason that drained nodes carry, by which they are known at the end."""
    return f"reservation {reservation.name}" + (f": {reservation.reason}" if reservation.reason else "")


def _drains(state: State, reservation: Reservation) -> Iterator[ev.LogEvent]:
    for kept in reservation.nodes:
        node = state.nodes.get(kept.node)
        if node is not None and not node.draining:
            yield ev.NodeAdministered(
                node=kept.node, action="drain", by=reservation.by, reason=drain_reason(reservation), deadline_s=reservation.deadline_s
            )


def _undrains(state: State, declared: Declared) -> Iterator[ev.LogEvent]:
    """What gives nodes back that were drained for a reservation, and for nothing else since."""
    reservation = declared.reservation
    for kept in reservation.nodes:
        node = state.nodes.get(kept.node)
        if node is not None and node.draining and node.reason == drain_reason(reservation):
            yield ev.NodeAdministered(node=kept.node, action="undrain", by=reservation.by, reason=f"reservation {reservation.name} is over")


def _leave(state: State, reservation: Reservation, now_ms: int) -> Iterator[ev.LogEvent]:
    """Ask whoever is in the way to leave: of a whole node all, of some GPUs as many as it takes, who has saved most of its work first."""
    asked: dict[str, None] = {}
    for kept in reservation.nodes:
        node = state.nodes.get(kept.node)
        if node is None:
            continue
        others = [state.jobs[job] for job in node.holdings if not _is_owner(reservation, state.jobs[job])]
        movable = [job for job in others if job.spec.preemptible and job.state in ("placed", "preparing", "running") and node.id in job.parts]
        movable.sort(key=lambda job: (job.spec.priority, unsaved_gpu_ms(job, now_ms), -job.order))
        lacking = _ALL if kept.gpus == WHOLE else kept.gpus - len(node.free_gpus) - _held_by_owners(state, reservation, node)
        for job in movable:
            if lacking <= 0:
                break
            lacking -= len(node.holdings[job.id].gpus)
            asked[job.id] = None
    for job_id in asked:
        job = state.jobs[job_id]
        grace_s = job.spec.preemption.grace_s
        yield ev.GangPreempting(
            job=job.id, generation=job.generation, cause="reserved", message=f"reservation {reservation.name} begins",
            deadline_ms=int(now_ms + grace_s * 1000), grace_s=grace_s,
        )  # fmt: skip


def _is_owner(reservation: Reservation, job: Job) -> bool:
    return reservation.owned_by(job.spec.queue, job.user)


def _held_by_owners(state: State, reservation: Reservation, node: Node) -> int:
    return sum(len(holding.gpus) for job, holding in node.holdings.items() if _is_owner(reservation, state.jobs[job]))


# ---------------------------------------------------------------- what is kept, in a session


def holds(state: State) -> list[Hold]:
    """Return the holds of declared reservations: on from the beginning of a session, for all but whom `admits` lets in."""
    out = []
    for name, declared in state.reservations.items():
        reservation = declared.reservation
        if declared.begun and reservation.maintenance:
            continue  # its nodes are drained; who has undrained one wants it used
        wants = tuple(want for kept in reservation.nodes if (want := _want(state, reservation, kept)) is not None)
        label = f"{'maintenance' if reservation.maintenance else 'reservation'} {name}"
        out.append(Hold(label, reservation.start_ms, wants, always=True, maintenance=reservation.maintenance, reservation=name))
    return out


def _want(state: State, reservation: Reservation, kept: KeptNode) -> Want | None:
    node = state.nodes.get(kept.node)
    if node is None or kept.gpus == WHOLE:
        return Want(kept.node, _ALL, 1 << 40, 1 << 60) if node is not None else None
    gpus = max(0, kept.gpus - _held_by_owners(state, reservation, node))
    per = max(1, len(node.registration.gpus))
    return Want(kept.node, gpus, node.registration.cpus_milli * gpus // per, node.registration.memory_mib * gpus // per * _MIB)


def admits(declared: Declared, job: Job, profile: Profile) -> bool:
    """Whether a job that is placed now may use what a reservation keeps."""
    reservation, now_ms = declared.reservation, profile.now_ms
    if declared.begun or now_ms >= reservation.start_ms:
        return _is_owner(reservation, job)
    end = profile.end_if_started(job, learned=True)
    if end is not None and end + SLACK_MS <= reservation.start_ms:
        return True
    movable = job.spec.preemptible and reservation.start_ms - now_ms >= LEAD_MS
    return movable and (not reservation.maintenance or end is None)


# ---------------------------------------------------------------- choosing nodes


def choose(state: State, gpus: int, start_ms: int, now_ms: int) -> tuple[KeptNode, ...] | None:
    """Return nodes with so many GPUs together that no gang holds then which cannot be moved, the emptiest first; None: there are too few."""
    profile = Profile(state, now_ms)
    taken: dict[str, int] = {}
    for declared in state.reservations.values():
        for kept in declared.reservation.nodes:
            taken[kept.node] = _ALL if kept.gpus == WHOLE else taken.get(kept.node, 0) + kept.gpus
    offers: list[tuple[int, int, str]] = []
    for node in state.nodes.values():
        stays = 0
        for job_id, holding in node.holdings.items():
            end = profile.end(job_id) if state.jobs[job_id].active else now_ms
            if not state.jobs[job_id].spec.preemptible and (end is None or end > start_ms):
                stays += len(holding.gpus)
        have = sum(1 for gpu in node.registration.gpus if gpu.healthy) - stays - taken.get(node.id, 0)
        if node.schedulable and have > 0:
            offers.append((-have, sum(len(h.gpus) for h in node.holdings.values()), node.id))
    found: list[KeptNode] = []
    for have, _, name in sorted(offers):
        if gpus <= 0:
            break
        found.append(KeptNode(name, min(-have, gpus)))
        gpus -= -have
    return tuple(found) if gpus <= 0 else None
