"""Which of the free GPUs of a node a rank gets, so that its own are near each other and the best sets are left for later.

A node says of each GPU where it hangs, as a path of groups from the coarsest to the finest, such as (NUMA node, PCIe switch): GPUs whose paths
agree further are joined by faster links. Without such facts the lowest indices are taken.

At each level, from the coarsest: if one group has enough free GPUs, the one that has the fewest of those takes them all, so the large sets stay
whole. Else the groups with the most free GPUs are taken whole until one group is enough for the rest. That spreads over as few groups as
possible. Inside each group the same is done with the next level.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

#: the groups of a device from the coarsest to the finest
Path = tuple[int, ...]


def nearest_devices(mask: int, count: int, links: Sequence[Path] = ()) -> tuple[int, ...]:
    """Return `count` of the devices in the mask, ascending; there must be as many. `links` has a path for each device, or is empty."""
    return _nearest(mask, count, tuple(links)) if links else lowest(mask, count)


@lru_cache(maxsize=1 << 12)
def _nearest(mask: int, count: int, links: tuple[Path, ...]) -> tuple[int, ...]:
    devices = [d for d in range(mask.bit_length()) if mask >> d & 1]
    return tuple(sorted(_choose(devices, count, links, 0)))


def lowest(mask: int, count: int) -> tuple[int, ...]:
    """Return the `count` lowest bits that are set."""
    out = []
    for _ in range(count):
        bit = mask & -mask
        out.append(bit.bit_length() - 1)
        mask ^= bit
    return tuple(out)


def _choose(devices: list[int], count: int, links: Sequence[Path], level: int) -> list[int]:
    if count >= len(devices):
        return devices
    groups: dict[Path, list[int]] = {}
    for device in devices:
        groups.setdefault(links[device][level : level + 1], []).append(device)
    if list(groups) == [()]:  # below the finest level
        return devices[:count]
    chosen: list[int] = []
    left = sorted(groups.values(), key=lambda some: (len(some), some))
    while count:
        enough = next((some for some in left if len(some) >= count), None)
        take = enough if enough is not None else max(left, key=len)
        got = _choose(take, min(count, len(take)), links, level + 1)
        chosen += got
        count -= len(got)
        left.remove(take)
    return chosen
