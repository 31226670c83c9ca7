"""What gangs hold on nodes: taken with the placement, given back when the node reports that nothing of it is left."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from gangline.core.model import roles
from gangline.core.model.accounting import note_held
from gangline.core.model.foldsteps import (
    capacity,
    touch,
    touch_node,
    touch_nodes,
)
from gangline.core.model.gpushares import GpuUse, uses_of
from gangline.core.model.state import Holding, Job, Node, Part, Rank, State


def needs_of(job: Job, ranks: Collection[Rank]) -> Holding:
    """Return what some ranks of a job on one node need."""
    cpus_milli, memory_mib = roles.of_ranks(job.spec, [r.leaf for r in ranks])
    whole = tuple(sorted(g for r in ranks if r.share is None for g in r.gpus))
    uses = summed([use for r in ranks if r.share is not None for use in uses_of(r.gpus, r.share)])
    return Holding(gpus=whole, cpus_milli=cpus_milli, memory_mib=memory_mib, shares=tuple(uses[gpu] for gpu in sorted(uses)))


def summed(uses: list[GpuUse]) -> dict[int, GpuUse]:
    """Return what shares take of each GPU together."""
    total: dict[int, GpuUse] = {}
    for use in uses:
        total[use.gpu] = total[use.gpu].plus(use) if use.gpu in total else use
    return total


def hold(state: State, node: Node, job: str, needed: Holding, index: int) -> None:
    """The job holds this on the node, besides what it holds there already."""
    own = node.holdings.get(job)
    if own is not None:  # until the older generation is gone, the gang holds what both of them need
        give_back(state, node, job)
        needed = both_holdings(node, own, needed)
    state.jobs[job].held_nodes[node.id] = None
    state.scratch.moved[job] = None
    node.holdings[job] = needed
    note_held(state, job, needed, 1)
    node.free_gpus = tuple([g for g in node.free_gpus if g not in needed.gpus])
    take_shares(node, needed.shares)
    node.free_cpus_milli -= needed.cpus_milli
    node.free_memory_mib -= needed.memory_mib
    touch_node(state, node, index)


def both_holdings(node: Node, old: Holding, new: Holding) -> Holding:
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


def take_shares(node: Node, shares: tuple[GpuUse, ...]) -> None:
    """Shares and MIG instances take their parts of the node's GPUs."""
    for use in shares:
        there = node.parted.get(use.gpu)
        node.parted[use.gpu] = there.plus(use) if there is not None else use
        if there is None:
            node.free_gpus = tuple([g for g in node.free_gpus if g != use.gpu])


def give_back(state: State, node: Node, job: str) -> None:
    """Nothing of the job is left on the node."""
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


def gone(state: State, node: Node, job: Job, index: int, at_ms: int) -> None:
    """Nothing of a gang that was to leave the node is left there. A younger generation elsewhere may have waited for just that."""
    give_back(state, node, job.id)
    if job.state in ("placed", "preparing") and not job.lingering:
        job.placed_at_ms = at_ms
        touch(state, job, index)
        touch_nodes(state, job)


def shrink(state: State, job: Job, node_id: str, index: int) -> None:
    """The older generation is gone from the node: the gang holds there what its present part needs."""
    node = state.nodes[node_id]
    needed = needs_of(job, job.parts[node_id].ranks.values())
    held = node.holdings.get(job.id)
    if held is not None and msgspec.structs.replace(held, leaving_since=0) != needed:
        give_back(state, node, job.id)
        hold(state, node, job.id, needed, index)
        capacity(state)


def leave_all(state: State, job: Job, index: int, over: bool = False) -> None:
    """The gang should no longer be anywhere. What has already ended is free at once, the rest when its node says so.

    `over`: for ever, so nobody waits for what a lost node may still run of it.
    """
    touch_nodes(state, job)
    for node_id in list(job.held_nodes):
        leave(state, job, node_id, index, over)
    if not over:
        job.parts = {}


def leave(state: State, job: Job, node_id: str, index: int, over: bool = False) -> None:
    """The node is to have none of the job from now on, but for what its current generation has there."""
    node = state.nodes.get(node_id)
    holding = node.holdings.get(job.id) if node is not None else None
    if node is None or holding is None or (holding.leaving_since and not over):
        return
    part = job.parts.get(node_id)
    ended = part is not None and all(r.exited for r in part.ranks.values()) and not elsewhere(job, part, holding)
    if ended or (node.status == "lost" and (over or not holding.leaving_since)):
        give_back(state, node, job.id)
        capacity(state)
    elif not holding.leaving_since:
        holding.leaving_since = index
        state.scratch.moved[job.id] = None
    touch_node(state, node, index)


def elsewhere(job: Job, part: Part, holding: Holding) -> bool:
    """The gang holds devices beyond those of its present part: an older generation may still be dying on them."""
    needed = needs_of(job, part.ranks.values())
    return (holding.gpus, holding.shares) != (needed.gpus, needed.shares)


def count_free(node: Node) -> None:
    """Count what is free on the node anew, after what it has has changed."""
    reg = node.registration
    held: set[int] = set()
    node.parted = {}
    cpus, memory = reg.cpus_milli, reg.memory_mib
    for h in node.holdings.values():
        held.update(h.gpus)
        take_shares(node, h.shares)
        cpus -= h.cpus_milli
        memory -= h.memory_mib
    node.free_gpus = tuple(g.index for g in reg.gpus if g.healthy and g.index not in held and g.index not in node.parted)
    node.free_cpus_milli, node.free_memory_mib = cpus, memory
