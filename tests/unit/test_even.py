"""Equal numbers in domains: what comes out is compared with all that could, and asserted of whole placements by the real passes."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.policy.even import Evenly, splits
from gangline.core.policy.gangs import Constraint, Job, Podset, PodsetGroup, Rank, RankState
from gangline.core.policy.nodes import NodeSpec
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.requests import Request
from gangline.core.policy.session import run_session
from gangline.core.policy.world import World

SETTINGS = settings(max_examples=300, deadline=None)

#: (room, units that are there already) of a few domains
domains = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 0, 0, 1, 2])), min_size=1, max_size=4)


def skew(counts: list[int]) -> int:
    return max(counts) - min(counts)


def all_splits(rooms: list[int], units: int) -> list[tuple[int, ...]]:
    return [s for s in product(*(range(room + 1) for room in rooms)) if sum(s) == units]


# ---------------------------------------------------------------- balanced: the arithmetic


def used(split: tuple[int, ...] | list[int], have: list[int]) -> list[int]:
    """Return the numbers of the domains in use."""
    return [s + h for s, h in zip(split, have, strict=True) if s + h]


@SETTINGS
@given(domains, st.integers(1, 8))
def test_the_first_split_has_the_fewest_domains_that_can_be_even(given_domains: list[tuple[int, int]], units: int) -> None:
    rooms, have = [room for room, _ in given_domains], [count for _, count in given_domains]
    possible = all_splits(rooms, units)
    even = [used(s, have) for s in possible if skew(used(s, have)) <= 1]
    first = next(splits(rooms, have, units, 1), None)
    assert (first is None) == (not even), "a split is found exactly when there is one"
    if first is not None:
        assert tuple(first) in possible
        assert skew(used(first, have)) <= 1
        assert len(used(first, have)) == min(map(len, even))


@SETTINGS
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 12))
def test_of_equal_splits_the_tightest_is_taken(rooms: list[int], units: int) -> None:
    first = next(splits(rooms, [0] * len(rooms), units, 1), None)
    if first is None:
        return
    chosen = [d for d, share in enumerate(first) if share]
    each, more = divmod(units, len(chosen))

    def holds(some: tuple[int, ...]) -> bool:
        return all(rooms[d] >= each for d in some) and sum(rooms[d] > each for d in some) >= more

    least = min(sum(rooms[d] for d in some) for some in combinations(range(len(rooms)), len(chosen)) if holds(some))
    assert sum(rooms[d] for d in chosen) == least


@SETTINGS
@given(domains, st.integers(1, 8), st.integers(2, 4))
def test_a_bound_on_the_skew_is_kept(given_domains: list[tuple[int, int]], units: int, bound: int) -> None:
    rooms, have = [room for room, _ in given_domains], [count for _, count in given_domains]
    found = list(splits(rooms, have, units, bound))
    for split in found:
        assert tuple(split) in all_splits(rooms, units)
        assert skew(used(split, have)) <= bound
    if not any(have):
        possible = any(skew(used(s, have)) <= bound for s in all_splits(rooms, units))
        assert bool(found) == possible


@SETTINGS
@given(domains, st.integers(1, 8))
def test_without_a_bound_all_are_placed_where_there_is_room(given_domains: list[tuple[int, int]], units: int) -> None:
    rooms, have = [room for room, _ in given_domains], [count for _, count in given_domains]
    found = list(splits(rooms, have, units))
    assert bool(found) == (sum(rooms) >= units)
    if found and not any(have):
        # What is uneven is in no more domains than it has to be, and as equal in these as they allow.
        last = used(found[-1], have)
        fits = [k for k in range(1, len(rooms) + 1) if sum(sorted(rooms)[-k:]) >= units]
        assert len(last) >= min(fits)
        if skew(last) > 1:
            assert len(last) == min(fits)
            of_those = [used(s, have) for s in all_splits(rooms, units)]
            assert skew(last) == min(skew(s) for s in of_those if len(s) == min(fits))


# ---------------------------------------------------------------- spread: the arithmetic


def spread(rooms: list[int], have: list[int], units: int, bound: int = 0) -> list[int] | None:
    shares = [0] * len(rooms)

    def attempt(unit: int, d: int) -> bool:
        if shares[d] == rooms[d]:
            return False
        shares[d] += 1
        return True

    done = Evenly(Constraint("t", "", "", spread="x", max_skew=bound), have, attempt).spread(list(range(units)))
    return shares if done else None


@SETTINGS
@given(domains, st.integers(1, 8), st.sampled_from([0, 1, 2]))
def test_spread_is_as_equal_as_room_allows(given_domains: list[tuple[int, int]], units: int, bound: int) -> None:
    rooms, have = [room for room, _ in given_domains], [count for _, count in given_domains]
    found = spread(rooms, have, units, bound)
    outcomes = [[s + h for s, h in zip(split, have, strict=True)] for split in all_splits(rooms, units)]
    if found is not None:
        counts = [s + h for s, h in zip(found, have, strict=True)]
        # The fewest in any domain are as many as can be, then the most as few; no other way is more equal by both.
        assert min(counts) == max(map(min, outcomes))
        assert max(counts) == min(map(max, outcomes))
        assert not bound or skew(counts) <= bound or max(counts) == max(have)
    elif not bound:
        assert not outcomes
    else:
        # Equal numbers before count as well: what is above the bound already is not this gang's doing, and gets nothing more.
        assert not any(skew(c) <= bound for c in outcomes)


# ---------------------------------------------------------------- whole placements, by the passes


def world_of(free: list[list[int]], constraint: Constraint, ranks: int, least: int, replica: int = 0) -> tuple[World, Job]:
    """Nodes by rack with so many free GPUs, and a waiting job: of single ranks, or of replicas of `replica` ranks that share a node."""
    world = World()
    world.topologies["t"] = ("rack", "hostname")
    for r, rack in enumerate(free):
        for n, gpus in enumerate(rack):
            name = f"r{r}n{n}"
            world.add_node(NodeSpec(name, gpus, 100, 64_000, 64 << 30, 110, {"rack": f"r{r}", "hostname": name}))
    world.add_queue(QueueSpec("q", ""))
    request = world.intern(Request(count=1))
    if replica:
        sets = [PodsetGroup(f"u{u:02d}", None, [Podset(f"u{u:02d}/p", replica)], Constraint("t", "hostname", "")) for u in range(ranks)]
        root = PodsetGroup("", None, [PodsetGroup("all", least, list(sets), constraint)])
    else:
        root = PodsetGroup("", None, [Podset("p", least, constraint)])
    job = Job("job", world.queues["q"], priority=1, preemptible=True, order=0, root=root)
    for podset in job.podsets:
        for _ in range(replica or ranks):
            rank = Rank(job, len(job.ranks), f"job-{len(job.ranks):03d}", request, None)
            rank.podset = podset
            podset.ranks.append(rank)
            job.ranks.append(rank)
    world.add_job(job)
    run_session(world, ["allocate"])
    return world, job


def by_rack(job: Job, racks: int) -> list[int]:
    counts = [0] * racks
    for rank in job.ranks:
        if rank.state is RankState.BINDING:
            assert rank.place is not None
            counts[int(rank.place.node.spec.labels["rack"][1:])] += 1
    return counts


racks = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(racks, st.integers(1, 9), st.sampled_from(["balanced", "spread"]), st.sampled_from([0, 1, 2]), st.data())
def test_gangs_are_placed_as_the_arithmetic_says(free: list[list[int]], ranks: int, wish: str, bound: int, data: Any) -> None:
    least = data.draw(st.integers(1, ranks))
    constraint = Constraint("t", "", "", max_skew=bound, **{wish: "rack"})
    _, job = world_of(free, constraint, ranks, least)
    counts = by_rack(job, len(free))
    placed = sum(counts)
    rooms = [sum(rack) for rack in free]
    # A rack of nodes without GPUs is no domain for ranks that need some.
    able = [d for d, rack in enumerate(free) if any(rack)]
    assert placed == 0 or placed >= least
    if not bound:
        assert placed == min(ranks, sum(rooms)) or (placed == 0 and sum(rooms) < least)
    if placed and bound:
        assert skew([counts[d] for d in able if wish == "spread" or counts[d]]) <= bound
    if placed and wish == "spread" and not bound:
        assert all(skew([counts[d], counts[e]]) <= 1 or counts[d] == rooms[d] or counts[e] == rooms[e] for d, e in combinations(able, 2))
    if placed == least == ranks and wish == "balanced":
        assert counts == next(splits(rooms, [0] * len(rooms), ranks, bound))


@settings(max_examples=100, deadline=None)
@given(racks, st.integers(1, 5), st.integers(1, 3), st.sampled_from(["balanced", "spread"]))
def test_replicas_are_placed_whole_and_in_equal_numbers(free: list[list[int]], replicas: int, size: int, wish: str) -> None:
    constraint = Constraint("t", "", "", max_skew=1, **{wish: "rack"})
    _, job = world_of(free, constraint, replicas, replicas, replica=size)
    counts = by_rack(job, len(free))
    rooms = [sum(node // size for node in rack) for rack in free]
    able = [d for d, rack in enumerate(free) if any(rack)]
    if sum(counts):
        assert sum(counts) == replicas * size
        for podset in job.podsets:
            assert len({r.place.node.name for r in podset.ranks if r.place}) == 1, "a replica is on one node"
        assert all(c % size == 0 and c // size <= room for c, room in zip(counts, rooms, strict=True))
        assert skew([counts[d] // size for d in able if wish == "spread" or counts[d]]) <= 1
    elif wish == "balanced":
        assert not any(skew(used(s, [0] * len(s))) <= 1 for s in all_splits(rooms, replicas))
    else:
        assert not any(skew([s[d] for d in able]) <= 1 for s in all_splits(rooms, replicas) if able)
