"""The search that all evicting passes share: whom to evict so that one waiting job can have its next chunk.

Victims are offered in their order (order.py), one slice after another: a surplus rank of an elastic job, or a whole gang. A set of them is
judged by *simulation*: all are evicted; then the preemptor and the jobs of the victims are walked in normal job order, and each gets a
reservation where it fits. So

- a victim that fits again where it was is simply not evicted,
- one that fits elsewhere is moved: evicted, with a reservation (in production that is a loss like any, see potential.py),
- the rest is lost,
- a reservation that was made earlier in the session can be a victim as well: it is withdrawn,
- and a victim that outranks the preemptor gets its place first, so that the search may fail.

Where there is room already, and only the limit of a queue is in the way, it does not matter where victims are: they are taken in order until the
limit allows the chunk.

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
from gangline.core.policy.queues import Queue
from gangline.core.policy.requests import Vector
from gangline.core.policy.world import World

#: a slice that would be lost: its job, what the queue is charged for it, and that by GPU model where queues have amounts of these
Lost = tuple[Job, Vector, dict[str, int]]
#: what would be lost, in victim order, and what the preemptor asks for → whether the pass agrees
Validate = Callable[[list[Lost], Vector], bool]

#: ranks of a gang from which on the search goes on in larger steps
_LARGE = 32
#: sets that are tried where only limits are in the way
_MORE = 8

_GIVEN_UP = (RankState.EVICTED, RankState.WITHDRAWN)


class VictimSearch:
    """Looks for victims for one waiting job. `offered` gives the slices in victim order."""

    def __init__(
        self, world: World, placer: Placer, job: Job, offered: Iterator[Slice], validate: Validate, moves_count: bool, anywhere: bool
    ) -> None:
        """`anywhere`: there is room, only limits of queues keep the job from it, so it does not matter where the victims are."""
        self._anywhere = anywhere
        self._world = world
        self._placer = placer
        self._job = job
        self._offered = offered
        self._validate = validate
        self._slices: list[Slice] = []
        self._budget = world.options.simulations
        #: who is moved loses as well, as far as the pass is concerned
        self._moves_count = moves_count
        self._size = 0

    def run(self, chunk: list[Rank]) -> bool:
        """Find victims for the whole chunk. On success the world has them evicted and all reservations made; else it is unchanged."""
        if self._anywhere:
            return self._first_enough(chunk)
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
            # Each step simulates all victims found so far, too: a large gang takes few steps.
            step = max(1, size // 8) if size < _LARGE else size // 2
            if size < len(chunk):
                self._world.rollback(mark)
                recorded = found
        return True

    def _first_enough(self, chunk: list[Rank]) -> bool:
        """Take victims in their order until the limits allow the chunk; a few more when the pass does not agree with these."""
        self._size = len(chunk)
        limits, seen, tries = _Limits(self._world, chunk, []), _Seen(), _MORE
        limits.start()
        for step in self._offered:
            seen.add(step)
            if limits.add(step):
                if self._simulate(chunk, seen.slices):
                    return True
                tries -= 1
                if tries == 0:
                    return False
        return False

    def _solve(self, part: list[Rank], recorded: list[Slice]) -> list[Slice] | None:
        whole = len(part) == self._size
        if (recorded or not whole) and self._simulate(part, recorded):
            return self._used(recorded)
        gain = _Gain(self._world, part, recorded, self._placer)
        used = {id(s) for s in recorded}
        on_node: dict[Node, list[Slice]] = {}
        seen = _Seen()
        for step in self._all_slices():
            if id(step) in used:
                continue
            seen.add(step)
            for node in dict.fromkeys(_where(r) for r in step.ranks):
                on_node.setdefault(node, []).append(step)
                chosen = seen.whole(on_node[node])
                if gain.enough(chosen) and self._simulate(part, [*recorded, *chosen]):
                    return self._used([*recorded, *chosen])
            if self._budget <= 0:
                return None
        return self._spread(part, recorded, seen, gain) if len(on_node) > 1 else None

    def _spread(self, part: list[Rank], recorded: list[Slice], seen: _Seen, gain: _Gain) -> list[Slice] | None:
        """Sets over several nodes: more and more of the slices, in order; first only those on nodes that have room for one rank more then."""
        slices = seen.slices
        gain.start()
        for end in range(1, len(slices) + 1):
            if self._budget <= 0:
                return None
            if not gain.add(slices[end - 1]):
                continue
            useful = seen.whole([s for s in slices[:end] if any(gain.helps(_where(r)) for r in s.ranks)])
            for chosen in [useful, slices[:end]] if len(useful) < end else [useful]:
                if self._simulate(part, [*recorded, *chosen]):
                    return self._used([*recorded, *chosen])
        return None

    def _all_slices(self) -> Iterator[Slice]:
        yield from self._slices
        for step in self._offered:
            self._slices.append(step)
            yield step

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
        lost: list[Lost] = []
        evicted = partial
        for step in slices:
            g = c = m = 0
            models: dict[str, int] = {}
            for rank, charged, model in zip(step.ranks, step.vectors, step.models, strict=True):
                evicted = evicted or rank.state in _GIVEN_UP
                if put_back(rank) or (rank.state is RankState.EVICTED and self._moves_count):
                    g, c, m = g + charged[0], c + charged[1], m + charged[2]
                    if model:
                        models[model] = models.get(model, 0) + charged[0]
            if g or c or m:
                lost.append((step.job, (g, c, m), models))
        return evicted and self._validate(lost, vector)


class _Gain:
    """Counts how many ranks could have devices if victims left, and what limits would allow, to simulate only what can succeed at all.

    Devices are counted if all ranks of the part want the same number of whole devices.
    """

    def __init__(self, world: World, part: list[Rank], recorded: list[Slice], placer: Placer) -> None:
        self._limits = _Limits(world, part, recorded)
        request = part[0].request
        self._devices = request.count if request.whole and all(r.request is request for r in part) else 0
        self._lacking = 0
        self._freed: dict[Node, int] = {}
        self._more: dict[Node, int] = {}
        self._total = 0
        if self._devices:
            self._lacking = len(part) - placer.index.room_for(self._devices)
            for step in recorded:
                self._count(step, self._freed)
            self._lacking -= sum(self._ranks(node, freed) - self._ranks(node, 0) for node, freed in self._freed.items())

    def _count(self, step: Slice, into: dict[Node, int]) -> None:
        for rank in step.ranks:
            place = rank.reservation or rank.place
            if place is not None and place.devices:
                # a shared device counts as if it became free: that may lead to a simulation too many, never to one too few
                into[place.node] = into.get(place.node, 0) + len(place.devices)

    def _ranks(self, node: Node, freed: int) -> int:
        return (node.later_mask.bit_count() + freed) // self._devices

    def _gained(self, node: Node, more: int) -> int:
        had = self._freed.get(node, 0)
        return self._ranks(node, had + more) - self._ranks(node, had)

    def enough(self, chosen: list[Slice]) -> bool:
        """Whether there might be room for all ranks once these victims have left, besides the recorded ones."""
        if not self._limits.enough(chosen):
            return False
        if not self._devices or self._lacking <= 0:
            return True
        more: dict[Node, int] = {}
        for step in chosen:
            self._count(step, more)
        return sum(self._gained(node, count) for node, count in more.items()) >= self._lacking

    def start(self) -> None:
        """Begin to add victims one after another."""
        self._more = {}
        self._total = 0
        self._limits.start()

    def add(self, step: Slice) -> bool:
        """Add victims; whether there might be room for all ranks now."""
        allowed = self._limits.add(step)
        if not self._devices:
            return allowed
        fresh: dict[Node, int] = {}
        self._count(step, fresh)
        for node, count in fresh.items():
            had = self._more.get(node, 0)
            self._total += self._gained(node, had + count) - self._gained(node, had)
            self._more[node] = had + count
        return allowed and self._total >= self._lacking

    def helps(self, node: Node) -> bool:
        """Whether the victims on this node make room for at least one rank."""
        return not self._devices or self._gained(node, self._more.get(node, 0)) > 0


class _Limits:
    """What victims have to leave so that the limits on the preemptor's path allow what it asks for: of each queue, at least what is lacking."""

    def __init__(self, world: World, part: list[Rank], recorded: list[Slice]) -> None:
        #: queue, resource, and how much is too much there
        self._lacking: list[tuple[Queue, int, int]] = []
        self._left: list[int] = []
        if not world.options.quotas:
            return
        need = charge_of(part, world.largest_device_mib)
        for queue in part[0].job.queue.path:
            for r in range(3):
                lacking = queue.allocated[r] + need[r] - queue.limit[r] if need[r] else 0
                if lacking > 0:
                    self._lacking.append((queue, r, lacking - sum(_leaves(step, queue, r) for step in recorded)))

    def enough(self, chosen: list[Slice]) -> bool:
        """Whether it might be enough that these victims leave, besides the recorded ones."""
        return all(sum(_leaves(step, queue, r) for step in chosen) >= lacking for queue, r, lacking in self._lacking)

    def start(self) -> None:
        """Begin to add victims one after another."""
        self._left = [lacking for _, _, lacking in self._lacking]

    def add(self, step: Slice) -> bool:
        """Add victims; whether it might be enough now."""
        for at, (queue, r, _) in enumerate(self._lacking):
            self._left[at] -= _leaves(step, queue, r)
        return all(left <= 0 for left in self._left)


def _leaves(step: Slice, queue: Queue, r: int) -> int:
    """Return how much of a resource a queue would be charged less without these ranks."""
    return step.vector[r] if queue in step.job.queue.path else 0


def _where(rank: Rank) -> Node:
    place = rank.reservation or rank.place
    assert place is not None, f"{rank.name} is given up and has no place"
    return place.node


class _Seen:
    """The slices that were offered so far, to complete sets in which a gang is given up whole."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self._at: dict[int, int] = {}
        self._of_job: dict[Job, list[Slice]] = {}

    def add(self, step: Slice) -> None:
        """Note the next slice."""
        self._at[id(step)] = len(self.slices)
        self.slices.append(step)
        self._of_job.setdefault(step.job, []).append(step)

    def whole(self, chosen: list[Slice]) -> list[Slice]:
        """Return the slices, with all others of the jobs that are given up whole, in order."""
        more = {id(o): o for s in chosen if s.last for o in self._of_job[s.job]}
        if all(id(s) in more or not s.last for s in chosen) and len(more) == sum(1 for s in chosen if s.last):
            return chosen
        more |= {id(s): s for s in chosen}
        return sorted(more.values(), key=lambda s: self._at[id(s)])
