"""Does a world, with the decisions in it, break a rule that must never be broken? Everything is added up anew from the ranks.

- nothing is given twice: devices, CPU, memory, ranks per node and MIG instances, now and after everything that leaves has left
- no queue is filled above its limit, nor above its quota by work that cannot be preempted
- a gang starts whole, and none is left below its minimum by an eviction
- what cannot be preempted is not evicted to make room
"""

from __future__ import annotations

from gangline.core.model.gpufacts import COMPUTE_SLICES
from gangline.core.policy.gangs import ACTIVE, HOLDING, Job, Member, Podset, Rank, RankState
from gangline.core.policy.nodes import Node, Place
from gangline.core.policy.report import Decisions
from gangline.core.policy.requests import RESOURCES, ZERO, Request, Vector, add
from gangline.core.policy.world import World


def violations(world: World, decisions: Decisions) -> list[str]:
    """Return what is broken, in words; empty if nothing is."""
    return [*_capacity(world), *_bounds(world, decisions), *_gangs(decisions), *_evictions(decisions)]


def _capacity(world: World) -> list[str]:
    now: dict[Node, dict[str, int]] = {}
    later: dict[Node, dict[str, int]] = {}
    for job in world.jobs.values():
        for rank in job.ranks:
            if rank.state in HOLDING and rank.place is not None:
                _count(now, rank.request, rank.place)
                if rank.state not in (RankState.RELEASING, RankState.EVICTED):
                    _count(later, rank.request, rank.place)
            if rank.reservation is not None:
                _count(later, rank.request, rank.reservation)
    out = []
    for when, used in (("now", now), ("later", later)):
        for node, amounts in used.items():
            for what, amount in amounts.items():
                has = _has(node, what)
                if amount > has:
                    out.append(f"node {node.name} has {has} of {what}, {amount} are given ({when})")
                if what.startswith("device ") and f"compute slices of {what[7:]}" in amounts:
                    out.append(f"{what} of node {node.name} is partitioned, and given in another way as well ({when})")
    return out


def _count(into: dict[Node, dict[str, int]], request: Request, place: Place) -> None:
    amounts = into.setdefault(place.node, {})
    taken = {"cpu": request.cpu_milli, "memory": request.memory_bytes, "pods": 1}
    if place.node.spec.mig_layout is None:
        taken |= {f"MIG {profile}": count for profile, count in request.mig}
    for what, amount in taken.items():
        amounts[what] = amounts.get(what, 0) + amount
    for device in () if place.mig else place.devices:
        amounts[f"device {device}"] = amounts.get(f"device {device}", 0) + place.node.share_of(request)
    for device, start, profile in place.mig:
        _count_instance(amounts, place.node, device, start, profile)


def _count_instance(amounts: dict[str, int], node: Node, device: int, start: int, profile: str) -> None:
    """An instance takes memory slices and a number of compute slices of its device."""
    layout = node.spec.mig_layout
    wanted = layout.profile(profile) if layout is not None else None
    if wanted is None or start not in wanted.starts:
        amounts[f"instance {profile} at {start}"] = 1
        return
    amounts[f"compute slices of {device}"] = amounts.get(f"compute slices of {device}", 0) + wanted.compute
    for at in range(start, start + wanted.size):
        amounts[f"slice {device}/{at}"] = amounts.get(f"slice {device}/{at}", 0) + 1


def _has(node: Node, what: str) -> int:
    if what.startswith("device "):
        return node.full if int(what[7:]) < node.gpus else 0
    if what.startswith("MIG "):
        return (node.spec.mig or {}).get(what[4:], 0)
    if what.startswith(("slice ", "compute slices ")):
        return 1 if what.startswith("slice ") else COMPUTE_SLICES
    if what.startswith("instance "):
        return 0
    return {"cpu": node.spec.cpu_milli, "memory": node.spec.memory_bytes, "pods": node.spec.max_pods}[what]


def _bounds(world: World, decisions: Decisions) -> list[str]:
    if not world.options.quotas:
        return []
    totals: dict[str, Vector] = {}
    fixed: dict[str, Vector] = {}
    for job in world.jobs.values():
        for rank in job.ranks:
            for queue in job.queue.path:
                totals[queue.name] = add(totals.get(queue.name, ZERO), rank.charged)
                if not job.preemptible:
                    fixed[queue.name] = add(fixed.get(queue.name, ZERO), rank.charged)
    out = []
    fresh = [p.rank for p in decisions.placements] + [r.rank for r in decisions.reservations if not r.moved]
    for rank in fresh:
        for queue in rank.job.queue.path:
            for r in range(3):
                if rank.charged[r] and totals[queue.name][r] > queue.limit[r]:
                    out.append(f"{rank.name} takes queue {queue.name} above its limit of {RESOURCES[r]}")
                if rank.charged[r] and not rank.job.preemptible and fixed[queue.name][r] > queue.quota[r]:
                    out.append(f"{rank.name}, which cannot be preempted, takes queue {queue.name} above its quota of {RESOURCES[r]}")
    return out + (_model_bounds(world, fresh) if any(queue.models for queue in world.queues.values()) else [])


def _model_bounds(world: World, fresh: list[Rank]) -> list[str]:
    """What is placed takes no queue above what it may have of a GPU model; everything is added up anew."""
    totals: dict[tuple[str, str, bool], int] = {}
    for job in world.jobs.values():
        for rank in job.ranks:
            place = rank.reservation or rank.place
            if rank.charged[0] and place is not None:
                for queue in job.queue.path:
                    for fixed in (False,) if job.preemptible else (False, True):
                        key = (queue.name, place.node.model, fixed)
                        totals[key] = totals.get(key, 0) + rank.charged[0]
    out = []
    for rank in fresh:
        place = rank.reservation or rank.place
        model = place.node.model if place is not None else ""
        for queue in rank.job.queue.path:
            account = queue.models.get(model)
            if account is None or not rank.charged[0]:
                continue
            if totals[queue.name, model, False] > account.limit:
                out.append(f"{rank.name} takes queue {queue.name} above its limit of {model}")
            if not rank.job.preemptible and account.quota is not None and totals[queue.name, model, True] > account.quota:
                out.append(f"{rank.name}, which cannot be preempted, takes queue {queue.name} above its quota of {model}")
    return out


def _gangs(decisions: Decisions) -> list[str]:
    fresh = {p.rank.job: None for p in decisions.placements} | {r.rank.job: None for r in decisions.reservations}
    out = [f"{job.name} gets a part of its gang only" for job in fresh if not job.root.satisfied]
    for placement in decisions.placements:
        podset = placement.rank.podset
        if sum(1 for r in podset.ranks if r.state in ACTIVE) < podset.min_ranks:
            out.append(f"{placement.rank.name} starts while others of its gang still wait")
    return out


def _evictions(decisions: Decisions) -> list[str]:
    out = []
    jobs: dict[Job, None] = {}
    for eviction in decisions.evictions:
        job = eviction.rank.job
        if eviction.action == "evict-stale-gangs":
            continue
        jobs[job] = None
        if not job.preemptible:
            out.append(f"{eviction.rank.name} cannot be preempted, and is evicted for {eviction.beneficiary}")
    for job in jobs:
        if _was_satisfied(job.root) and not job.root.satisfied and any(r.counts for r in job.ranks):
            out.append(f"{job.name} keeps a part of its gang only")
    return out


def _was_satisfied(member: Member) -> bool:
    """Whether it was satisfied before the evictions."""
    if isinstance(member, Podset):
        return sum(1 for r in member.ranks if r.state in (*ACTIVE, RankState.EVICTED)) >= member.min_ranks
    return sum(1 for m in member.members if _was_satisfied(m)) >= member.needed
