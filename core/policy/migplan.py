"""Where on the GPUs of a node MIG instances go: which GPU is partitioned, and at which memory slice each instance starts.

A GPU that is idle may be partitioned, one that has instances takes more where slices are left, and when the last instance has gone it is an
idle GPU again. So nothing but what ranks ask for decides how GPUs are partitioned, and no GPU in use is ever touched.

Of all places where an instance fits, GPUs that are partitioned already come before untouched ones, and among these the place that costs the
least of what could still be put beside it: the sum of the sizes of all (profile, start) that fitted before and do not fit afterwards. The first
1g goes to slice 6, for example, where no 4g could be anyway, and the first 3g to slice 4, so that a 4g still fits. Equal places: the GPU
with less room, then the lower start, then the lower index.

Instances of one profile never stand in each other's way (its starts are a multiple of its size apart), so taking the best place for one after
another finds room for as many as there is room for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from gangline.core.model.gpufacts import COMPUTE_SLICES, MigLayout, MigProfile
from gangline.core.policy.linkaffinity import nearest_devices
from gangline.core.policy.nodes import Node, Place, Slot
from gangline.core.policy.requests import Request

#: (start, profile) of the instances on one device, sorted
Taken = tuple[tuple[int, str], ...]


@lru_cache(maxsize=1 << 16)
def free_starts(layout: MigLayout, taken: Taken, profile: str) -> tuple[int, ...]:
    """Return where one more instance of a profile can start beside those that are there; nothing for a profile that the layout lacks."""
    wanted = layout.profile(profile)
    if wanted is None:
        return ()
    there = _known(layout, taken)
    if sum(p.compute for _, p in there) + wanted.compute > COMPUTE_SLICES or sum(1 for _, name in taken if name == profile) >= wanted.most:
        return ()
    return tuple(s for s in wanted.starts if all(s >= at + p.size or at >= s + wanted.size for at, p in there))


@lru_cache(maxsize=1 << 16)
def best_start(layout: MigLayout, taken: Taken, profile: str) -> tuple[int, int] | None:
    """Return (what the best start costs, the start), None when there is no room for one more."""
    starts = free_starts(layout, taken, profile)
    room = _room(layout, taken) if starts else 0
    return min(((room - _room(layout, tuple(sorted((*taken, (s, profile))))), s) for s in starts), default=None)


@lru_cache(maxsize=1 << 16)
def most(layout: MigLayout, taken: Taken, profile: str) -> int:
    """Return how many more instances of a profile there is room for on one device."""
    count = 0
    while (best := best_start(layout, taken, profile)) is not None:
        taken = tuple(sorted((*taken, (best[1], profile))))
        count += 1
    return count


@lru_cache(maxsize=1 << 16)
def _room(layout: MigLayout, taken: Taken) -> int:
    return sum(p.size * len(free_starts(layout, taken, p.name)) for p in layout.profiles)


def _known(layout: MigLayout, taken: Taken) -> list[tuple[int, MigProfile]]:
    return [(at, p) for at, name in taken if (p := layout.profile(name)) is not None]


def instances(node: Node, request: Request, now: bool, own: Place | None = None) -> tuple[Slot, ...] | None:
    """Return places for all instances that a rank asks for, free now or later; None if there are not enough. A rank put back keeps its own."""
    layout = node.spec.mig_layout
    if layout is None:
        return None
    if own is not None and own.node is node and own.mig and _fit_again(node, own.mig, now):
        return own.mig
    chosen: list[Slot] = []
    extra: dict[int, list[tuple[int, str]]] = {}
    for profile, count in _largest_first(layout, request):
        for _ in range(count):
            slot = _best(node, layout, profile, now, extra)
            if slot is None:
                return None
            extra.setdefault(slot[0], []).append(slot[1:])
            chosen.append(slot)
    return tuple(sorted(chosen))


def _largest_first(layout: MigLayout, request: Request) -> list[tuple[str, int]]:
    sizes = {p.name: p.size for p in layout.profiles}
    return sorted(request.mig, key=lambda m: (-sizes.get(m[0], 0), m[0]))


def _best(node: Node, layout: MigLayout, profile: str, now: bool, extra: dict[int, list[tuple[int, str]]]) -> Slot | None:
    best: tuple[tuple[int, int, int, int], Slot] | None = None
    for device in dict.fromkeys((*node.slots_later, *extra)):
        if now and not _ready(node, device) and device not in extra:
            continue
        taken = _taken(node, device, now, extra.get(device, ()))
        found = best_start(layout, taken, profile)
        if found is not None:
            key = (found[0], _room(layout, taken), found[1], device)
            if best is None or key < best[0]:
                best = (key, (device, found[1], profile))
    if best is not None:
        return best[1]
    device = _untouched(node, now, extra)
    found = best_start(layout, (), profile) if device >= 0 else None
    return (device, found[1], profile) if found is not None else None


def _ready(node: Node, device: int) -> bool:
    """Whether a device that will carry instances can carry one now: nothing but instances is on it."""
    return node.dev_idle[device] == node.full or device in node.slots_idle


def _untouched(node: Node, now: bool, extra: Iterable[int]) -> int:
    """Return a device to partition, -1 if there is none: like whole ones, one that is leaving before one that is idle."""
    mask = node.now_mask if now else node.later_mask & ~node.now_mask or node.later_mask
    for device in extra:
        mask &= ~(1 << device)
    if not mask and not now:
        mask = node.later_mask
        for device in extra:
            mask &= ~(1 << device)
    return nearest_devices(mask, 1, node.spec.links)[0] if mask else -1


def _taken(node: Node, device: int, now: bool, extra: Iterable[tuple[int, str]] = ()) -> Taken:
    later = node.slots_later.get(device, [])
    if not now:
        return tuple(sorted((*later, *extra)))
    # What is leaving is in the way as well, and what stays is in both.
    return tuple(sorted({*later, *node.slots_idle.get(device, []), *extra}))


def _fit_again(node: Node, slots: tuple[Slot, ...], now: bool) -> bool:
    layout = node.spec.mig_layout
    extra: dict[int, list[tuple[int, str]]] = {}
    for device, start, profile in slots:
        partitioned = device in node.slots_later or device in extra
        if not partitioned and not (node.now_mask if now else node.later_mask) >> device & 1:
            return False
        taken = _taken(node, device, now, extra.get(device, ()))
        if layout is None or start not in free_starts(layout, taken, profile):
            return False
        extra.setdefault(device, []).append((start, profile))
    return True


def fits_now(place: Place) -> bool:
    """Whether all instances of a place can be had now."""
    return _fit_again(place.node, place.mig, now=True)


def cost(place: Place) -> tuple[int, int]:
    """Return how many untouched devices a place would partition, and what its instances cost on those that have some already."""
    node, total = place.node, 0
    extra: dict[int, list[tuple[int, str]]] = {}
    layout = node.spec.mig_layout
    for device, start, profile in place.mig:
        if layout is not None and device in node.slots_later:
            before = _taken(node, device, False, extra.get(device, ()))
            extra.setdefault(device, []).append((start, profile))
            total += _room(layout, before) - _room(layout, _taken(node, device, False, extra[device]))
    return len({s[0] for s in place.mig if s[0] not in node.slots_later}), total


def has_room(node: Node) -> bool:
    """Whether some device that is partitioned has room for one more instance of some profile, when what is leaving has left."""
    layout = node.spec.mig_layout
    return layout is not None and any(_room(layout, tuple(sorted(some))) for some in node.slots_later.values())


def count(node: Node, profile: str) -> int:
    """Return how many instances of a profile there is room for on a node, when what is leaving has left."""
    layout = node.spec.mig_layout
    if layout is None:
        return max(0, node.mig_later.get(profile, 0))
    partitioned = sum(most(layout, tuple(sorted(some)), profile) for some in node.slots_later.values())
    return partitioned + node.later_mask.bit_count() * most(layout, (), profile)
