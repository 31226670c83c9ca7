"""Handlers of the fold for what happens to jobs: submission, and every decision about a gang."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from gangline.core.model import events as ev
from gangline.core.model import foldhealth as health
from gangline.core.model import foldlife as life
from gangline.core.model import roles
from gangline.core.model.documents import StopNotice
from gangline.core.model.foldholdings import (
    both_holdings,
    give_back,
    hold,
    leave,
    leave_all,
    needs_of,
    summed,
)
from gangline.core.model.foldlosses import (
    account_failure,
    earmark,
    end_generation,
    forgive,
    lose_work,
    remember_restart,
    row_of_failures,
)
from gangline.core.model.foldsteps import (
    Handlers,
    IllegalTransition,
    capacity,
    current_job,
    dequeue,
    enqueue,
    enter,
    forget_oldest,
    live_job,
    touch,
    touch_node,
    touch_nodes,
)
from gangline.core.model.gpushares import uses_of
from gangline.core.model.runtimes import learn
from gangline.core.model.spec import Resources
from gangline.core.model.state import Deferral, Holding, Job, Node, Part, Rank, Reserved, Resize, State


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
    job = live_job(state, e, e.job)
    job.stop = e.reason or "stopped"
    job.stop_by = e.by
    state.scratch.moved[job.id] = None
    touch(state, job, index)
    life.touch_elements(state, job)


def _gang_placed(state: State, e: ev.GangPlaced, index: int, epoch: int, at_ms: int) -> None:
    job = live_job(state, e, e.job)
    if job.state not in ("queued", "restarting", "resizing"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if e.generation != job.generation + 1:
        raise IllegalTransition(e, f"generation {e.generation} does not follow {job.generation}")
    _check_placement(state, job, e)
    if job.state == "queued":
        life.count_wait(job, at_ms)
        dequeue(state, job)
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
        hold(state, state.nodes[placed.node], job.id, needs_of(job, ranks.values()), index)
    for node_id in list(job.held_nodes):
        if node_id not in job.parts:
            leave(state, job, node_id, index)
    job.released, job.master_addr, job.master_port = False, "", 0
    job.placed_at_ms = at_ms
    job.deferral, job.notice = None, None
    job.beneficiary, job.saved_at_ms = "", 0
    state.earmarks.pop(job.id, None)
    _drop_reservation(state, job)
    if job.restart is not None:
        new_nodes = tuple(n for n in job.parts if n not in job.previous_nodes)
        job.restart = msgspec.structs.replace(job.restart, new_nodes=new_nodes, new_world_size=job.world_size)
    enter(state, job, "placed", index, at_ms)


def _end_old_size(state: State, job: Job, kept: set[str], index: int, at_ms: int) -> None:
    """The generation that was to end for another size has ended. Ranks that never ran at the old size need not know of it."""
    resize = job.resize
    if resize is None:
        return
    job.failures_in_row = row_of_failures(job, at_ms)
    lose_work(state, job, job.beneficiary, at_ms)
    if resize.cause not in ("grow", "shrink") or any(r.started for p in job.parts.values() for r in p.ranks.values()):
        cause = resize.why or ("resize" if resize.cause in ("grow", "shrink") else resize.cause)
        remember_restart(job, cause, "infrastructure", resize.message, resize.lost_ranks, resize.lost_nodes, at_ms)
    end_generation(job, at_ms)
    _forget_resize(state, job, kept, index)


def _forget_resize(state: State, job: Job, kept: set[str], index: int) -> None:
    """Give back the places that were held for another size, on nodes that are not to be kept: nothing has run there."""
    pending = [n for n in job.pending_nodes if n not in kept]
    job.resize = None
    for node_id in pending:
        node = state.nodes[node_id]
        if job.id in node.holdings:
            give_back(state, node, job.id)
            touch_node(state, node, index)
            capacity(state)


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
    uses = summed([use for r in part.ranks for use in uses_of(r.gpus, r.share)])
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
    jobs = [live_job(state, e, j) for j in e.jobs]
    for job in jobs:
        if job.state not in ("queued", "array"):
            raise IllegalTransition(e, f"job {job.id} is {job.state}")
    deferral = Deferral(code=e.code, message=e.message, need=e.need, have=e.have, index=index)
    for job in jobs:
        job.deferral = deferral
        job.index = index


def _gang_reserved(state: State, e: ev.GangReserved, index: int, epoch: int, at_ms: int) -> None:
    job = live_job(state, e, e.job)
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
    job = current_job(state, e, e.job, e.generation)
    if job.released or job.state not in ("placed", "preparing"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}{', released' if job.released else ''}")
    missing = [n for n, p in job.parts.items() if not p.prepared]
    if missing:
        raise IllegalTransition(e, f"{', '.join(missing)} have not prepared")
    if job.lingering:
        raise IllegalTransition(e, f"an older generation may still run on {', '.join(job.lingering)}")
    job.released, job.master_addr, job.master_port = True, e.master_addr, e.master_port
    job.placed_at_ms = at_ms
    touch(state, job, index)
    touch_nodes(state, job)


def _gang_restarting(state: State, e: ev.GangRestarting, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    if not job.active or job.state == "restarting":
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if e.cause in ("rank_failed", "hang"):
        health.note_death(state, job, at_ms)
    account_failure(job, e.failure_class, at_ms)
    lose_work(state, job, "", at_ms)
    remember_restart(job, e.cause, e.failure_class, e.message, e.lost_ranks, (), at_ms)
    end_generation(job, at_ms)
    _forget_resize(state, job, set(), index)
    job.not_before_ms = e.not_before_ms
    job.released = False
    job.notice, job.beneficiary = None, ""
    enter(state, job, "restarting", index, at_ms)


def _rank_restarting(state: State, e: ev.RankRestarting, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    if job.state not in ("placed", "preparing", "running"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    ranks = [job.rank(r) for r in e.ranks]
    if not ranks or any(r is None or not r.exited for r in ranks):
        raise IllegalTransition(e, f"ranks {list(e.ranks)} have not all ended")
    health.note_death(state, job, at_ms)
    account_failure(job, e.failure_class, at_ms)
    remember_restart(job, e.cause, e.failure_class, e.message, e.ranks, (), at_ms)
    if job.restart is not None:
        job.restart = msgspec.structs.replace(job.restart, new_world_size=job.world_size)
    job.generation += 1
    job.placed_at_ms = at_ms
    for rank in ranks:
        if rank is not None:
            rank.generation = job.generation
            rank.started = rank.exited = False
            rank.exit_code, rank.cause, rank.message, rank.exited_at_ms, rank.ended_ms = 0, "", "", 0, 0
    touch(state, job, index)
    touch_nodes(state, job)


def _gang_preempting(state: State, e: ev.GangPreempting, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    if job.state not in ("placed", "preparing", "running", "resizing"):
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    _forget_resize(state, job, set(), index)
    job.notice = StopNotice(cause=e.cause, message=e.message, deadline_ms=e.deadline_ms, grace_s=e.grace_s)
    job.beneficiary = e.beneficiary
    for part in job.parts.values():
        part.acknowledged = False
    # The ranks may take as long again to die after their deadline as they had before it.
    earmark(state, job, e.beneficiary, e.deadline_ms + int(e.grace_s * 1000), index, at_ms)
    if e.moved:
        earmark(state, job, job.id, e.deadline_ms + int(e.grace_s * 1000), index, at_ms)
        job.evicted_for = e.beneficiary
    enter(state, job, "preempting", index, at_ms)


def _gang_resizing(state: State, e: ev.GangResizing, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    if not job.active or job.state == "preempting":
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    _check_placement(state, job, e)
    if old := [p.node for p in e.parts if p.node in job.lingering]:
        raise IllegalTransition(e, f"an older generation may still run on {', '.join(old)}")
    if e.forgive:
        forgive(job)
    _forget_resize(state, job, set(), index)
    job.resize = Resize(e.parts, e.role_sizes, e.cause, e.message, e.lost_ranks, e.lost_nodes, e.why)
    leaf_of = roles.leaf_of_ranks(roles.placed(job.spec, e.role_sizes, job.resize.world_size))
    for part in e.parts:
        node = state.nodes[part.node]
        needed = needs_of(job, [Rank(gpus=r.gpus, generation=0, leaf=leaf_of[r.rank], share=r.share) for r in part.ranks])
        own = node.holdings.get(job.id)
        if own is None or both_holdings(node, own, needed) != own:
            hold(state, node, job.id, needed, index)
    job.prepare_failures += e.cause == "prepare_failed"
    job.avoid = {n: until for n, until in job.avoid.items() if until > at_ms} | dict(e.avoid)
    job.beneficiary = e.beneficiary or job.beneficiary
    earmark(state, job, e.beneficiary, e.deadline_ms + int(e.grace_s * 1000), index, at_ms)
    # Ranks that have been asked already are not asked again: what they have acknowledged stays true.
    if job.notice is None or e.deadline_ms < job.notice.deadline_ms:
        job.notice = StopNotice(e.why or "resize", e.message, e.deadline_ms, e.grace_s, job.resize.world_size)
    enter(state, job, "resizing", index, at_ms)


def _gang_requeued(state: State, e: ev.GangRequeued, index: int, epoch: int, at_ms: int) -> None:
    job = current_job(state, e, e.job, e.generation)
    if not job.active:
        raise IllegalTransition(e, f"job {job.id} is {job.state}")
    if e.forgive:
        forgive(job)
    account_failure(job, e.failure_class, at_ms)
    lose_work(state, job, e.beneficiary or job.beneficiary, at_ms)
    if e.beneficiary:
        earmark(state, job, e.beneficiary, at_ms + int(job.spec.preemption.grace_s * 1000), index, at_ms)
    remember_restart(job, e.cause, e.failure_class, e.message, e.lost_ranks, e.lost_nodes, at_ms, e.failed_at_ms)
    end_generation(job, at_ms)
    _forget_resize(state, job, set(), index)
    job.not_before_ms = e.not_before_ms
    job.prepare_failures += e.cause == "prepare_failed"
    job.avoid = {n: until for n, until in job.avoid.items() if until > at_ms} | dict(e.avoid)
    job.notice = None
    job.beneficiary, job.saved_at_ms = "", 0
    job.held_requeue = False
    leave_all(state, job, index)
    enter(state, job, "queued", index, at_ms)
    state.running.pop(job.id, None)
    enqueue(state, job)


def _gang_finished(state: State, e: ev.GangFinished, index: int, epoch: int, at_ms: int) -> None:
    job = live_job(state, e, e.job)
    if job.elements is not None and job.elements.live:
        raise IllegalTransition(e, f"{len(job.elements.live)} elements of {job.id} have not ended")
    if e.outcome == "failed" and e.cause in ("rank_failed", "restarts_exhausted"):
        health.note_death(state, job, at_ms)
    if job.spec.burn_in:
        state.scratch.unwell[job.spec.burn_in] = None
    end_generation(job, at_ms)
    _forget_resize(state, job, set(), index)
    if job.state == "queued":
        dequeue(state, job)
        state.scratch.queue_dirty = True  # it may have been in somebody's way
    else:
        state.running.pop(job.id, None)
    leave_all(state, job, index, over=True)
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
    enter(state, job, "finished", index, at_ms)
    state.finished[job.id] = None
    life.ended(state, job, index, at_ms)
    forget_oldest(state)


#: by the event that each folds in
HANDLERS: Handlers = {
    ev.JobSubmitted: _job_submitted,
    ev.JobStopRequested: _job_stop_requested,
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
}
