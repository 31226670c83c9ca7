"""The sizes that a gang may have, and the placements that it has, will have, or would have without some of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gangline.core.model.events import PlacedPart, PlacedRank
from gangline.core.model.roles import Group, Leaf, Sizes, full, leaf_of_ranks, least, leaves, placed, recorded, tree
from gangline.core.model.spec import JobSpec
from gangline.core.model.state import Job


class Placement(NamedTuple):
    """A gang's nodes and ranks, and the sizes of its roles, as a `gang_placed` has them."""

    parts: tuple[PlacedPart, ...]
    role_sizes: Sizes

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(len(p.ranks) for p in self.parts)


def is_elastic(spec: JobSpec) -> bool:
    """Whether the job may run with several numbers of ranks."""
    if not spec.roles:
        return spec.gang.min_ranks < spec.gang.ranks
    return least(spec) != full(spec)


def present(job: Job) -> Placement:
    """Return where the gang is, or will be if it is resizing."""
    if job.resize is not None:
        return Placement(job.resize.parts, job.resize.role_sizes)
    parts = (PlacedPart(node, tuple(PlacedRank(n, r.gpus, r.share) for n, r in part.ranks.items())) for node, part in job.parts.items())
    return Placement(tuple(parts), job.role_sizes)


def allowed(spec: JobSpec, there: Sizes) -> Sizes:
    """Return the largest sizes that the job may have with no more than these ranks of each leaf; empty if they are too few.

    A leaf grows beyond its minimum in steps, and a group of which too little is there gives up all of it.
    """
    sizes = [0] * len(there)

    def take(member: Group | Leaf) -> bool:
        if isinstance(member, Leaf):
            sizes[member.index] = _within(spec, member, there[member.index])
            return there[member.index] >= member.gang.min_ranks
        enough = sum([take(inner) for inner in member.members]) >= member.needed
        if not enough:
            _empty(member, sizes)
        return enough

    return tuple(sizes) if take(tree(spec)) and any(sizes) else ()


def _within(spec: JobSpec, leaf: Leaf, ranks: int) -> int:
    gang = leaf.gang
    if ranks < gang.min_ranks:
        return 0
    step = (0 if spec.roles else spec.elastic.step) or leaf.unit
    return min(gang.ranks, gang.min_ranks + (ranks - gang.min_ranks) // step * step)


def _empty(member: Group | Leaf, sizes: list[int]) -> None:
    if isinstance(member, Leaf):
        sizes[member.index] = 0
    else:
        for inner in member.members:
            _empty(inner, sizes)


def cut(spec: JobSpec, placement: Placement, keep: Callable[[str, PlacedRank], bool] = lambda node, rank: True) -> Placement | None:
    """Return what of a placement can be kept, at the largest size that the job may have with it, ranks numbered anew.

    `keep` says of a rank on a node whether it can; its unit goes with it. Of each leaf the ranks with the highest numbers go. None: too little
    is left.
    """
    every = leaves(spec)
    leaf_of = leaf_of_ranks(placed(spec, placement.role_sizes, placement.ranks))
    of_leaf: list[list[tuple[str, PlacedRank]]] = [[] for _ in every]
    for part in placement.parts:
        for leaf in every:
            here = [rank for rank in part.ranks if leaf_of[rank.rank] == leaf.index]
            for first in range(0, len(here), leaf.unit):
                unit = here[first : first + leaf.unit]
                if all(keep(part.node, rank) for rank in unit):
                    of_leaf[leaf.index] += [(part.node, rank) for rank in unit]
    sizes = allowed(spec, tuple(len(ranks) for ranks in of_leaf))
    if not sizes:
        return None
    parts: dict[str, list[PlacedRank]] = {}
    number = 0
    for leaf in every:
        for node, rank in sorted(of_leaf[leaf.index], key=lambda r: r[1].rank)[: sizes[leaf.index]]:
            parts.setdefault(node, []).append(PlacedRank(number, rank.gpus, rank.share))
            number += 1
    return Placement(tuple(PlacedPart(node, tuple(ranks)) for node, ranks in parts.items()), recorded(spec, sizes))
