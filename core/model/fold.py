"""`apply`: one event changes the state, or is refused because it cannot happen.

There is one handler for each event, named after it. A handler first checks that the move is legal and raises IllegalTransition, and only then
changes anything, so a refused event leaves the state as it was. Handlers decide nothing: what should happen next is the policy's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import msgspec

from gangline.core.model import events as ev
from gangline.core.model import foldhealth as health
from gangline.core.model import foldlife as life
from gangline.core.model import roles
from gangline.core.model.accounting import account_anew, change_capacity, note_held, offers, settle
from gangline.core.model.codec import Frame
from gangline.core.model.documents import RestartNotice, StopNotice
from gangline.core.model.foldsteps import IllegalTransition as IllegalTransition
from gangline.core.model.foldsteps import capacity as _capacity
from gangline.core.model.foldsteps import dequeue as _dequeue
from gangline.core.model.foldsteps import enqueue as _enqueue
from gangline.core.model.foldsteps import forget
from gangline.core.model.foldsteps import live_job as _live_job
from gangline.core.model.foldsteps import queue_key as queue_key
from gangline.core.model.foldsteps import touch as _touch
from gangline.core.model.gpushares import GPU, GpuUse, charged_milli, uses_of
from gangline.core.model.queues import Declaration, QueueTree
from gangline.core.model.reservations import Declared
from gangline.core.model.runtimes import learn
from gangline.core.model.spec import Resources
from gangline.core.model.state import FINISHED_KEPT, Deferral, Earmark, Holding, Job, Node, Part, Rank, Reserved, Resize, State
from gangline.core.model.topologies import check as check_topologies

#: a generation that ran so long is healthy: failures after it are not "in a row" with those before (RELIABILITY row 43)
HEALTHY_MS = 600_000

#: room that is made for a job is kept for it so long after its victims must have gone
EARMARK_MARGIN_MS = 60_000

#: a brake that was cleared stays off for so long: what is missing then is lost
BRAKE_REST_MS = 600_000


def apply_frame(state: State, frame: Frame) -> None:
    """Fold a whole frame. Raises IllegalTransition."""
    for event in frame.events:
        apply(state, event, frame.index, frame.epoch, frame.at_ms)
    seal(state, frame.index, frame.digest)


def apply(state: State, event: ev.LogEvent, index: int, epoch: int, at_ms: int) -> None:
    """Fold one event of entry `index`. Raises IllegalTransition and then has changed nothing."""
    if epoch < state.epoch:
        raise IllegalTransition(event, f"epoch {epoch} at index {index} is older than epoch {state.epoch}")
    if epoch > state.epoch and type(event) is not ev.LeaderElected:
        raise IllegalTransition(event, f"epoch {epoch} at index {index} begins without leader_elected")
    if at_ms < state.at_ms:
        raise IllegalTransition(event, f"time {at_ms} at index {index} is before {state.at_ms}")
    _HANDLERS[type(event)](state, event, index, epoch, at_ms)
    if state.scratch.held:
        settle(state, at_ms)
    state.at_ms = at_ms


def seal(state: State, index: int, digest: bytes) -> None:
    """All events of entry `index` are folded; the next frame continues from `digest`."""
    state.index = index
    state.digest = digest


# ---------------------------------------------------------------- leadership


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
    _capacity(state)


# ---------------------------------------------------------------- jobs


def _job_submitted(state: State, e: ev.JobSubmitted, index: int, epoch: int, at_ms: int) -> None:
    if e.job in state.jobs:
        raise IllegalTransition(e, f"job {e.job} exists")
    if e.idempotency_key and e.idempotency_key in state.keys:
        raise IllegalTransition(e, f"idempotency key {e.idempotency_key!r} belongs to {state.keys[e.idempotency_key]}")
    if e.spec.name and e.spec.name in state.names:
        raise IllegalTransition(e, f"name {e.spec.name} belongs to {state.names[e.spec.name]}")
    if (refusal := state.queues.refusal(e.spec.queue)) is not None:
        raise IllegalTransition(e, f"queue {e.spec.queue} takes no jobs ({refusal})")
    life.check_submitted(state, e)
    state.submitted += 1
    job = Job(
        id=e.job, spec=e.spec, number=state.submitted, submitted_at_ms=at_ms, submitted_index=index, user=e.user,
        idempotency_key=e.idempotency_key, body_digest=e.body_digest, trace_id=e.trace_id, since_ms=at_ms, index=index,
    )  # fmt: skip
    state.jobs[job.id] = job
    if job.idempotency_key:
        state.keys[job.idempotency_key] = job.id
    if job.spec.name:
        state.names[job.spec.name] = state.named[job.spec.name] = job.id
    life.submitted(state, job, at_ms)


def _job_stop_requested(state: State, e: ev.JobStopRequested, index: int, epoch: int, at_ms: int) -> None:
    if life.cancel_unopened(state, e, index, at_ms):
        return
    job = _live_job(state, e, e.job)
    job.stop = e.reason or "stopped"
    job.stop_by = e.by
    state.scratch.moved[job.id] = None
    _touch(state, job, index)
    life.touch_elements(state, job)


def _gang_placed(state: State, e: ev.GangPlaced, index: int, epoch: int, at_ms: int) -> None:
    job = _live_job(state, e, e.job)
    if job.state not in ("queued", "restarting", "resizing"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if e.generation != job.generation + 1:
        raise IllegalTransition(e, f"generation {e.generation} does not follow {job.generation}")
    _check_placement(state, job, e)
    if job.state == "queued":
        life.count_wait(job, at_ms)
        _dequeue(state, job)
        state.running[job.id] = None
    _end_old_size(state, job, {p.node for p in e.parts}, index, at_ms)
    job.parts = {}
    job.generation = e.generation
    job.world_size = sum(len(p.ranks) for p in e.parts)
    job.role_sizes = e.role_sizes
    leaf_of, leaves = roles.leaf_of_ranks(job.sizes()), roles.leaves(job.spec)
    groups = 0
    for placed in e.parts:
        ranks = {r.rank: Rank(gpus=r.gpus, generation=e.generation, leaf=leaf_of[r.rank], share=r.share) for r in placed.ranks}
        # In a gang of one role the position of the part says the same.
        job.parts[placed.node] = Part(ranks=ranks, groups_before=groups)
        groups += len({leaves[r.leaf].role for r in ranks.values()}) if len(leaves) > 1 else 0
        _hold(state, state.nodes[placed.node], job.id, _needed(job, ranks.values()), index)
    for node_id in list(job.held_nodes):
        if node_id not in job.parts:
            _leave(state, job, node_id, index)
    job.released, job.master_addr, job.master_port = False, "", 0
    job.placed_at_ms = at_ms
    job.deferral, job.notice = None, None
    job.beneficiary, job.saved_at_ms = "", 0
    state.earmarks.pop(job.id, None)
    _drop_reservation(state, job)
    if job.restart is not None:
        new_nodes = tuple(n for n in job.parts if n not in job.previous_nodes)
        job.restart = msgspec.structs.replace(job.restart, new_nodes=new_nodes, new_world_size=job.world_size)
    _enter(state, job, "placed", index, at_ms)


def _end_old_size(state: State, job: Job, kept: set[str], index: int, at_ms: int) -> None:
    """The generation that was to end for another size has ended. Ranks that never ran at the old size need not know of it."""
    resize = job.resize
    if resize is None:
        return
    job.failures_in_row = row_of_failures(job, at_ms)
    _lose_work(state, job, job.beneficiary, at_ms)
    if resize.cause not in ("grow", "shrink") or any(r.started for p in job.parts.values() for r in p.ranks.values()):
        cause = resize.why or ("resize" if resize.cause in ("grow", "shrink") else resize.cause)
        _remember_restart(job, cause, "infrastructure", resize.message, resize.lost_ranks, resize.lost_nodes, at_ms)
    _end_generation(job, at_ms)
    _forget_resize(state, job, kept, index)


def _forget_resize(state: State, job: Job, kept: set[str], index: int) -> None:
    """Give back the places that were held for another size, on nodes that are not to be kept: nothing has run there."""
    pending = [n for n in job.pending_nodes if n not in kept]
    job.resize = None
    for node_id in pending:
        node = state.nodes[node_id]
        if job.id in node.holdings:
            _give_back(state, node, job.id)
            _touch_node(state, node, index)
            _capacity(state)


def _check_placement(state: State, job: Job, e: ev.GangPlaced | ev.GangResizing) -> None:
    ranks = [r.rank for p in e.parts for r in p.ranks]
    _check_numbers(e, ranks)
    sizes = roles.placed(job.spec, e.role_sizes, len(ranks))
    if wrong := roles.wrong_sizes(job.spec, sizes):
        raise IllegalTransition(e, f"{job.id}: {wrong}")
    if sum(sizes) != len(ranks):
        raise IllegalTransition(e, f"{len(ranks)} ranks, but its roles have {sum(sizes)}")
    leaf_of, leaves = roles.leaf_of_ranks(sizes), roles.leaves(job.spec)
    for part in e.parts:
        node = state.nodes.get(part.node)
        if node is None or node.status != "up":
            raise IllegalTransition(e, f"node {part.node} is {'unknown' if node is None else node.status}")
        own = node.holdings.get(job.id)
        for r in part.ranks:
            if wrong := _wrong_devices(r, leaves[leaf_of[r.rank]].resources):
                raise IllegalTransition(e, f"rank {r.rank} of {job.id} gets {wrong}")
        if problem := _taken_twice(_with_withdrawn(node) if job.spec.burn_in == node.id else node, own, part):
            raise IllegalTransition(e, problem)
        cpus, memory = roles.of_ranks(job.spec, [leaf_of[r.rank] for r in part.ranks])
        if cpus - (own.cpus_milli if own else 0) > node.free_cpus_milli or memory - (own.memory_mib if own else 0) > node.free_memory_mib:
            raise IllegalTransition(e, f"{part.node} has not the CPUs or memory for {len(part.ranks)} ranks")


def _wrong_devices(r: ev.PlacedRank, res: Resources) -> str:
    """What of its devices a rank has not asked for, "" when all is right."""
    share = r.share
    if res.mig:
        profiles = [one.profile for one in share.mig] if share is not None else []
        wrong = profiles != [res.mig] * res.mig_count or share is None or {one.gpu for one in share.mig} != set(r.gpus)
        return f"other than {res.mig_count} MIG instances of {res.mig}" if wrong else ""
    if res.shares_gpu:
        asked = share is not None and not share.mig and share.memory_mib == res.gpu_memory_mib and share.milli > 0
        if not asked or len(r.gpus) != 1 or (share is not None and res.gpu_share_milli not in (0, share.milli)):
            return "other than its share of one device"
        return ""
    return f"other than {res.gpus} devices" if share is not None or len(r.gpus) != res.gpus else ""


def _with_withdrawn(node: Node) -> Node:
    """Return the node as a test of its devices sees it: those that are withdrawn and held by nobody can be had."""
    held = {g for h in node.holdings.values() for g in h.gpus}
    free = tuple(g.index for g in node.registration.gpus if g.index not in held and g.index not in node.parted)
    return msgspec.structs.replace(node, free_gpus=free)


def _taken_twice(node: Node, own: Holding | None, part: ev.PlacedPart) -> str:
    """Why the devices of a part cannot be given, "" when they can: those that are free, and what the gang holds already."""
    whole = [g for r in part.ranks if r.share is None for g in r.gpus]
    available = {*node.free_gpus, *own.gpus, *(use.gpu for use in own.shares if use == node.parted.get(use.gpu))} if own else node.free_gpus
    if len(set(whole)) != len(whole) or any(g not in available for g in whole):
        return f"devices {sorted(whole)} of {node.id} are not all free: {sorted(available)} are"
    uses = _summed([use for r in part.ranks for use in uses_of(r.gpus, r.share)])
    if not uses:
        return ""
    facts = {gpu.index: gpu for gpu in node.registration.gpus}
    mine = {use.gpu: use for use in own.shares} if own else {}
    for gpu, use in uses.items():
        there = node.parted.get(gpu)
        if there is None and gpu not in available:
            return f"device {gpu} of {node.id} is not free, or not healthy"
        others = there.minus(mine[gpu]) if there is not None and gpu in mine else there
        problem = (use.plus(others) if others else use).problem(facts[gpu].memory_mib if gpu in facts else 0)
        if problem or gpu in whole:
            return f"device {gpu} of {node.id} {problem or 'is given whole and in part'}"
    return ""


def _check_numbers(e: ev.GangPlaced | ev.GangResizing, ranks: list[int]) -> None:
    if sorted(ranks) != list(range(len(ranks))):
        raise IllegalTransition(e, "ranks are not 0 to n - 1")
    if any(not p.ranks for p in e.parts) or len({p.node for p in e.parts}) != len(e.parts):
        raise IllegalTransition(e, "a node appears twice, or without ranks")
    firsts = [p.ranks[0].rank for p in e.parts]
    if firsts != sorted(firsts) or any(a.rank > b.rank for p in e.parts for a, b in pairwise(p.ranks)):
        raise IllegalTransition(e, "ranks do not ascend within a part, or parts in the order of their lowest ranks")


def _gangs_deferred(state: State, e: ev.GangsDeferred, index: int, epoch: int, at_ms: int) -> None:
    jobs = [_live_job(state, e, j) for j in e.jobs]
    for job in jobs:
        if job.state not in ("queued", "array"):
            raise IllegalTransition(e, f"job {job.id} is {job.state}")
    deferral = Deferral(code=e.code, message=e.message, need=e.need, have=e.have, index=index)
    for job in jobs:
        job.deferral = deferral
        job.index = index


def _gang_reserved(state: State, e: ev.GangReserved, index: int, epoch: int, at_ms: int) -> None:
    job = _live_job(state, e, e.job)
    if job.state != "queued":
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if unknown := [p.node for p in e.parts if p.node not in state.nodes]:
        raise IllegalTransition(e, f"no node {', '.join(unknown)}")
    if not e.parts:
        job.reserved = None
        state.reserved.pop(job.id, None)
    else:
        job.reserved = Reserved(e.parts, e.start_ms, e.message, index)
        job.promised_ms = job.promised_ms or e.start_ms
        state.reserved.setdefault(job.id)
    job.index = index
    state.scratch.queue_dirty = True


def _drop_reservation(state: State, job: Job) -> None:
    job.reserved, job.promised_ms = None, 0
    state.reserved.pop(job.id, None)


def _gang_released(state: State, e: ev.GangReleased, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if job.released or job.state not in ("placed", "preparing"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}{', released' if job.released else ''}")
    missing = [n for n, p in job.parts.items() if not p.prepared]
    if missing:
        raise IllegalTransition(e, f"{', '.join(missing)} have not prepared")
    if job.lingering:
        raise IllegalTransition(e, f"an older generation may still run on {', '.join(job.lingering)}")
    job.released, job.master_addr, job.master_port = True, e.master_addr, e.master_port
    job.placed_at_ms = at_ms
    _touch(state, job, index)
    _touch_nodes(state, job)


def _gang_restarting(state: State, e: ev.GangRestarting, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if not job.active or job.state == "restarting":
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if e.cause in ("rank_failed", "hang"):
        health.note_death(state, job, at_ms)
    _account_failure(job, e.failure_class, at_ms)
    _lose_work(state, job, "", at_ms)
    _remember_restart(job, e.cause, e.failure_class, e.message, e.lost_ranks, (), at_ms)
    _end_generation(job, at_ms)
    _forget_resize(state, job, set(), index)
    job.not_before_ms = e.not_before_ms
    job.released = False
    job.notice, job.beneficiary = None, ""
    _enter(state, job, "restarting", index, at_ms)


def _rank_restarting(state: State, e: ev.RankRestarting, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if job.state not in ("placed", "preparing", "running"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    ranks = [job.rank(r) for r in e.ranks]
    if not ranks or any(r is None or not r.exited for r in ranks):
        raise IllegalTransition(e, f"ranks {list(e.ranks)} have not all ended")
    health.note_death(state, job, at_ms)
    _account_failure(job, e.failure_class, at_ms)
    _remember_restart(job, e.cause, e.failure_class, e.message, e.ranks, (), at_ms)
    if job.restart is not None:
        job.restart = msgspec.structs.replace(job.restart, new_world_size=job.world_size)
    job.generation += 1
    job.placed_at_ms = at_ms
    for rank in ranks:
        if rank is not None:
            rank.generation = job.generation
            rank.started = rank.exited = False
            rank.exit_code, rank.cause, rank.message, rank.exited_at_ms, rank.ended_ms = 0, "", "", 0, 0
    _touch(state, job, index)
    _touch_nodes(state, job)


def _gang_preempting(state: State, e: ev.GangPreempting, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if job.state not in ("placed", "preparing", "running", "resizing"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    _forget_resize(state, job, set(), index)
    job.notice = StopNotice(cause=e.cause, message=e.message, deadline_ms=e.deadline_ms, grace_s=e.grace_s)
    job.beneficiary = e.beneficiary
    for part in job.parts.values():
        part.acknowledged = False
    # The ranks may take as long again to die after their deadline as they had before it.
    _earmark(state, job, e.beneficiary, e.deadline_ms + int(e.grace_s * 1000), index, at_ms)
    if e.moved:
        _earmark(state, job, job.id, e.deadline_ms + int(e.grace_s * 1000), index, at_ms)
        job.evicted_for = e.beneficiary
    _enter(state, job, "preempting", index, at_ms)


def _gang_resizing(state: State, e: ev.GangResizing, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if not job.active or job.state == "preempting":
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    _check_placement(state, job, e)
    if old := [p.node for p in e.parts if p.node in job.lingering]:
        raise IllegalTransition(e, f"an older generation may still run on {', '.join(old)}")
    if e.forgive:
        _forgive(job)
    _forget_resize(state, job, set(), index)
    job.resize = Resize(e.parts, e.role_sizes, e.cause, e.message, e.lost_ranks, e.lost_nodes, e.why)
    leaf_of = roles.leaf_of_ranks(roles.placed(job.spec, e.role_sizes, job.resize.world_size))
    for part in e.parts:
        node = state.nodes[part.node]
        needed = _needed(job, [Rank(gpus=r.gpus, generation=0, leaf=leaf_of[r.rank], share=r.share) for r in part.ranks])
        own = node.holdings.get(job.id)
        if own is None or _both(node, own, needed) != own:
            _hold(state, node, job.id, needed, index)
    job.prepare_failures += e.cause == "prepare_failed"
    job.avoid = {n: until for n, until in job.avoid.items() if until > at_ms} | dict(e.avoid)
    job.beneficiary = e.beneficiary or job.beneficiary
    _earmark(state, job, e.beneficiary, e.deadline_ms + int(e.grace_s * 1000), index, at_ms)
    # Ranks that have been asked already are not asked again: what they have acknowledged stays true.
    if job.notice is None or e.deadline_ms < job.notice.deadline_ms:
        job.notice = StopNotice(e.why or "resize", e.message, e.deadline_ms, e.grace_s, job.resize.world_size)
    _enter(state, job, "resizing", index, at_ms)


def _gang_requeued(state: State, e: ev.GangRequeued, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if not job.active:
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if e.forgive:
        _forgive(job)
    _account_failure(job, e.failure_class, at_ms)
    _lose_work(state, job, e.beneficiary or job.beneficiary, at_ms)
    if e.beneficiary:
        _earmark(state, job, e.beneficiary, at_ms + int(job.spec.preemption.grace_s * 1000), index, at_ms)
    _remember_restart(job, e.cause, e.failure_class, e.message, e.lost_ranks, e.lost_nodes, at_ms, e.failed_at_ms)
    _end_generation(job, at_ms)
    _forget_resize(state, job, set(), index)
    job.not_before_ms = e.not_before_ms
    job.prepare_failures += e.cause == "prepare_failed"
    job.avoid = {n: until for n, until in job.avoid.items() if until > at_ms} | dict(e.avoid)
    job.notice = None
    job.beneficiary, job.saved_at_ms = "", 0
    job.held_requeue = False
    _leave_all(state, job, index)
    _enter(state, job, "queued", index, at_ms)
    state.running.pop(job.id, None)
    _enqueue(state, job)


def _gang_finished(state: State, e: ev.GangFinished, index: int, epoch: int, at_ms: int) -> None:
    job = _live_job(state, e, e.job)
    if job.elements is not None and job.elements.live:
        raise IllegalTransition(e, f"{len(job.elements.live)} elements of {job.id} have not ended")
    if e.outcome == "failed" and e.cause in ("rank_failed", "restarts_exhausted"):
        health.note_death(state, job, at_ms)
    if job.spec.burn_in:
        state.scratch.unwell[job.spec.burn_in] = None
    _end_generation(job, at_ms)
    _forget_resize(state, job, set(), index)
    if job.state == "queued":
        _dequeue(state, job)
        state.scratch.queue_dirty = True  # it may have been in somebody's way
    else:
        state.running.pop(job.id, None)
    _leave_all(state, job, index, over=True)
    if e.outcome == "succeeded" and job.ran_ms:
        learn(state.runtimes, job)
    job.outcome, job.cause, job.message, job.exit_code = e.outcome, e.cause, e.message, e.exit_code
    job.ended_at_ms = at_ms
    job.notice, job.deferral = None, None
    job.beneficiary, job.saved_at_ms = "", 0
    state.earmarks.pop(job.id, None)
    _drop_reservation(state, job)
    if job.spec.name and state.names.get(job.spec.name) == job.id:
        del state.names[job.spec.name]
    _enter(state, job, "finished", index, at_ms)
    state.finished[job.id] = None
    life.ended(state, job, index, at_ms)
    _forget_oldest(state)


def _forget_oldest(state: State) -> None:
    while len(state.finished) > FINISHED_KEPT:
        old = next(iter(state.finished))
        if state.jobs[old].held_nodes:
            return  # its last ranks are still dying: it is known until they are gone
        forget(state, old)


# ---------------------------------------------------------------- what agents report


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
    _count_free(node)
    _touch_node(state, node, index)
    _capacity(state)


def _node_lost(state: State, e: ev.NodeLost, index: int, epoch: int, at_ms: int) -> None:
    node = _node(state, e, e.node)
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
            _give_back(state, node, job.id)  # nothing of it has run there; what to do without it is the policy's business
            state.scratch.jobs[job_id] = None
        elif not holding.leaving_since:
            job.parts[e.node].dead = over
            state.scratch.jobs[job_id] = None
        elif over or job.state == "finished":
            _gone(state, node, job, index, at_ms)  # the node's agent has ended everything: nothing is left to wait for
    _count_free(node)
    state.scratch.queue_dirty = True  # its labels no longer count in the topology
    _touch_node(state, node, index)


def _node_prepared(state: State, e: ev.NodePrepared, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    part = _part(job, e, e.node)
    if job.state not in ("placed", "preparing") or part.prepared:
        raise IllegalTransition(e, f"job {job.id} is {job.state}, {e.node} {'has prepared' if part.prepared else 'is not asked'}")
    part.prepared, part.address, part.port = True, e.address, e.port
    _shrink(state, job, e.node, index)
    if job.state == "placed":
        _enter(state, job, "preparing", index, at_ms)
    else:
        _touch(state, job, index)


def _prepare_failed(state: State, e: ev.PrepareFailed, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    part = _part(job, e, e.node)
    if job.state not in ("placed", "preparing", "running", "preempting", "resizing") or part.failed:
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    part.failed = e.message or "no reason given"
    _touch(state, job, index)


def _ranks_started(state: State, e: ev.RanksStarted, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    part = _part(job, e, e.node)
    if not e.ranks or any(r not in part.ranks or part.ranks[r].started for r in e.ranks):
        raise IllegalTransition(e, f"ranks {list(e.ranks)} are not all waiting to start on {e.node}")
    for r in e.ranks:
        part.ranks[r].started = True
    _after_start(state, job, index, at_ms)


def _ranks_exited(state: State, e: ev.RanksExited, index: int, epoch: int, at_ms: int) -> None:
    job = _live_job(state, e, e.job)
    part = _part(job, e, e.node)
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
            _shrink(state, job, node_id, index)
        _enter(state, job, "running", index, at_ms)
        if first:
            life.started(state, job, index, at_ms)
    else:
        _touch(state, job, index)


def _part_released(state: State, e: ev.PartReleased, index: int, epoch: int, at_ms: int) -> None:
    node = _node(state, e, e.node)
    holding = node.holdings.get(e.job)
    if holding is None:
        raise IllegalTransition(e, f"{e.job} holds nothing on {e.node}")
    if not holding.leaving_since:
        raise IllegalTransition(e, f"{e.job} is to stay on {e.node}")
    _gone(state, node, state.jobs[e.job], index, at_ms)
    _touch_node(state, node, index)
    _capacity(state)
    _forget_oldest(state)


def _progress_reported(state: State, e: ev.ProgressReported, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    job.step, job.step_generation, job.step_at_ms = e.step, e.generation, at_ms
    job.index = index


def _checkpoint_reported(state: State, e: ev.CheckpointReported, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    job.checkpoint_step, job.checkpoint_path, job.checkpoint_at_ms = e.step, e.path, at_ms
    job.step = max(job.step, e.step)
    job.index = index


def _stop_acknowledged(state: State, e: ev.StopAcknowledged, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    part = _part(job, e, e.node)
    if job.state not in ("preempting", "resizing") or part.acknowledged:
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    part.acknowledged = True
    if all(p.acknowledged for p in job.parts.values()):
        job.saved_at_ms = at_ms
    _touch(state, job, index)


def _health_reported(state: State, e: ev.HealthReported, index: int, epoch: int, at_ms: int) -> None:
    node = _node(state, e, e.node)
    health.reported(state, node, e)
    for job in node.holdings:
        state.scratch.jobs[job] = None
    state.scratch.unwell[node.id] = None
    node.index = index


def _health_changed(state: State, e: ev.HealthChanged, index: int, epoch: int, at_ms: int) -> None:
    node = _node(state, e, e.node)
    before = offers(node)
    health.changed(state, node, e, at_ms)
    change_capacity(state, before, offers(node), at_ms)
    _count_free(node)
    for job in node.holdings:
        state.scratch.jobs[job] = None
    state.scratch.unwell[node.id] = None
    _touch_node(state, node, index)
    _capacity(state)


def _rank_slow(state: State, e: ev.RankSlow, index: int, epoch: int, at_ms: int) -> None:
    job = _current(state, e, e.job, e.generation)
    if e.rank not in _part(job, e, e.node).ranks or e.rank in job.slow:
        raise IllegalTransition(e, f"rank {e.rank} of {e.job} is not on {e.node}, or known to be slow")
    job.slow = tuple(sorted((*job.slow, e.rank)))
    _touch(state, job, index)


# ---------------------------------------------------------------- administration


def _node_administered(state: State, e: ev.NodeAdministered, index: int, epoch: int, at_ms: int) -> None:
    node = _node(state, e, e.node)
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
                _gone(state, node, job, index, at_ms)
            else:
                job.parts[e.node].dead = True
    node.reason = e.reason if node.cordoned or node.draining else ""
    for job_id in node.holdings:
        state.scratch.jobs[job_id] = None
    _touch_node(state, node, index)
    _capacity(state)


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
    _capacity(state)


def _reservation_begun(state: State, e: ev.ReservationBegun, index: int, epoch: int, at_ms: int) -> None:
    declared = state.reservations.get(e.name)
    if declared is None or declared.begun or at_ms < declared.reservation.start_ms:
        raise IllegalTransition(e, f"reservation {e.name} is not about to begin")
    declared.begun, declared.index = True, index
    _capacity(state)


def _reservation_removed(state: State, e: ev.ReservationRemoved, index: int, epoch: int, at_ms: int) -> None:
    declared = state.reservations.get(e.name)
    if declared is None:
        raise IllegalTransition(e, f"no reservation {e.name}")
    if declared.begun and declared.reservation.maintenance and not declared.over:
        declared.over, declared.index = True, index
    else:
        del state.reservations[e.name]
    _capacity(state)


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
    _capacity(state)


def stranded(state: State, tree: QueueTree) -> dict[str, int]:
    """Return how many live jobs each queue has that would not be a leaf of this tree."""
    found: dict[str, int] = {}
    for job in state.jobs.values():
        if job.state != "finished" and not tree.is_leaf(job.spec.queue):
            found[job.spec.queue] = found.get(job.spec.queue, 0) + 1
    return found


# ---------------------------------------------------------------- shared steps


def _current(state: State, e: ev.LogEvent, job_id: str, generation: int) -> Job:
    job = _live_job(state, e, job_id)
    if job.generation != generation:
        raise IllegalTransition(e, f"job {job_id} is at generation {job.generation}, not {generation}")
    return job


def _part(job: Job, e: ev.LogEvent, node: str) -> Part:
    if node not in job.parts:
        raise IllegalTransition(e, f"job {job.id} has nothing on {node}")
    return job.parts[node]


def _node(state: State, e: ev.LogEvent, node: str) -> Node:
    if node not in state.nodes:
        raise IllegalTransition(e, f"no node {node}")
    return state.nodes[node]


def _enter(state: State, job: Job, to: Any, index: int, at_ms: int) -> None:
    job.state = to
    job.since_ms = at_ms
    state.scratch.moved[job.id] = None
    _touch(state, job, index)
    _touch_nodes(state, job)


def _touch_nodes(state: State, job: Job) -> None:
    for node in job.parts:
        state.scratch.nodes[node] = None


def _touch_node(state: State, node: Node, index: int) -> None:
    node.index = index
    state.scratch.nodes[node.id] = None
    state.scratch.moved_nodes[node.id] = None


def row_of_failures(job: Job, at_ms: int) -> int:
    """Return how many application failures in a row the job has behind it; a healthy generation ends the row."""
    healthy = job.state == "running" and at_ms - job.running_since_ms >= HEALTHY_MS
    return 0 if healthy else job.failures_in_row


def _account_failure(job: Job, failure_class: str, at_ms: int) -> None:
    """Only failures of the application use up the budget."""
    job.failures_in_row = row_of_failures(job, at_ms)
    if failure_class == "application":
        oldest = at_ms - int(job.spec.restart.window_s * 1000)
        job.failures_ms = [*(t for t in job.failures_ms if t > oldest), at_ms]
        job.failures_in_row += 1


def _forgive(job: Job) -> None:
    if job.failures_ms:
        job.failures_ms.pop()
        job.failures_in_row = max(0, job.failures_in_row - 1)
        job.restarts -= 1


def _end_generation(job: Job, at_ms: int) -> None:
    if job.running_since_ms:
        job.ran_ms += at_ms - job.running_since_ms
        job.running_since_ms = 0
    job.slow = ()


def _earmark(state: State, victim: Job, beneficiary: str, gone_ms: int, index: int, at_ms: int) -> None:
    """Keep what a victim gives up for the job that it makes room for, until a while after it must have gone."""
    if beneficiary:
        victim.evicted_for, victim.evicted_at_ms = beneficiary, at_ms
    job = state.jobs.get(beneficiary)
    if job is None or job.state == "finished" or job.stop:
        return
    for other, old in list(state.earmarks.items()):
        if old.until_ms <= at_ms:
            del state.earmarks[other]
    mark = state.earmarks.get(beneficiary, Earmark(0))
    victims = (*(v for v in mark.victims if v != victim.id), victim.id)
    state.earmarks[beneficiary] = Earmark(max(mark.until_ms, gone_ms + EARMARK_MARGIN_MS), victims, index)


def unsaved_gpu_ms(job: Job, at_ms: int) -> int:
    """Return the GPU time that a gang would lose if it stopped at `at_ms`: since its last checkpoint, or since it runs, or acknowledged."""
    if not job.running_since_ms:
        return 0
    since = max(job.running_since_ms, job.checkpoint_at_ms, job.saved_at_ms)
    return max(0, at_ms - since) * sum(charged_milli(r.gpus, r.share) for p in job.parts.values() for r in p.ranks.values()) // GPU


def _lose_work(state: State, job: Job, beneficiary: str, at_ms: int) -> None:
    """A generation ends before the job does: what it has not saved is lost, and accounted to whoever it made room for."""
    lost = unsaved_gpu_ms(job, at_ms)
    job.lost_gpu_ms += lost
    cause = state.jobs.get(beneficiary)
    if cause is not None and lost:
        cause.cost_gpu_ms += lost
        state.lost_gpu_ms[cause.spec.queue] = state.lost_gpu_ms.get(cause.spec.queue, 0) + lost


def _remember_restart(
    job: Job, cause: str, failure_class: str, message: str, lost_ranks: tuple[int, ...], lost_nodes: tuple[str, ...], at_ms: int,
    failed_at_ms: int = 0,
) -> None:  # fmt: skip
    # A failure on the way back from another one is the same outage to the job: it counts from the first.
    ran = job.state == "running" or (job.state == "resizing" and job.running_since_ms)
    failed_at = failed_at_ms or (job.restart.failed_at_ms if job.restart is not None and not ran else 0) or at_ms
    job.restarts += 1
    job.previous_nodes = tuple(job.parts)
    job.restart = RestartNotice(
        cause=cause, message=message, failure_class=failure_class, lost_ranks=lost_ranks, lost_nodes=lost_nodes,
        old_world_size=job.world_size, failed_at_ms=failed_at, checkpoint_step=job.checkpoint_step,
        checkpoint_path=job.checkpoint_path, restarts=job.restarts,
    )  # fmt: skip


def _needed(job: Job, ranks: Collection[Rank]) -> Holding:
    """Return what some ranks of a job on one node need."""
    cpus_milli, memory_mib = roles.of_ranks(job.spec, [r.leaf for r in ranks])
    whole = tuple(sorted(g for r in ranks if r.share is None for g in r.gpus))
    uses = _summed([use for r in ranks if r.share is not None for use in uses_of(r.gpus, r.share)])
    return Holding(gpus=whole, cpus_milli=cpus_milli, memory_mib=memory_mib, shares=tuple(uses[gpu] for gpu in sorted(uses)))


def _summed(uses: list[GpuUse]) -> dict[int, GpuUse]:
    total: dict[int, GpuUse] = {}
    for use in uses:
        total[use.gpu] = total[use.gpu].plus(use) if use.gpu in total else use
    return total


def _hold(state: State, node: Node, job: str, needed: Holding, index: int) -> None:
    own = node.holdings.get(job)
    if own is not None:  # until the older generation is gone, the gang holds what both of them need
        _give_back(state, node, job)
        needed = _both(node, own, needed)
    state.jobs[job].held_nodes[node.id] = None
    state.scratch.moved[job] = None
    node.holdings[job] = needed
    note_held(state, job, needed, 1)
    node.free_gpus = tuple([g for g in node.free_gpus if g not in needed.gpus])
    _take_shares(node, needed.shares)
    node.free_cpus_milli -= needed.cpus_milli
    node.free_memory_mib -= needed.memory_mib
    _touch_node(state, node, index)


def _both(node: Node, old: Holding, new: Holding) -> Holding:
    """Return what holds two generations of a gang, of which the younger starts where the older has ended."""
    gpus = {*old.gpus, *new.gpus}
    memory = {gpu.index: gpu.memory_mib for gpu in node.registration.gpus}
    shares: dict[int, GpuUse] = {}
    for use in (*old.shares, *new.shares):
        other = shares.get(use.gpu)
        if other is not None:
            larger = max(other, use, key=lambda u: u.amount(memory.get(u.gpu, 0)))
            mig = tuple(sorted({*other.mig, *use.mig}))
            use = GpuUse(use.gpu, larger.milli, larger.memory_mib, mig, max(other.charged, use.charged))
        shares[use.gpu] = use
    return Holding(
        gpus=tuple(sorted(gpus)), cpus_milli=max(old.cpus_milli, new.cpus_milli), memory_mib=max(old.memory_mib, new.memory_mib),
        shares=tuple(shares[gpu] for gpu in sorted(shares) if gpu not in gpus),
    )  # fmt: skip


def _take_shares(node: Node, shares: tuple[GpuUse, ...]) -> None:
    for use in shares:
        there = node.parted.get(use.gpu)
        node.parted[use.gpu] = there.plus(use) if there is not None else use
        if there is None:
            node.free_gpus = tuple([g for g in node.free_gpus if g != use.gpu])


def _give_back(state: State, node: Node, job: str) -> None:
    held = node.holdings.pop(job)
    if node.health:
        state.scratch.unwell[node.id] = None
    note_held(state, job, held, -1)
    del state.jobs[job].held_nodes[node.id]
    state.scratch.moved[job] = None
    freed = list(held.gpus)
    for use in held.shares:
        left = node.parted[use.gpu].minus(use)
        if left:
            node.parted[use.gpu] = left
        else:
            del node.parted[use.gpu]
            freed.append(use.gpu)
    if freed:
        usable = {g.index for g in node.registration.gpus if g.healthy}
        node.free_gpus = tuple(sorted([*node.free_gpus, *(g for g in freed if g in usable)]))
    node.free_cpus_milli += held.cpus_milli
    node.free_memory_mib += held.memory_mib


def _gone(state: State, node: Node, job: Job, index: int, at_ms: int) -> None:
    """Nothing of a gang that was to leave the node is left there. A younger generation elsewhere may have waited for just that."""
    _give_back(state, node, job.id)
    if job.state in ("placed", "preparing") and not job.lingering:
        job.placed_at_ms = at_ms
        _touch(state, job, index)
        _touch_nodes(state, job)


def _shrink(state: State, job: Job, node_id: str, index: int) -> None:
    """The older generation is gone from the node: the gang holds there what its present part needs."""
    node = state.nodes[node_id]
    needed = _needed(job, job.parts[node_id].ranks.values())
    held = node.holdings.get(job.id)
    if held is not None and msgspec.structs.replace(held, leaving_since=0) != needed:
        _give_back(state, node, job.id)
        _hold(state, node, job.id, needed, index)
        _capacity(state)


def _leave_all(state: State, job: Job, index: int, over: bool = False) -> None:
    """The gang should no longer be anywhere. What has already ended is free at once, the rest when its node says so.

    `over`: for ever, so nobody waits for what a lost node may still run of it.
    """
    _touch_nodes(state, job)
    for node_id in list(job.held_nodes):
        _leave(state, job, node_id, index, over)
    if not over:
        job.parts = {}


def _leave(state: State, job: Job, node_id: str, index: int, over: bool = False) -> None:
    node = state.nodes.get(node_id)
    holding = node.holdings.get(job.id) if node is not None else None
    if node is None or holding is None or (holding.leaving_since and not over):
        return
    part = job.parts.get(node_id)
    ended = part is not None and all(r.exited for r in part.ranks.values()) and not _elsewhere(job, part, holding)
    if ended or (node.status == "lost" and (over or not holding.leaving_since)):
        _give_back(state, node, job.id)
        _capacity(state)
    elif not holding.leaving_since:
        holding.leaving_since = index
        state.scratch.moved[job.id] = None
    _touch_node(state, node, index)


def _elsewhere(job: Job, part: Part, holding: Holding) -> bool:
    """The gang holds devices beyond those of its present part: an older generation may still be dying on them."""
    needed = _needed(job, part.ranks.values())
    return (holding.gpus, holding.shares) != (needed.gpus, needed.shares)


def _count_free(node: Node) -> None:
    reg = node.registration
    held: set[int] = set()
    node.parted = {}
    cpus, memory = reg.cpus_milli, reg.memory_mib
    for h in node.holdings.values():
        held.update(h.gpus)
        _take_shares(node, h.shares)
        cpus -= h.cpus_milli
        memory -= h.memory_mib
    node.free_gpus = tuple(g.index for g in reg.gpus if g.healthy and g.index not in held and g.index not in node.parted)
    node.free_cpus_milli, node.free_memory_mib = cpus, memory


_HANDLERS: dict[type[ev.LogEvent], Callable[[State, Any, int, int, int], None]] = {
    ev.LeaderElected: _leader_elected,
    ev.LeaderResigned: _leader_resigned,
    ev.BrakeSet: _brake_set,
    ev.JobSubmitted: _job_submitted,
    ev.JobStopRequested: _job_stop_requested,
    ev.JobHeld: life.job_held,
    ev.JobReleased: life.job_released,
    ev.ElementsQueued: life.elements_queued,
    ev.GangPlaced: _gang_placed,
    ev.GangsDeferred: _gangs_deferred,
    ev.GangReserved: _gang_reserved,
    ev.GangReleased: _gang_released,
    ev.GangRestarting: _gang_restarting,
    ev.RankRestarting: _rank_restarting,
    ev.GangPreempting: _gang_preempting,
    ev.GangResizing: _gang_resizing,
    ev.GangRequeued: _gang_requeued,
    ev.GangFinished: _gang_finished,
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
    ev.NodeAdministered: _node_administered,
    ev.ReservationDeclared: _reservation_declared,
    ev.ReservationBegun: _reservation_begun,
    ev.ReservationRemoved: _reservation_removed,
    ev.QueuesDeclared: _queues_declared,
}
