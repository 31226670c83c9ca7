"""The search that all evicting passes share: whom to evict so that one waiting job can have its next chunk.

Victims are offered in their order (order.py), one slice after another: a surplus rank of an elastic job, or a whole gang. A set of them is
judged by *simulation*: all are evicted; then the preemptor and the jobs of the victims are walked in normal job order, and each gets a
reservation where it fits. So

- a victim that fits again where it was is simply not evicted,
- one that fits elsewhere is moved: evicted, with a reservation,
- the rest is lost,
- a reservation that was made earlier in the session can be a victim as well: it is withdrawn,
- and a victim that outranks the preemptor gets its place first, so that the search may fail.

The preemptor must get all of its chunk and pass the gates with the victims gone, at least one victim must be evicted, and the pass must agree
with what would be lost (`Validate`). Victims on one node are tried before sets spread over several: each new slice is tried with those
offered before it on the same node. A gang that needs several nodes is solved for its first rank, then for more, each time on top of the victims
found so far. Of a gang that is given up whole, all surplus goes as well, wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gangline.core.policy.gangs import Job, Rank, RankState, charge_of, next_chunk, put_back
from gangline.core.policy.gates import closed
from gangline.core.policy.nodes import Node
from gangline.core.policy.order import JobOrder, Slice
from gangline.core.policy.placing import Placer
from gangline.core.policy.requests import Vector
from gangline.core.policy.scoring import best_place
from gangline.core.policy.world import World

#: what would be lost, (job, vector) in victim order, and what the preemptor asks for → whether the pass agrees
Validate = Callable[[list[tuple[Job, Vector]], Vector], bool]

_GIVEN_UP = (RankState.EVICTED, RankState.WITHDRAWN)


class VictimSearch:
    """Looks for victims for one waiting job. `offered` gives the slices in victim order."""

    def __init__(self, world: World, placer: Placer, job: Job, offered: Iterator[Slice], validate: Validate) -> None:
        self._world = world
        self._placer = placer
        self._job = job
        self._offered = offered
        self._validate = validate
        self._slices: list[Slice] = []
        self._budget = world.options.simulations
        self._size = 0
        #: a lone rank of the part in question fits somewhere already, so that any eviction might open a gate
        self._fits = False

    def run(self, chunk: list[Rank]) -> bool:
        """Find victims for the whole chunk. On success the world has them evicted and all reservations made; else it is unchanged."""
        recorded: list[Slice] = []
        self._size = len(chunk)
        size, step = 0, 1
        while size < len(chunk):
            step = min(step, len(chunk) - size)
            mark = self._world.checkpoint()
            found = self._solve(chunk[: size + step], recorded)
            if found is None:
                if step == 1:
                    return False
                step = 1
                continue
            size += step
            step = max(1, size // 8)
            if size < len(chunk):
                self._world.rollback(mark)
                recorded = found
        return True

    def _solve(self, part: list[Rank], recorded: list[Slice]) -> list[Slice] | None:
        whole = len(part) == self._size
        if (recorded or not whole) and self._simulate(part, recorded):
            return self._used(recorded)
        self._fits = best_place(self._world, part[0], self._placer.index) is not None
        used = {id(s) for s in recorded}
        on_node: dict[Node, list[Slice]] = {}
        before: list[Slice] = []
        for step in self._all_slices():
            if id(step) in used:
                continue
            before.append(step)
            for node in dict.fromkeys(_where(r) for r in step.ranks):
                on_node.setdefault(node, []).append(step)
                chosen = _whole_gangs(on_node[node], before)
                if self._hopeless(node, chosen, part, recorded):
                    continue
                if self._simulate(part, [*recorded, *chosen]):
                    return self._used([*recorded, *chosen])
        return self._spread(part, recorded, before) if len(on_node) > 1 else None

    def _spread(self, part: list[Rank], recorded: list[Slice], slices: list[Slice]) -> list[Slice] | None:
        """Sets over several nodes: more and more of the slices, in order."""
        for end in range(2, len(slices) + 1):
            if self._budget <= 0:
                return None
            chosen = [*recorded, *slices[:end]]
            if self._simulate(part, chosen):
                return self._used(chosen)
        return None

    def _all_slices(self) -> Iterator[Slice]:
        yield from self._slices
        for step in self._offered:
            self._slices.append(step)
            yield step

    def _hopeless(self, node: Node, chosen: list[Slice], part: list[Rank], recorded: list[Slice]) -> bool:
        """Whether a lone rank that wants whole devices cannot fit on the node even with the victims there gone, nor elsewhere."""
        request = part[0].request
        if len(part) > 1 or recorded or self._fits or not request.whole:
            return False
        freed = 0
        for step in chosen:
            for rank in step.ranks:
                place = rank.reservation or rank.place
                if place is not None and place.node is node:
                    freed += len(place.devices)
        return node.later_mask.bit_count() + freed < request.count

    def _used(self, slices: list[Slice]) -> list[Slice]:
        return [s for s in slices if any(r.state in _GIVEN_UP for r in s.ranks)]

    def _simulate(self, part: list[Rank], slices: list[Slice]) -> bool:
        self._budget -= 1
        if self._budget < 0:
            return False
        world = self._world
        mark = world.checkpoint()
        for step in slices:
            for rank in step.ranks:
                if rank.counts:
                    world.give_up(rank)
        vector = charge_of(part, world.smallest_device_mib)
        if self._walk(part, vector, slices) and self._agrees(slices, vector, len(part) < self._size):
            return True
        world.rollback(mark)
        return False

    def _walk(self, part: list[Rank], vector: Vector, slices: list[Slice]) -> bool:
        """Walk preemptor and victims in job order; whether the preemptor got its part."""
        order = JobOrder(self._world)
        order.push(self._job, vector)
        for job in dict.fromkeys(s.job for s in slices):
            self._push_victim(order, job)
        placed = False
        while (popped := order.pop()) is not None:
            job = popped[0]
            chunk = part if job is self._job else next_chunk(job, put_back)
            done = closed(self._world, job, chunk) is None and self._placer.place(job, chunk, reserve_only=True)
            if job is self._job:
                if not done:
                    return False
                placed = True
            elif done:
                self._push_victim(order, job)
        return placed

    def _push_victim(self, order: JobOrder, job: Job) -> None:
        chunk = next_chunk(job, put_back)
        if chunk:
            order.push(job, charge_of(chunk, self._world.smallest_device_mib))

    def _agrees(self, slices: list[Slice], vector: Vector, partial: bool) -> bool:
        """Whether the pass agrees with what is lost, and somebody is evicted; a part of the chunk may fit without that."""
        lost: list[tuple[Job, Vector]] = []
        evicted = partial
        for step in slices:
            g = c = m = 0
            for rank, charged in zip(step.ranks, step.vectors, strict=True):
                evicted = evicted or rank.state in _GIVEN_UP
                if put_back(rank):
                    g, c, m = g + charged[0], c + charged[1], m + charged[2]
            if g or c or m:
                lost.append((step.job, (g, c, m)))
        return evicted and self._validate(lost, vector)


def _where(rank: Rank) -> Node:
    place = rank.reservation or rank.place
    assert place is not None, f"{rank.name} is given up and has no place"
    return place.node


def _whole_gangs(chosen: list[Slice], before: list[Slice]) -> list[Slice]:
    """Return the slices, with all earlier ones of the jobs that are given up whole."""
    whole = {id(s.job) for s in chosen if s.last}
    picked = {id(s) for s in chosen}
    return [s for s in before if id(s) in picked or id(s.job) in whole]
