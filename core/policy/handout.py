"""Which of the devices that the units of a role got on one node each of its ranks gets.

The ranks of a node are neighbours, so their devices should be too: ranks ascend through the devices in the order of their links, coarsest group
first (linkaffinity.py), then by index. Where that would give some rank devices of more groups than the unit's own devices do, every unit keeps
what was chosen for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.core.model.gpushares import GpuShare, MigSlice
from gangline.core.model.roles import Leaf
from gangline.core.policy.linkaffinity import Path
from gangline.core.policy.nodes import Node, Place

#: GPUs by index on the node, and what of them
Given = tuple[tuple[int, ...], GpuShare | None]


def placed_devices(leaf: Leaf, places: Sequence[Place], gpus: Sequence[int]) -> list[Given]:
    """Return the devices of each rank of a leaf on one node. `gpus` are the indices of the node's devices by their positions in the world."""
    res, count = leaf.resources, leaf.unit * len(places)
    if res.mig:
        return _instances(places, gpus, res.mig_count)
    if res.shares_gpu:
        shares = sorted((device, place.milli) for place in places for device in place.devices)
        return [((gpus[device],), GpuShare(milli, res.gpu_memory_mib)) for device, milli in shares]
    if not res.gpus:
        return [((), None)] * count
    links = places[0].node.spec.links
    return [(tuple(sorted(gpus[d] for d in devices)), None) for devices in _sets(places, res.gpus, links)]


def _sets(places: Sequence[Place], each: int, links: Sequence[Path]) -> list[tuple[int, ...]]:
    def near(device: int) -> tuple[Path, int]:
        return (links[device] if links else (), device)

    def cut(devices: list[int]) -> list[tuple[int, ...]]:
        return [tuple(devices[at : at + each]) for at in range(0, len(devices), each)]

    through = cut(sorted((d for p in places for d in p.devices), key=near))
    if not links:
        return through
    kept = [some for p in sorted(places, key=lambda p: min(map(near, p.devices))) for some in cut(sorted(p.devices, key=near))]
    return through if _spread(through, links) <= _spread(kept, links) else kept


def _spread(sets: list[tuple[int, ...]], links: Sequence[Path]) -> tuple[int, ...]:
    """Return how many groups the sets touch, for each level from the coarsest."""
    levels = len(links[0])
    return tuple(sum(len({links[d][: level + 1] for d in some}) for some in sets) for level in range(levels))


def _instances(places: Sequence[Place], gpus: Sequence[int], each: int) -> list[Given]:
    slices = [_slice(place.node, gpus, *slot) for place in places for slot in place.mig]
    slices.sort(key=lambda one: (one.gpu, one.start))
    some = [tuple(slices[at : at + each]) for at in range(0, len(slices), each)]
    return [(tuple(dict.fromkeys(one.gpu for one in mine)), GpuShare(0, 0, mine)) for mine in some]


def _slice(node: Node, gpus: Sequence[int], device: int, start: int, name: str) -> MigSlice:
    layout = node.spec.mig_layout
    profile = layout.profile(name) if layout is not None else None
    assert profile is not None, f"{node.name} gave an instance of {name}, which it does not know"
    return MigSlice(gpus[device], start, profile.size, name)
