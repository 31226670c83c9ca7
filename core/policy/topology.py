"""Where in a topology the ranks of a scope (a job, a set, a podset) may go: which domains are tried, and in which order.

A topology is a list of node labels, coarsest level first. A *domain* of a level is the set of nodes with the same values of that label and all
coarser ones. A node without one of the labels is outside of the topology, for preferences too.

required   all ranks of the scope are in one domain of that level, or wait. Where some run already, only domains that hold one of these count.
preferred  domains of that level are tried first, then coarser ones, up to the required level if there is one, else the whole topology.

Only domains with room for the ranks are tried; of one level the fullest first (the largest ratio of what is asked for to what is free), equal
ones by name. Inside the domain that is tried, the preferred sub-domains come in turn, the one with the most room first, so that as many ranks
as possible are close.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gangline.core.model.gpufacts import COMPUTE_SLICES
from gangline.core.policy import migplan, refusals
from gangline.core.policy.gangs import Constraint, Rank, charge_of
from gangline.core.policy.nodeindex import NodeIndex
from gangline.core.policy.nodes import Node
from gangline.core.policy.predicates import right_kind, room
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.requests import GPU, Request, Vector, mig_gpus
from gangline.core.policy.world import World

#: indexes of the nodes that a rank may go to, the ones to prefer first
Tiers = list[NodeIndex]
#: label values from the coarsest level down
DomainId = tuple[str, ...]


@dataclass
class Search:
    """The domains to try, in order, or why there are none."""

    candidates: Iterator[Tiers]
    refusal: Refusal | None = None


def domains_of(world: World, topology: str) -> tuple[dict[str, DomainId], tuple[str, ...]] | None:
    """Return the full label path of each node inside the topology, by node name, and the levels; None if there is no such topology."""
    levels = world.topologies.get(topology)
    if levels is None:
        return None
    known = world.label_paths.get(topology)
    if known is not None and known[:2] == (world.node_version, levels):
        return known[2], levels
    paths = {}
    for node in world.nodes:
        labels = node.spec.labels
        if all(level in labels for level in levels):
            paths[node.name] = tuple(labels[level] for level in levels)
    world.label_paths[topology] = (world.node_version, levels, paths)
    return paths, levels


def search(world: World, constraint: Constraint, ranks: list[Rank], running: list[Rank], scope: Tiers) -> Search:
    """Return the domains of the scope to try for the ranks, of which `running` have a place already."""
    found = domains_of(world, constraint.topology)
    if found is None:
        return Search(iter(()), refusals.no_such_topology(constraint.topology, ""))
    paths, levels = found
    for name in (constraint.required, constraint.preferred, constraint.balanced, constraint.spread):
        if name and name not in levels:
            return Search(iter(()), refusals.no_such_topology(constraint.topology, name))
    required = levels.index(constraint.required) if constraint.required else -1
    preferred = levels.index(constraint.preferred) if constraint.preferred else -1
    nodes = [n for index in scope for n in index.nodes if n.name in paths]
    if not nodes:
        return Search(iter(()), refusals.no_labels(_number(ranks), constraint.topology, levels) if world.nodes else None)
    anchors = {paths[p.node.name][: required + 1] for r in running if (p := r.reservation or r.place) and p.node.name in paths}
    first = max(required, preferred)
    refusal = None
    tries: list[tuple[int, DomainId, list[Node]]] = []
    for level in range(first, required - 1, -1):
        domains: dict[DomainId, list[Node]] = {}
        for node in nodes:
            path = paths[node.name]
            if required < 0 or not anchors or path[: required + 1] in anchors:
                domains.setdefault(path[: level + 1], []).append(node)
        fitting = [(_ratio(ranks, some, world), d, some) for d, some in domains.items() if _holds(ranks, some, world)]
        if not fitting and level == required and required >= 0:
            refusal = _no_domain(world, ranks, levels[required], list(domains.values()))
        tries += [(level, d, some) for _, d, some in sorted(fitting, key=lambda f: (-f[0], ".".join(f[1])))]
    return Search(_tiers(world, tries, paths, preferred, ranks, scope), refusal)


def split_by(world: World, constraint: Constraint, ranks: list[Rank], scope: Tiers) -> dict[DomainId, Tiers]:
    """Return the domains of the level over which ranks are to be in equal numbers, by name: those with nodes that could run each of them."""
    paths, levels = domains_of(world, constraint.topology) or ({}, ())
    depth = levels.index(constraint.balanced or constraint.spread) + 1
    requests = list({r.request.number: r.request for r in ranks}.values())
    parts: dict[DomainId, list[list[Node]]] = {}
    usable: dict[DomainId, set[int]] = {}
    for at, index in enumerate(scope):
        for node in index.nodes:
            if node.name in paths:
                domain = paths[node.name][:depth]
                parts.setdefault(domain, [[] for _ in scope])[at].append(node)
                usable.setdefault(domain, set()).update(r.number for r in requests if _could_run(r, node))
    complete = [domain for domain in sorted(parts) if len(usable[domain]) == len(requests)]
    return {domain: [NodeIndex(world, _by_name(nodes)) for nodes in parts[domain] if nodes] for domain in complete}


def room_in(ranks: list[Rank], scope: Tiers) -> int:
    """Return for how many of the ranks, which are alike, the nodes have room, counted later."""
    return _count(ranks[0].request, [n for index in scope for n in index.nodes])


def _tiers(
    world: World, tries: list[tuple[int, DomainId, list[Node]]], paths: dict[str, DomainId], preferred: int, ranks: list[Rank], scope: Tiers
) -> Iterator[Tiers]:
    for level, _, nodes in tries:
        if level < preferred:
            close: dict[DomainId, list[Node]] = {}
            for node in nodes:
                close.setdefault(paths[node.name][: preferred + 1], []).append(node)
            ordered = sorted(close, key=lambda d: ".".join(d), reverse=True)
            ordered.sort(key=lambda d: -_count(ranks[0].request, close[d]))
            yield [NodeIndex(world, _by_name(close[d])) for d in ordered]
        elif len(scope) == 1:
            yield [NodeIndex(world, _by_name(nodes))]
        else:
            inside = {n.index for n in nodes}
            parts = [[n for n in index.nodes if n.index in inside] for index in scope]
            yield [NodeIndex(world, part) for part in parts if part]


def _no_domain(world: World, ranks: list[Rank], level: str, domains: list[list[Node]]) -> Refusal:
    if level == refusals.MODEL_LEVEL:
        counts = [_count(ranks[0].request, some) for some in domains]
        if sum(counts) < len(ranks):  # of all models together there is too little
            return refusals.does_not_fit(world, ranks[0], ranks, world.nodes)
        unit = ranks[0].podset.unit
        return refusals.no_one_model(_number(ranks), sum(1 for c in counts if c), max(counts) * unit)
    if all(r.request is ranks[0].request for r in ranks):
        best = max((_count(ranks[0].request, some) for some in domains), default=0)
        return refusals.no_domain(_number(ranks), level, len(domains), best * ranks[0].podset.unit)
    need = charge_of(ranks, world.largest_device_mib)
    free = max((_free(some) for some in domains), key=lambda f: min(f[r] / need[r] for r in range(3) if need[r]), default=(0, 0, 0))
    return refusals.no_domain_for_roles(need, level, free, len(domains))


def _number(ranks: list[Rank]) -> int:
    """Return how many ranks of the job they stand for."""
    return sum(r.podset.unit for r in ranks)


def _by_name(nodes: list[Node]) -> list[Node]:
    return sorted(nodes, key=lambda n: n.index)


def _holds(ranks: list[Rank], nodes: list[Node], world: World) -> bool:
    first = ranks[0].request
    if all(r.request is first for r in ranks):
        return _count(first, nodes, len(ranks)) >= len(ranks)
    need, free = charge_of(ranks, world.largest_device_mib), _free(nodes, any(r.request.mig for r in ranks))
    return all(not need[r] or need[r] <= free[r] for r in range(3))


def _count(request: Request, nodes: list[Node], enough: int = 1 << 30) -> int:
    """Return how many such ranks the nodes have room for, counted later; it may stop at `enough`."""
    total = 0
    for node in nodes:
        total += _on_node(request, node)
        if total >= enough:
            break
    return total


def _on_node(request: Request, node: Node) -> int:
    if not room(node, request, now=False) or not _suits(request, node):
        return 0
    counts = [node.pods_later]
    if request.affinity is not None and request.affinity.repel == "hostname":
        counts.append(1)
    if request.whole:
        counts.append(node.later_mask.bit_count() // request.count)
    elif request.count:
        amount = node.share_of(request)
        counts.append(sum(max(0, later) // amount for later in node.dev_later) // request.count if amount else 0)
    if request.cpu_milli:
        counts.append(node.cpu_later // request.cpu_milli)
    if request.memory_bytes:
        counts.append(node.memory_later // request.memory_bytes)
    counts += [migplan.count(node, p) // count for p, count in request.mig if count]
    return max(0, min(counts))


def _suits(request: Request, node: Node) -> bool:
    """Whether the node is one that the request allows, with devices of the kind that it asks for."""
    if request.nodes is not None and node.name not in request.nodes:
        return False
    return not (request.count or request.mig or request.legacy_mig) or right_kind(node, request)


def _could_run(request: Request, node: Node) -> bool:
    """Whether the node takes ranks, and would have room for one like this if it were empty."""
    spec = node.spec
    enough = node.gpus >= request.count and spec.cpu_milli >= request.cpu_milli and spec.memory_bytes >= request.memory_bytes
    return node.pods_later > 0 and enough and _suits(request, node)


def _free(nodes: list[Node], mig: bool = False) -> Vector:
    """Return what is free in all; for MIG, where an instance counts by its compute slices, as many of these as devices could have."""
    gpus = sum(max(0, n.later_milli) + sum(GPU * mig_gpus(p) * max(0, c) for p, c in n.mig_later.items()) for n in nodes)
    if mig:
        gpus += COMPUTE_SLICES * GPU * sum(n.later_mask.bit_count() + len(n.slots_later) for n in nodes if n.spec.mig_layout is not None)
    return (gpus, sum(max(0, n.cpu_later) for n in nodes), sum(max(0, n.memory_later) for n in nodes))


def _ratio(ranks: list[Rank], nodes: list[Node], world: World) -> float:
    need, free = charge_of(ranks, world.largest_device_mib), _free(nodes, any(r.request.mig for r in ranks))
    return max((need[r] / free[r] for r in range(3) if need[r] and free[r]), default=0.0)
