"""Which GPUs of a node are near to each other, as groups from the coarsest to the finest: what documents.Gpu.links says. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def groups(numa: Sequence[int], switch: Sequence[int], bridge: Sequence[int]) -> list[tuple[int, ...]]:
    """Return for each GPU the groups that it is in, numbered from 0 in order of first appearance.

    Given are its NUMA node, and for PCIe switches and for direct NVLinks (bridges) the position of the first GPU that it shares them with.
    Bridges are the finest level, unless they go across NUMA nodes: then they are faster than anything inside one, and the coarsest. A level
    that tells nothing is left out: one group of all, single GPUs only, or the same groups as the level before.
    """
    across = any(numa[i] != numa[first] for i, first in enumerate(bridge))
    levels = [bridge, numa, switch] if across else [numa, switch, bridge]
    kept: list[list[int]] = []
    for level in levels:
        inside = list(zip(*kept, level, strict=True)) if kept else [(x,) for x in level]
        tells = len(set(inside)) > 1 and len(set(level)) < len(level)
        if tells and (not kept or len(set(inside)) > len(set(zip(*kept, strict=True)))):
            kept.append(_numbered(level))
    return list(zip(*kept, strict=True)) if kept else [() for _ in numa]


def _numbered(level: Sequence[int]) -> list[int]:
    numbers: dict[int, int] = {}
    return [numbers.setdefault(x, len(numbers)) for x in level]
