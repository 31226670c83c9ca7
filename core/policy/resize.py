"""A gang that goes on with another number of ranks (`gang.min_ranks` to `gang.ranks`): when, and what becomes of it on the way.

    grow         room is there that nobody who waits has a claim to, and the gang has run at its present size for `elastic.grow_after`
    shrink       the passes take ranks beyond its minimum for somebody who is entitled to their place
    node_lost, prepare_failed     some of its nodes are of no use any more, and what is left is enough

A change of size is a restart of all ranks, in a world of another size: `gang_resizing` asks them to checkpoint, and holds what is new; when they
have, or at the deadline, `gang_placed` makes the new parts the next generation. Ranks that stay keep their devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gangline.core.model import events as ev
from gangline.core.model.health import NODE
from gangline.core.model.roles import full
from gangline.core.model.state import Job, State
from gangline.core.policy.sizes import Placement, cut, is_elastic, present

#: causes after which a gang may take what it has lost from other nodes at once
_AFTER_A_LOSS = ("node_lost", "prepare_failed")


# ---------------------------------------------------------------- when to grow


def grows_from_ms(job: Job) -> int | None:
    """Return the log time from which the gang may grow, None while there is no such time.

    It must have run at its present size for a while, and as long must be left of its time limit: each change costs a restart. While it keeps
    away from a node that could not prepare it, it does not grow. A gang that has lost a node may grow at once, in the same cycle, before anybody
    has been told of the smaller size.
    """
    spec = job.spec
    if not is_elastic(spec) or job.stop or job.resize is not None or job.sizes() == full(spec):
        return None
    if job.state == "placed" and job.restart is not None and job.restart.cause in _AFTER_A_LOSS and not job.lingering:
        return job.placed_at_ms
    if job.state != "running" or any(r.exited for p in job.parts.values() for r in p.ranks.values()):
        return None
    return max([job.running_since_ms + int(spec.elastic.grow_after_s * 1000), *job.avoid.values()])


def may_grow(job: Job, now_ms: int) -> bool:
    """Whether the gang may grow now, if there is room."""
    start_ms = grows_from_ms(job)
    if start_ms is None or now_ms < start_ms:
        return False
    if job.state == "placed":
        return now_ms == start_ms
    left_ms = job.spec.time_limit_s * 1000 - job.ran_ms - (now_ms - job.running_since_ms) if job.spec.time_limit_s else float("inf")
    return left_ms >= job.spec.elastic.grow_after_s * 1000


# ---------------------------------------------------------------- decisions


def grow(job: Job, placement: Placement, now_ms: int) -> ev.GangResizing:
    """Decide that the gang gets more ranks."""
    # Just placed: nobody has been told, so there is nothing to wait for.
    grace_s = 0.0 if job.state == "placed" else job.spec.preemption.grace_s
    return ev.GangResizing(
        job=job.id, generation=job.generation, parts=placement.parts, role_sizes=placement.role_sizes, cause="grow",
        message=f"there is room: from {job.world_size} to {placement.ranks} ranks", deadline_ms=int(now_ms + grace_s * 1000), grace_s=grace_s,
    )  # fmt: skip


def shrink(job: Job, placement: Placement, message: str, beneficiary: str, now_ms: int) -> ev.GangResizing:
    """Decide that the gang gives ranks up."""
    grace_s = job.spec.preemption.grace_s
    return ev.GangResizing(
        job=job.id, generation=job.generation, parts=placement.parts, role_sizes=placement.role_sizes, cause="shrink",
        message=f"{message}: from {job.world_size} to {placement.ranks} ranks", deadline_ms=int(now_ms + grace_s * 1000), grace_s=grace_s,
        beneficiary=beneficiary,
    )  # fmt: skip


def go_on_without(
    state: State, job: Job, nodes: Collection[str], cause: ev.ResizeCause, message: str, now_ms: int, *,
    lost_ranks: tuple[int, ...] = (), avoid: tuple[tuple[str, int], ...] = (), forgive: bool = False,
) -> ev.GangResizing | None:  # fmt: skip
    """Decide that the gang restarts at once with the ranks that it has on other nodes than these; None if it cannot."""
    if not is_elastic(job.spec) or job.state == "preempting":
        return None
    now = present(job)
    left = cut(job.spec, now, lambda node, rank: node not in nodes and _is_fit(state, job, node, rank))
    if left is None:
        return None
    return ev.GangResizing(
        job=job.id, generation=job.generation, parts=left.parts, role_sizes=left.role_sizes, cause=cause,
        message=f"{message}; it goes on with {left.ranks} of {job.world_size} ranks", deadline_ms=now_ms, grace_s=0.0,
        lost_ranks=lost_ranks, lost_nodes=tuple(nodes) if cause == "node_lost" else (), avoid=avoid, forgive=forgive,
    )  # fmt: skip


def cut_to_fit(state: State, job: Job, placement: Placement) -> Placement | None:
    """Return what of a placement can be used, at a size that the gang may have: not devices of its own that are no longer healthy."""
    return cut(job.spec, placement, lambda node, rank: all(g.healthy for g in state.nodes[node].registration.gpus if g.index in rank.gpus))


def goes_on_without(job: Job, nodes: Collection[str], now_ms: int) -> bool:
    """Whether it has been decided that the gang goes on at once, and without these nodes."""
    resize, notice = job.resize, job.notice
    return resize is not None and notice is not None and now_ms >= notice.deadline_ms and not any(p.node in nodes for p in resize.parts)


def next_step(state: State, job: Job, now_ms: int) -> ev.LogEvent | None:
    """Return what a resizing gang calls for: a target that is still there, then, when its ranks have saved their work, the new generation."""
    resize = job.resize
    if resize is None or job.notice is None:
        return None
    unfit = [p.node for p in resize.parts if not all(_is_fit(state, job, p.node, r) for r in p.ranks)]
    if unfit:
        return _another_target(state, job, unfit)
    if (not ready(job) and now_ms < job.notice.deadline_ms) or now_ms < job.not_before_ms:
        return None
    return ev.GangPlaced(job=job.id, generation=job.generation + 1, parts=resize.parts, role_sizes=resize.role_sizes, reason=resize.message)


def ready(job: Job) -> bool:
    """Whether the ranks that were asked have saved their work or ended, or have never been let go."""
    if len(job.parts) > 1 and not job.released:
        return True
    return all(p.acknowledged or p.failed or all(r.exited for r in p.ranks.values()) for p in job.parts.values())


def _another_target(state: State, job: Job, unfit: Sequence[str]) -> ev.LogEvent:
    """The ranks have been asked, and some have left: so the gang restarts, smaller, or elsewhere."""
    resize, notice = job.resize, job.notice
    assert resize is not None
    assert notice is not None
    draining = any(n in state.nodes and state.nodes[n].draining for n in unfit)
    why = "is being drained" if draining else "cannot be used any more"
    message = f"{resize.message}; without what of {', '.join(unfit)} {why}"
    left = cut(job.spec, present(job), lambda node, rank: _is_fit(state, job, node, rank))
    if left is not None:
        return ev.GangResizing(
            job=job.id, generation=job.generation, parts=left.parts, role_sizes=left.role_sizes, cause=resize.cause, message=message,
            beneficiary=job.beneficiary, deadline_ms=notice.deadline_ms, grace_s=notice.grace_s, lost_ranks=resize.lost_ranks,
            lost_nodes=resize.lost_nodes,
        )  # fmt: skip
    cause = "drain" if draining else "node_lost"
    return ev.GangRequeued(job=job.id, generation=job.generation, cause=cause, failure_class="infrastructure", message=message)


def _is_fit(state: State, job: Job, node_id: str, rank: ev.PlacedRank) -> bool:
    """Whether a rank of the next generation can be there: a node that went away and came back took with it what the gang held."""
    node = state.nodes.get(node_id)
    holding = node.holdings.get(job.id) if node is not None else None
    if node is None or node.status != "up" or node.draining or holding is None or holding.leaving_since:
        return False
    if node.withdrawn and node.health[NODE].unfit:
        return False
    if not rank.gpus:
        return True
    devices = {*holding.gpus, *(use.gpu for use in holding.shares)}
    return all(g in devices for g in rank.gpus) and all(gpu.healthy for gpu in node.registration.gpus if gpu.index in rank.gpus)
