"""Handlers of the fold for what agents report: nodes that come and go, ranks that start and end, progress, health."""

from __future__ import annotations

from gangline.core.model import events as ev
from gangline.core.model import foldhealth as health
from gangline.core.model import foldlife as life
from gangline.core.model.accounting import change_capacity, offers
from gangline.core.model.foldholdings import (
    count_free,
    give_back,
    gone,
    shrink,
)
from gangline.core.model.foldsteps import (
    Handlers,
    IllegalTransition,
    capacity,
    current_job,
    enter,
    forget_oldest,
    known_node,
    live_job,
    part_on,
    touch,
    touch_node,
)
from gangline.core.model.state import Job, Node, State


def _node_joined(state: State, e: ev.NodeJoined, index: int, epoch: int, at_ms: int) -> None:
    reg = e.registration
    node = state.nodes.get(reg.node)
    before = offers(node)
    if node is None:
        node = state.nodes[reg.node] = Node(registration=reg, joined_at_ms=at_ms)
    elif node.status == "up" and node.registration.identity != reg.identity:
        raise IllegalTransition(e, f"{reg.node} is up with another identity; it must be lost first")
    elif node.status == "lost":
        node.status, node.joined_at_ms = "up", at_ms
    for job in node.holdings:
        state.scratch.jobs[job] = None
    health.joined(node, reg)
    if node.health:
        state.scratch.unwell[node.id] = None
    change_capacity(state, before, offers(node), at_ms)
    count_free(node)
    touch_node(state, node, index)
    capacity(state)


def _node_lost(state: State, e: ev.NodeLost, index: int, epoch: int, at_ms: int) -> None:
    node = known_node(state, e, e.node)
    if node.status == "lost":
        raise IllegalTransition(e, f"{e.node} is lost already")
    before = offers(node)
    node.status, node.lost_at_ms = "lost", at_ms
    health.lost(node, e.cause, at_ms)
    state.scratch.unwell[node.id] = None
    change_capacity(state, before, offers(node), at_ms)
    for job_id, holding in list(node.holdings.items()):
        job = state.jobs[job_id]
        over = e.proven or job.spec.on_disconnect == "stop"
        if e.node in job.pending_nodes:
            give_back(state, node, job.id)  # nothing of it has run there; what to do without it is the policy's business
            state.scratch.jobs[job_id] = None
        elif not holding.leaving_since:
            job.parts[e.node].dead = over
            state.scratch.jobs[job_id] = None
        elif over or job.state == "finished":
            gone(state, node, job, index, at_ms)  # the node's agent has ended everything: nothing is left to wait for
    count_free(node)
    state.scratch.queue_dirty = True  # its labels no longer count in the topology
    touch_node(state, node, index)


def _node_prepared(state: State, e: ev.NodePrepared, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    part = part_on(job, e, e.node)
    if job.state not in ("placed", "preparing") or part.prepared:
        raise IllegalTransition(e, f"job {job.id} is {job.state}, {e.node} {'has prepared' if part.prepared else 'is not asked'}")
    part.prepared, part.address, part.port = True, e.address, e.port
    shrink(state, job, e.node, index)
    if job.state == "placed":
        enter(state, job, "preparing", index, at_ms)
    else:
        touch(state, job, index)


def _prepare_failed(state: State, e: ev.PrepareFailed, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    part = part_on(job, e, e.node)
    if job.state not in ("placed", "preparing", "running", "preempting", "resizing") or part.failed:
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    part.failed = e.message or "no reason given"
    touch(state, job, index)


def _ranks_started(state: State, e: ev.RanksStarted, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    part = part_on(job, e, e.node)
    if not e.ranks or any(r not in part.ranks or part.ranks[r].started for r in e.ranks):
        raise IllegalTransition(e, f"ranks {list(e.ranks)} are not all waiting to start on {e.node}")
    for r in e.ranks:
        part.ranks[r].started = True
    _after_start(state, job, index, at_ms)


def _ranks_exited(state: State, e: ev.RanksExited, index: int, epoch: int, at_ms: int) -> None:
    job = live_job(state, e, e.job)
    part = part_on(job, e, e.node)
    for x in e.exits:
        rank = part.ranks.get(x.rank)
        if rank is None or rank.exited or rank.generation != x.generation:
            raise IllegalTransition(e, f"rank {x.rank} of generation {x.generation} is not running on {e.node}")
    for x in e.exits:
        rank = part.ranks[x.rank]
        rank.started = rank.exited = True
        rank.exit_code, rank.cause, rank.message = x.code, x.cause, x.message
        rank.exited_at_ms, rank.ended_ms = x.at_ms, at_ms
    _after_start(state, job, index, at_ms)


def _after_start(state: State, job: Job, index: int, at_ms: int) -> None:
    """A gang runs once all its ranks do."""
    if job.state in ("placed", "preparing") and all(r.started for p in job.parts.values() for r in p.ranks.values()):
        first = not job.started_at_ms
        job.started_at_ms = job.started_at_ms or at_ms
        job.running_since_ms = at_ms
        job.prepare_failures = 0
        for node_id in job.parts:
            shrink(state, job, node_id, index)
        enter(state, job, "running", index, at_ms)
        if first:
            life.started(state, job, index, at_ms)
    else:
        touch(state, job, index)


def _part_released(state: State, e: ev.PartReleased, index: int, epoch: int, at_ms: int) -> None:
    node = known_node(state, e, e.node)
    holding = node.holdings.get(e.job)
    if holding is None:
        raise IllegalTransition(e, f"{e.job} holds nothing on {e.node}")
    if not holding.leaving_since:
        raise IllegalTransition(e, f"{e.job} is to stay on {e.node}")
    gone(state, node, state.jobs[e.job], index, at_ms)
    touch_node(state, node, index)
    capacity(state)
    forget_oldest(state)


def _progress_reported(state: State, e: ev.ProgressReported, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    job.step, job.step_generation, job.step_at_ms = e.step, e.generation, at_ms
    job.index = index


def _checkpoint_reported(state: State, e: ev.CheckpointReported, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    job.checkpoint_step, job.checkpoint_path, job.checkpoint_at_ms = e.step, e.path, at_ms
    job.step = max(job.step, e.step)
    job.index = index


def _stop_acknowledged(state: State, e: ev.StopAcknowledged, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    part = part_on(job, e, e.node)
    if job.state not in ("preempting", "resizing") or part.acknowledged:
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    part.acknowledged = True
    if all(p.acknowledged for p in job.parts.values()):
        job.saved_at_ms = at_ms
    touch(state, job, index)


def _health_reported(state: State, e: ev.HealthReported, index: int, epoch: int, at_ms: int) -> None:
    node = known_node(state, e, e.node)
    health.reported(state, node, e)
    for job in node.holdings:
        state.scratch.jobs[job] = None
    state.scratch.unwell[node.id] = None
    node.index = index


def _health_changed(state: State, e: ev.HealthChanged, index: int, epoch: int, at_ms: int) -> None:
    node = known_node(state, e, e.node)
    before = offers(node)
    health.changed(state, node, e, at_ms)
    change_capacity(state, before, offers(node), at_ms)
    count_free(node)
    for job in node.holdings:
        state.scratch.jobs[job] = None
    state.scratch.unwell[node.id] = None
    touch_node(state, node, index)
    capacity(state)


def _rank_slow(state: State, e: ev.RankSlow, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    if e.rank not in part_on(job, e, e.node).ranks or e.rank in job.slow:
        raise IllegalTransition(e, f"rank {e.rank} of {e.job} is not on {e.node}, or known to be slow")
    job.slow = tuple(sorted((*job.slow, e.rank)))
    touch(state, job, index)


#: by the event that each folds in
HANDLERS: Handlers = {
    ev.NodeJoined: _node_joined,
    ev.NodeLost: _node_lost,
    ev.NodePrepared: _node_prepared,
    ev.PrepareFailed: _prepare_failed,
    ev.RanksStarted: _ranks_started,
    ev.RanksExited: _ranks_exited,
    ev.PartReleased: _part_released,
    ev.ProgressReported: _progress_reported,
    ev.CheckpointReported: _checkpoint_reported,
    ev.StopAcknowledged: _stop_acknowledged,
    ev.HealthReported: _health_reported,
    ev.HealthChanged: _health_changed,
    ev.RankSlow: _rank_slow,
}
