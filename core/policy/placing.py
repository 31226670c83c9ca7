"""Placing one chunk of a job: all of its ranks, or none.

The tree of subgroups is walked from the root. Each constraint on the way narrows the nodes to one domain of a topology, inside the domain that
was chosen above; its candidates are tried in order, and what was placed in one that turns out too small is rolled back. Ranks are placed one
by one on the best node (scoring.py): bound if they fit now, given a reservation if they fit later, or always the latter (`reserve_only`), as
the evicting passes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from gangline.core.policy import refusals, topology
from gangline.core.policy.even import Evenly
from gangline.core.policy.gangs import ACTIVE, Constraint, Job, Member, Podset, PodsetGroup, Rank, RankState, charge_of, waiting
from gangline.core.policy.models import left_of
from gangline.core.policy.nodeindex import NodeIndex
from gangline.core.policy.nodes import Place
from gangline.core.policy.predicates import fit, fit_alike
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.scoring import best_place, by_index, candidates
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
        """Place all ranks of the chunk, or leave the world as it is and, unless only reservations are wanted, set `refusal`."""
        self.refusal = None
        task = _Task(dict.fromkeys(chunk), reserve_only)
        mark = self._world.checkpoint()
        outer = job.constraint
        if outer is not None and job.root.constraint is not None and outer.key() == job.root.constraint.key():
            outer = None
        tiers = [self.index]
        if self._too_many(job, chunk):
            if not reserve_only:
                self.refusal = refusals.none_fit(self._world, job, chunk[0].request, charge_of(chunk, self._world.smallest_device_mib))
            return False
        if self._confined(outer, job.root, task, tiers, self._member) if outer is not None else self._member(job.root, task, tiers):
            return True
        self._world.rollback(mark)
        return False

    def _too_many(self, job: Job, chunk: list[Rank]) -> bool:
        """Whether it takes no more than counting free devices to see that the chunk does not fit."""
        request = job.uniform
        if len(chunk) < 2 or request is None or job.single is None or not job.plain or not (request.plain and request.count):
            return False
        return self.index.room_for(request.count) < len(chunk)

    def _member(self, member: Member, task: _Task, tiers: Tiers) -> bool:
        """Place what the member has of the chunk, under its own constraint if it has one."""
        if not any(r in task.wanted for r in member.all_ranks()):
            return True
        if member.constraint is None:
            return self._content(member, task, tiers)
        return self._confined(member.constraint, member, task, tiers, self._content)

    def _confined(self, constraint: Constraint, member: Member, task: _Task, tiers: Tiers, place: _Place) -> bool:
        """Place the member in the first domain that holds it."""
        ranks = [r for r in member.all_ranks() if r in task.wanted]
        running = [r for r in member.all_ranks() if r.counts and r not in task.wanted]
        found = topology.search(self._world, constraint, ranks, running, tiers)
        self.refusal = found.refusal or self.refusal
        candidates: Iterable[Tiers] = found.candidates
        ways = [place]
        if constraint.even:
            candidates, evenly = list(candidates), partial(self._evenly, constraint)
            # Equal numbers are a wish, unless their skew is bounded.
            ways = [evenly] if constraint.max_skew else [evenly, place]
        for way in ways:
            for candidate in candidates:
                mark = self._world.checkpoint()
                if way(member, task, candidate):
                    self.refusal = None
                    return True
                self._world.rollback(mark)
        if self.refusal is None and not task.reserve_only:
            self.refusal = refusals.does_not_fit(self._world, ranks[0], ranks, [n for index in tiers for n in index.nodes])
        return False

    def _evenly(self, constraint: Constraint, member: Member, task: _Task, tiers: Tiers) -> bool:
        """Place what the member has of the chunk in equal numbers in the domains of a level; on failure some of it may be placed."""
        while isinstance(member, PodsetGroup) and len(member.members) == 1 and member.members[0].constraint is None:
            member = member.members[0]  # a job of one kind of rank: what it says is of these
        wanted = [r for r in member.all_ranks() if r in task.wanted]
        domains = topology.split_by(self._world, constraint, wanted, tiers)
        where = {node: at for at, scope in enumerate(domains.values()) for index in scope for node in index.nodes}
        scopes = list(domains.values())
        there = [[r for r in unit.all_ranks() if r.counts and r not in task.wanted] for unit in _units(member)]
        have = [0] * len(scopes)
        for ranks in there:
            place = (ranks[0].reservation or ranks[0].place) if ranks else None
            if place is not None and place.node in where:
                have[where[place.node]] += 1

        def attempt(unit: _Unit, at: int) -> bool:
            mark = self._world.checkpoint()
            found = self._rank(unit, wanted, task, scopes[at]) if isinstance(unit, Rank) else self._member(unit, task, scopes[at])
            if not found:
                self._world.rollback(mark)
            return found

        units = [unit for unit in _units(member) if any(r in task.wanted for r in unit.all_ranks())]
        evenly = Evenly(constraint, have, attempt)
        mark = self._world.checkpoint()
        if constraint.spread:
            done = evenly.spread(units)
        else:
            rooms = [topology.room_in(wanted, s) for s in scopes] if isinstance(member, Podset) else self._rooms(units, len(scopes), attempt)
            done = evenly.balanced(units, rooms, lambda: self._world.rollback(mark))
        self.refusal = evenly.refusal or self.refusal
        return done

    def _rooms(self, units: list[_Unit], domains: int, attempt: Callable[[_Unit, int], bool]) -> list[int]:
        """Return for how many of the units each domain has room, by trying."""
        rooms = []
        for at in range(domains):
            mark = self._world.checkpoint()
            rooms.append(next((n for n, unit in enumerate(units) if not attempt(unit, at)), len(units)))
            self._world.rollback(mark)
        return rooms

    def _content(self, member: Member, task: _Task, tiers: Tiers) -> bool:
        if isinstance(member, Podset):
            ranks = [r for r in member.ranks if r in task.wanted]
            if len(ranks) > 1 and by_index(self._world, ranks[0].request) and all(r.request is ranks[0].request and waiting(r) for r in ranks):
                return self._alike(ranks, task, tiers)
            return all(self._rank(rank, ranks, task, tiers) for rank in ranks)
        return all(self._member(m, task, tiers) for m in member.ordered())

    def _rank(self, rank: Rank, ranks: list[Rank], task: _Task, tiers: Tiers) -> bool:
        evicted = rank.state is RankState.EVICTED
        for index in tiers:
            found = best_place(self._world, rank, index, rank.place if evicted else None)
            if found is None:
                continue
            place, waits = found
            if evicted and self._stays(rank, place):
                self._world.spare(rank)
            elif waits or task.reserve_only:
                self._world.reserve(rank, place)
            else:
                self._world.bind(rank, place)
            return True
        return self._refuse(rank, ranks, task, tiers)

    def _refuse(self, rank: Rank, ranks: list[Rank], task: _Task, tiers: Tiers) -> bool:
        """Note why a rank of a podset has no place, if it is the first and somebody asks."""
        if self.refusal is None and not task.reserve_only:
            if tiers == [self.index]:
                self.refusal = refusals.does_not_fit(self._world, rank, list(task.wanted), self._world.nodes)
            else:  # ranks of other podsets may have found their places elsewhere
                self.refusal = refusals.does_not_fit(self._world, rank, ranks, [n for index in tiers for n in index.nodes])
        return False

    def _alike(self, ranks: list[Rank], task: _Task, tiers: Tiers) -> bool:
        """Place ranks that ask for the same, node by node.

        The best node for the first is the fullest that has room. With the rank on it, it is fuller still, so it is the best for the next rank as
        well, until it has no room; and nodes that had none get none. So each node is looked at once, and filled.
        """
        at = 0
        for index in tiers:
            for now in (True, False):
                at = self._fill(ranks, at, index, now, task.reserve_only or not now)
                if at == len(ranks):
                    return True
        return self._refuse(ranks[at], ranks, task, tiers)

    def _fill(self, ranks: list[Rank], at: int, index: NodeIndex, now: bool, wait: bool) -> int:
        """Place ranks from position `at` on, as long as there is room; return the position of the first that has no place."""
        request, job = ranks[at].request, ranks[at].job
        for node in candidates(ranks[at], index, now):
            most = len(ranks) - at
            if job.queue.models and request.count:
                most = min(most, left_of(job.queue, node.model, job.preemptible) // (request.count * request.milli))
            some = fit_alike(request, most, node, now, not wait) if most > 0 else []
            if some:
                self._world.place_alike(ranks[at : at + len(some)], node, some, wait)
                at += len(some)
            while not some and at < len(ranks) and (place := fit(self._world, ranks[at], node, now)) is not None:
                (self._world.reserve if wait else self._world.bind)(ranks[at], place)
                at += 1
            if at == len(ranks):
                break
        return at

    def _stays(self, rank: Rank, place: Place) -> bool:
        """Whether an evicted rank can stay where it is, if need be by giving other devices of the node to those who have reserved its own."""
        own = rank.place
        if own is None or place.node is not own.node or place.zones != own.zones or place.mig != own.mig:
            return False
        if place.devices == own.devices:
            return True
        if not rank.request.whole:
            return False
        taken = [d for d in own.devices if not own.node.later_mask >> d & 1]
        instead = [d for d in place.devices if d not in own.devices]
        shifts: list[tuple[Rank, tuple[int, ...]]] = []
        for other in self._world.changes():
            there = other.reservation
            if there is None or there.node is not own.node or not other.request.whole or not any(d in taken for d in there.devices):
                continue
            swap = {d: instead.pop() for d in there.devices if d in taken}
            taken = [d for d in taken if d not in swap]
            shifts.append((other, tuple(sorted(swap.get(d, d) for d in there.devices))))
        if taken:
            return False
        for other, devices in shifts:
            self._world.shift(other, devices)
        return True


@dataclass(frozen=True)
class _Task:
    """The ranks to place, and whether they are to get reservations only."""

    wanted: dict[Rank, None]
    reserve_only: bool


_Place = Callable[[Member, _Task, Tiers], bool]
#: what is counted in domains: a rank of a podset, or a member of a set
_Unit = Rank | Podset | PodsetGroup


def _units(member: Member) -> list[_Unit]:
    return list(member.ranks) if isinstance(member, Podset) else list(member.members)


def wait_together(world: World, job: Job, mark: int) -> None:
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
        assert place is not None, f"{rank.name} was placed and has no place"
        world.reserve(rank, place)
