"""Which node is best for one rank.

Among the nodes where it fits, the first difference decides: a device already carries a share and can take this one; the rank fits now, without
waiting; it is bound to NUMA zones there, and to fewer of them; it needs no device and the node has none; the node is the fullest (`binpack`:
least unallocated, what is leaving counted as unallocated) or the emptiest (`spread`); the name. Preferred topology domains come before all of
these: they are the *tiers* that the caller tries in turn (topology.py).

Where the world has a measure of fragmentation (fragmentation.py), the node that loses least in worth comes first instead, of those where the
rank fits now, then of the others. Ranks for which that cannot be kept in an index are placed as above.

Without one, a rank that wants a share rather waits for a device that is shared already than takes an untouched one elsewhere.

MIG instances on nodes that partition their devices as they are asked: where it fits now comes first, then where the fewest untouched devices are
partitioned for it, then where its instances cost the least of what could be put beside them (migplan.py), then the fullest node.
"""

from __future__ import annotations

from collections.abc import Iterator

from gangline.core.policy import devices, migplan
from gangline.core.policy.fragmentindex import keeps
from gangline.core.policy.gangs import Rank
from gangline.core.policy.models import closed_models
from gangline.core.policy.nodeindex import NodeIndex
from gangline.core.policy.nodes import Node, Place
from gangline.core.policy.predicates import fit, must_wait
from gangline.core.policy.requests import Request
from gangline.core.policy.world import World


def best_place(world: World, rank: Rank, index: NodeIndex, own: Place | None = None) -> tuple[Place, bool] | None:
    """Return the best place for the rank among the nodes of the index, and whether it must wait for it; None if it fits nowhere."""
    request, options = rank.request, world.options
    if world.measure is not None and own is None and keeps(request) and not rank.job.queue.models:
        ranked = index.by_worth(world.measure)
        if ranked.usable:
            for now in (True, False):
                place = ranked.best(request, now)
                if place is not None:
                    return place, not now or (request.shared and must_wait(place, request))
            return None
    if by_index(world, request):
        return _by_index(world, rank, index, own)
    if request.shared and options.prefer_ready and options.prefer_shared and options.gpu_nodes == "binpack" and request.nodes is None:
        shared = _by_score(world, rank, index.sharing(), own)
        if shared is not None and _joins(shared[0]):
            return shared
        untouched = 1 if request.stacked else request.count
        for now in (True, False):
            for node in index.fullest(untouched, now):
                place = fit(world, rank, node, now=now, own=own)
                if place is not None:
                    return place, not now or must_wait(place, request)
        return shared
    if request.mig and world.partitions and not world.has_mig:
        return _best_instances(world, rank, index, own)
    return _by_score(world, rank, index.nodes, own)


def by_index(world: World, request: Request) -> bool:
    """Whether the best node for such a rank is simply the fullest one where it fits."""
    options = world.options
    if world.measure is not None:
        return False
    return request.plain and options.prefer_ready and (options.gpu_nodes if request.count else options.cpu_nodes) == "binpack"


def _best_instances(world: World, rank: Rank, index: NodeIndex, own: Place | None) -> tuple[Place, bool] | None:
    best: tuple[tuple[int, int, int, int, int], Place] | None = None
    for node in index.partitioned():
        place = fit(world, rank, node, now=True, own=own)
        waits = place is None
        place = place or fit(world, rank, node, now=False, own=own)
        if place is not None:
            key = (int(waits), *migplan.cost(place), node.later_milli, node.index)
            if best is None or key < best[0]:
                best = (key, place)
    if best is not None and best[0][:2] == (0, 0):
        return best[1], False
    for now in (True, False):
        if not now and best is not None:
            break
        for node in index.fullest(1, now):
            place = fit(world, rank, node, now=now, own=own)
            if place is not None:
                return place, not now
    return (best[1], best[0][0] == 1) if best is not None else None


def _by_index(world: World, rank: Rank, index: NodeIndex, own: Place | None) -> tuple[Place, bool] | None:
    for now in (True, False):
        for node in candidates(rank, index, now):
            place = fit(world, rank, node, now, own)
            if place is not None:
                return place, not now
    return None


def candidates(rank: Rank, index: NodeIndex, now: bool) -> Iterator[Node]:
    """Return the nodes that have the devices, or the CPU, that a rank with a plain request asks for, the best one first."""
    request = rank.request
    if not request.count:
        return index.least_cpu(request.cpu_milli)
    return index.fullest(request.count, now, closed_models(rank.job, request.count * request.milli) if rank.job.queue.models else ())


def _by_score(world: World, rank: Rank, nodes: list[Node], own: Place | None) -> tuple[Place, bool] | None:
    best: tuple[tuple[float, ...], Place, bool] | None = None
    for node in nodes:
        later = fit(world, rank, node, now=False, own=own)
        if later is None:
            continue
        ready = fit(world, rank, node, now=True, own=own)
        place = ready or later
        if ready is not None and rank.request.shared:
            # the order of devices decides, even if the first of them has to be waited for
            place = later
        score = _score(world, rank, node, ready is not None, later)
        if best is None or score < best[0]:
            waits = ready is None or (rank.request.shared and must_wait(place, rank.request))
            best = (score, place, waits)
    return None if best is None else best[1:]


def _score(world: World, rank: Rank, node: Node, ready: bool, place: Place) -> tuple[float, ...]:
    options, request = world.options, rank.request
    shared = request.shared and options.prefer_shared and devices.shared_fits(node, request)
    with_devices = bool(request.count or request.mig)
    return (
        0 if shared else 1,
        0 if ready and options.prefer_ready else 1,
        -1 / len(place.zones) if place.zones else 0,
        0 if not with_devices and not node.gpus and options.prefer_ready else 1,
        _packing(options.gpu_nodes if with_devices else options.cpu_nodes, node, with_devices),
        node.index,
    )


def _packing(strategy: str, node: Node, with_devices: bool) -> float:
    idle, total = (node.later_milli, node.gpus * 1000) if with_devices else (node.cpu_later, node.spec.cpu_milli)
    if strategy == "binpack":
        return idle
    if strategy == "spread":
        return -idle / total if total else 0.0
    return 0.0


def _joins(place: Place) -> bool:
    return any(d in place.node.sharing for d in place.devices)
