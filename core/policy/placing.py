"""Placing one chunk of a job: all of its ranks, or none.

The tree of subgroups is walked from the root. Each constraint on the way narrows the nodes to one domain of a topology, inside the domain that
was chosen above; its candidates are tried in order, and what was placed in one that turns out too small is rolled back. Ranks are placed one
by one on the best node (scoring.py): bound if they fit now, given a reservation if they fit later, or always the latter (`reserve_only`), as
the evicting passes do.
"""

from __future__ import annotations

from gangline.core.policy import refusals, topology
from gangline.core.policy.gangs import ACTIVE, Constraint, Job, Member, Podset, Rank, RankState
from gangline.core.policy.nodeindex import NodeIndex
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.scoring import best_place
from gangline.core.policy.topology import Tiers
from gangline.core.policy.world import World


class Placer:
    """Places chunks on the nodes of one world. It keeps the index of all nodes, and the reason why the last chunk failed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._index: NodeIndex | None = None
        self.refusal: Refusal | None = None

    @property
    def index(self) -> NodeIndex:
        """Return the index of all nodes."""
        if self._index is None or self._index.version != self._world.node_version:
            self._index = NodeIndex(self._world, self._world.nodes)
        return self._index

    def begin(self) -> None:
        """Begin a session: what changed since the last one is sorted in."""
        self.index.forget_touched()

    def place(self, job: Job, chunk: list[Rank], reserve_only: bool) -> bool:
        """Place all ranks of the chunk, or leave the world as it is and set `refusal`."""
        self.refusal = None
        wanted = dict.fromkeys(chunk)
        mark = self._world.checkpoint()
        outer = job.constraint
        if outer is not None and job.root.constraint is not None and outer.key() == job.root.constraint.key():
            outer = None
        if self._scope(outer, job.root, job, wanted, [self.index], reserve_only):
            return True
        self._world.rollback(mark)
        return False

    def _scope(
        self, constraint: Constraint | None, member: Member, job: Job, wanted: dict[Rank, None], tiers: Tiers, reserve_only: bool, own: bool = True
    ) -> bool:
        """Place what the member has of the chunk under a constraint; with `own`, under the member's own one inside it as well."""
        ranks = [r for r in member.all_ranks() if r in wanted]
        if not ranks:
            return True
        if constraint is None:
            return self._inside(member, job, wanted, ranks, tiers, reserve_only, own)
        running = [r for r in member.all_ranks() if r.counts and r not in wanted]
        found = topology.search(self._world, constraint, ranks, running, tiers)
        self.refusal = found.refusal or self.refusal
        for candidate in found.candidates:
            mark = self._world.checkpoint()
            if self._inside(member, job, wanted, ranks, candidate, reserve_only, own):
                self.refusal = None
                return True
            self._world.rollback(mark)
        return False

    def _inside(
        self, member: Member, job: Job, wanted: dict[Rank, None], ranks: list[Rank], tiers: Tiers, reserve_only: bool, own: bool
    ) -> bool:
        if own and member.constraint is not None:
            return self._scope(member.constraint, member, job, wanted, tiers, reserve_only, own=False)
        if isinstance(member, Podset):
            return all(self._rank(rank, ranks, tiers, reserve_only) for rank in ranks)
        return all(self._scope(None, m, job, wanted, tiers, reserve_only) for m in member.ordered())

    def _rank(self, rank: Rank, ranks: list[Rank], tiers: Tiers, reserve_only: bool) -> bool:
        evicted = rank.state is RankState.EVICTED
        for index in tiers:
            found = best_place(self._world, rank, index, rank.place if evicted else None)
            if found is None:
                continue
            place, waits = found
            if evicted and rank.place is not None and place.node is rank.place.node and place.devices == rank.place.devices:
                self._world.spare(rank)
            elif waits or reserve_only:
                self._world.reserve(rank, place)
            else:
                self._world.bind(rank, place)
            return True
        nodes = [n for index in tiers for n in index.nodes]
        self.refusal = self.refusal or refusals.does_not_fit(self._world, rank, ranks, nodes)
        return False


def wait_together(world: World, job: Job, chunk: list[Rank], mark: int) -> None:
    """Turn what the chunk bound since `mark` into reservations, if one of its podsets would start with less than its minimum.

    A gang whose ranks partly wait for something to leave does not start the others.
    """
    for podset in job.podsets:
        if not any(r.reservation for r in podset.ranks):
            continue
        if sum(1 for r in podset.ranks if r.state in ACTIVE) < podset.min_ranks:
            break
    else:
        return
    places = [(r, r.reservation or r.place) for r in world.changes(mark)]
    world.rollback(mark)
    for rank, place in places:
        assert place is not None and rank in chunk
        world.reserve(rank, place)
