"""Handlers of the fold for who leads, and for what operators declare and do."""

from __future__ import annotations

from gangline.core.model import events as ev
from gangline.core.model.accounting import account_anew
from gangline.core.model.foldholdings import (
    gone,
)
from gangline.core.model.foldsteps import (
    Handlers,
    IllegalTransition,
    capacity,
    known_node,
    touch_node,
)
from gangline.core.model.queues import Declaration, QueueTree
from gangline.core.model.reservations import Declared
from gangline.core.model.state import State
from gangline.core.model.topologies import check as check_topologies

#: a brake that was cleared stays off for so long: what is missing then is lost
BRAKE_REST_MS = 600_000


def _leader_elected(state: State, e: ev.LeaderElected, index: int, epoch: int, at_ms: int) -> None:
    if epoch == state.epoch:
        raise IllegalTransition(e, f"epoch {epoch} has its leader already ({state.leader})")
    state.epoch = epoch
    state.leader = e.scheduler


def _leader_resigned(state: State, e: ev.LeaderResigned, index: int, epoch: int, at_ms: int) -> None:
    if e.scheduler != state.leader:
        raise IllegalTransition(e, f"{e.scheduler} is not the leader, {state.leader or 'nobody'} is")
    state.leader = ""


def _brake_set(state: State, e: ev.BrakeSet, index: int, epoch: int, at_ms: int) -> None:
    state.brake.on = e.on
    state.brake.message = e.message
    state.brake.since_ms = at_ms
    if not e.on:
        state.brake.armed_from_ms = at_ms + BRAKE_REST_MS
        for job in state.running:
            state.scratch.jobs[job] = None
    capacity(state)


def _node_administered(state: State, e: ev.NodeAdministered, index: int, epoch: int, at_ms: int) -> None:
    node = known_node(state, e, e.node)
    if e.action == "confirm_dead" and node.status != "lost":
        raise IllegalTransition(e, f"{e.node} is up: stop its agent, or cut its power, before it is called dead")
    if e.action == "cordon":
        node.cordoned = True
    elif e.action == "uncordon":
        node.cordoned = False
    elif e.action == "drain":
        node.draining = True
        node.drain_deadline_ms = int(at_ms + e.deadline_s * 1000) if e.deadline_s else 0
    elif e.action == "undrain":
        node.draining, node.drain_deadline_ms = False, 0
    else:
        for job_id, holding in list(node.holdings.items()):
            job = state.jobs[job_id]
            if holding.leaving_since:
                gone(state, node, job, index, at_ms)
            else:
                job.parts[e.node].dead = True
    node.reason = e.reason if node.cordoned or node.draining else ""
    for job_id in node.holdings:
        state.scratch.jobs[job_id] = None
    touch_node(state, node, index)
    capacity(state)


def _reservation_declared(state: State, e: ev.ReservationDeclared, index: int, epoch: int, at_ms: int) -> None:
    new = e.reservation
    if problem := new.problem():
        raise IllegalTransition(e, problem)
    if new.name in state.reservations:
        raise IllegalTransition(e, f"reservation {new.name} exists")
    if new.end_ms <= at_ms:
        raise IllegalTransition(e, f"reservation {new.name} would be over already")
    if unknown := [kept.node for kept in new.nodes if kept.node not in state.nodes]:
        raise IllegalTransition(e, f"no node {', '.join(unknown)}")
    state.reservations[new.name] = Declared(new, index=index)
    capacity(state)


def _reservation_begun(state: State, e: ev.ReservationBegun, index: int, epoch: int, at_ms: int) -> None:
    declared = state.reservations.get(e.name)
    if declared is None or declared.begun or at_ms < declared.reservation.start_ms:
        raise IllegalTransition(e, f"reservation {e.name} is not about to begin")
    declared.begun, declared.index = True, index
    capacity(state)


def _reservation_removed(state: State, e: ev.ReservationRemoved, index: int, epoch: int, at_ms: int) -> None:
    declared = state.reservations.get(e.name)
    if declared is None:
        raise IllegalTransition(e, f"no reservation {e.name}")
    if declared.begun and declared.reservation.maintenance and not declared.over:
        declared.over, declared.index = True, index
    else:
        del state.reservations[e.name]
    capacity(state)


def _queues_declared(state: State, e: ev.QueuesDeclared, index: int, epoch: int, at_ms: int) -> None:
    try:
        tree = QueueTree(Declaration(e.queues, index, at_ms, e.by, e.reason, e.topologies))
        check_topologies(e.topologies)
    except ValueError as error:
        raise IllegalTransition(e, str(error)) from None
    if not tree.declared:
        raise IllegalTransition(e, "no queue is declared")
    if lost := stranded(state, tree):
        raise IllegalTransition(e, f"these queues have live jobs and would take none any more: {lost}")
    before, state.queues = state.queues, tree
    account_anew(state, before, at_ms)
    capacity(state)


def stranded(state: State, tree: QueueTree) -> dict[str, int]:
    """Return how many live jobs each queue has that would not be a leaf of this tree."""
    found: dict[str, int] = {}
    for job in state.jobs.values():
        if job.state != "finished" and not tree.is_leaf(job.spec.queue):
            found[job.spec.queue] = found.get(job.spec.queue, 0) + 1
    return found


#: by the event that each folds in
HANDLERS: Handlers = {
    ev.LeaderElected: _leader_elected,
    ev.LeaderResigned: _leader_resigned,
    ev.BrakeSet: _brake_set,
    ev.NodeAdministered: _node_administered,
    ev.ReservationDeclared: _reservation_declared,
    ev.ReservationBegun: _reservation_begun,
    ev.ReservationRemoved: _reservation_removed,
    ev.QueuesDeclared: _queues_declared,
}
