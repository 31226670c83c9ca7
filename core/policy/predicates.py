"""Whether one rank can be on one node, and what it would take there.

`fit` answers for now (the rank could start) or for later (it could have a reservation). The rules about kinds of devices: a node whose MIG mode
is mixed takes MIG ranks and ranks without devices; one whose instances pass for whole devices takes no shares; profiles must match exactly; a
node with a rank of the old MIG kind takes no new MIG rank, and a waiting rank of that kind is never placed. What a memory request is charged
depends on the node's devices, so limits and quotas are looked at once more here; and those by GPU model (models.py).
"""

from __future__ import annotations

from gangline.core.policy import devices, migplan, numa
from gangline.core.policy.gangs import Rank
from gangline.core.policy.linkaffinity import nearest_devices
from gangline.core.policy.models import left_of
from gangline.core.policy.nodes import Node, Place
from gangline.core.policy.requests import GPU, Request, within
from gangline.core.policy.world import World


def fit(world: World, rank: Rank, node: Node, now: bool, own: Place | None = None) -> Place | None:
    """Return the place that the rank would take on the node, None if it does not fit. `own` is where it was evicted from."""
    request = rank.request
    if not room(node, request, now):
        return None
    if request.count or request.mig or request.legacy_mig:
        if not right_kind(node, request):
            return None
        if rank.job.queue.models and not _model_allowed(rank, node):
            return None
    elif request.plain and not node.zones:
        return Place(node)
    if request.nodes is not None and node.name not in request.nodes:
        return None
    if request.memory_mib and not _within_bounds(rank, node, world):
        return None
    if request.affinity is not None and not near_enough(world, rank, node):
        return None
    zones = _zones(node, request, now, own)
    if zones is None:
        return None
    if request.mig and node.spec.mig_layout is not None:
        slots = migplan.instances(node, request, now, own)
        return None if slots is None else Place(node, tuple(dict.fromkeys(s[0] for s in slots)), 0, zones, slots)
    if not request.count:
        return Place(node, (), 0, zones)
    if request.whole:
        chosen = devices.whole(node, request.count, now, own)
        return None if chosen is None else Place(node, chosen, GPU, zones)
    found = devices.shares(node, request, now, world.options.share_devices)
    return None if found is None else Place(node, found[0], request.milli_on(node.spec.gpu_memory_mib), zones)


def fit_alike(request: Request, ranks: int, node: Node, now: bool, bound: bool) -> list[tuple[int, ...]]:
    """Return the devices of each of up to `ranks` ranks with the same plain request that fit on the node beside each other.

    `bound`: they take what is idle, and do not only reserve it. Empty as well where one has to ask `fit` for each of them: on nodes with NUMA
    zones, and for places that are not free now.
    """
    if not now or node.zones or not room(node, request, now) or (request.count and not right_kind(node, request)):
        return []
    most = min(ranks, node.pods_later, node.pods_idle if bound else ranks)
    if cpu := request.cpu_milli:
        most = min(most, node.cpu_later // cpu, node.cpu_idle // cpu if bound else ranks)
    if memory := request.memory_bytes:
        most = min(most, node.memory_later // memory, node.memory_idle // memory if bound else ranks)
    if not request.count:
        return [()] * most
    out: list[tuple[int, ...]] = []
    mask = node.now_mask
    for _ in range(min(most, mask.bit_count() // request.count)):
        chosen = nearest_devices(mask, request.count, node.spec.links)
        for device in chosen:
            mask &= ~(1 << device)
        out.append(chosen)
    return out


def _zones(node: Node, request: Request, now: bool, own: Place | None) -> numa.ZoneUse | None:
    if not node.zones:
        return ()
    if own is not None and own.node is node and numa.have_room(node.zones, own.zones):
        return own.zones
    return numa.zones_for(node.zones, node.spec.numa_policy, request, now)


def must_wait(place: Place, request: Request) -> bool:
    """Whether some of the chosen devices has to be waited for."""
    if place.mig:
        return not migplan.fits_now(place)
    amount = place.node.share_of(request)
    return bool(place.devices) and not all(devices.takes_share(place.node, d, amount, now=True) for d in place.devices)


def room(node: Node, request: Request, now: bool) -> bool:
    """Whether the node has the CPU, memory, place for one more rank, and MIG instances."""
    if node.pods_later < 1 or (now and node.pods_idle < 1):
        return False
    cpu = request.cpu_milli
    if cpu and (node.cpu_later < cpu or (now and node.cpu_idle < cpu)):
        return False
    memory = request.memory_bytes
    if memory and (node.memory_later < memory or (now and node.memory_idle < memory)):
        return False
    for profile, instances in request.mig if node.spec.mig_layout is None else ():
        if node.mig_later.get(profile, 0) < instances or (now and node.mig_idle.get(profile, 0) < instances):
            return False
    return True


def right_kind(node: Node, request: Request) -> bool:
    """Whether the node gives devices of the kind that is asked for."""
    if request.legacy_mig:
        return False
    if request.mig:
        layout = node.spec.mig_layout
        if layout is not None:
            return all(layout.profile(profile) is not None for profile, _ in request.mig)
        return node.mig_only and node.legacy_mig <= 0
    if node.mig_only:
        return False
    return not (request.shared and node.spec.mig is not None)


def near_enough(world: World, rank: Rank, node: Node) -> bool:
    """Whether a rank with the same labels is near where that is wanted, and none where it is not."""
    affinity = rank.request.affinity
    assert affinity is not None
    if affinity.attract and not _others_in(world, rank, node, affinity.attract):
        # the first of those that want to be together has nobody to be near to
        first = _value(node, affinity.attract) is not None and not _others(world, rank)
        if not first:
            return False
    return not (affinity.repel and _others_in(world, rank, node, affinity.repel))


def _others_in(world: World, rank: Rank, node: Node, label: str) -> bool:
    domain = _value(node, label)
    return domain is not None and any(_value(place.node, label) == domain for place in _others(world, rank))


def _others(world: World, rank: Rank) -> list[Place]:
    """Return where the other ranks with the same labels are, or will be."""
    labels = _labels(rank)
    alike = (r for r in world.affine if r is not rank and r.counts and _labels(r) == labels)
    return [place for r in alike if (place := r.reservation or r.place) is not None]


def _labels(rank: Rank) -> tuple[tuple[str, str], ...]:
    return rank.request.affinity.labels if rank.request.affinity is not None else ()


def _value(node: Node, label: str) -> str | None:
    return node.name if label in ("hostname", "kubernetes.io/hostname") else node.spec.labels.get(label)


def _model_allowed(rank: Rank, node: Node) -> bool:
    gpus = rank.request.vector(node.spec.gpu_memory_mib)[0]
    return left_of(rank.job.queue, node.model, rank.job.preemptible) >= gpus


def _within_bounds(rank: Rank, node: Node, world: World) -> bool:
    if not world.options.quotas:
        return True
    g, c, m = rank.request.vector(node.spec.gpu_memory_mib)
    for queue in rank.job.queue.path:
        a, n = queue.allocated, queue.nonpreemptible
        if not within((a[0] + g, a[1] + c, a[2] + m), queue.limit):
            return False
        if not rank.job.preemptible and not within((n[0] + g, n[1] + c, n[2] + m), queue.quota):
            return False
    return True
