"""Link affinity and MIG placement: what is chosen, by property and by example; and that the world gives back what it took."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model.gpufacts import COMPUTE_SLICES, MEMORY_SLICES, MIG_LAYOUTS, MIG_PROFILES, MigLayout
from gangline.core.policy.audit import violations
from gangline.core.policy.gangs import Job, Podset, PodsetGroup, Rank, RankState
from gangline.core.policy.linkaffinity import lowest, nearest_devices
from gangline.core.policy.migplan import best_start, free_starts, most
from gangline.core.policy.nodes import NodeSpec
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.report import Decisions
from gangline.core.policy.requests import Request
from gangline.core.policy.session import run_session
from gangline.core.policy.world import World

H100 = MIG_LAYOUTS["H100"]
LAYOUTS = st.sampled_from(sorted(MIG_LAYOUTS))


# ---------------------------------------------------------------- links


@st.composite
def _linked(draw: st.DrawFn) -> tuple[int, int, tuple[tuple[int, ...], ...]]:
    devices = draw(st.integers(1, 8))
    depth = draw(st.integers(0, 2))
    links = tuple(tuple(draw(st.integers(0, 2)) for _ in range(depth)) for _ in range(devices))
    mask = draw(st.integers(1, (1 << devices) - 1))
    return mask, draw(st.integers(1, mask.bit_count())), links


@given(_linked())
def test_as_few_groups_as_possible_at_the_coarsest_level(case: tuple[int, int, tuple[tuple[int, ...], ...]]) -> None:
    mask, count, links = case
    chosen = nearest_devices(mask, count, links)
    assert len(set(chosen)) == count
    assert all(mask >> d & 1 for d in chosen)
    assert chosen == tuple(sorted(chosen))
    free = [d for d in range(len(links)) if mask >> d & 1]
    fewest = min(len({links[d][:1] for d in some}) for some in combinations(free, count))
    assert len({links[d][:1] for d in chosen}) == fewest


@given(_linked())
def test_without_facts_the_lowest_are_taken(case: tuple[int, int, tuple[tuple[int, ...], ...]]) -> None:
    mask, count, links = case
    assert nearest_devices(mask, count) == nearest_devices(mask, count, [(7,)] * len(links)) == lowest(mask, count)


def test_the_larger_set_stays_whole() -> None:
    links = [(0,)] * 4 + [(1,)] * 4
    assert nearest_devices(0b1111_1100, 2, links) == (2, 3)
    assert nearest_devices(0b1111_1110, 4, links) == (4, 5, 6, 7)
    assert nearest_devices(0b1111_1110, 5, links) == (1, 4, 5, 6, 7)


def test_finer_levels_decide_inside_a_group() -> None:
    links = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 2), (1, 2)]
    assert nearest_devices(0b001111, 2, links) == (0, 2)
    assert nearest_devices(0b111110, 2, links) == (4, 5)


# ---------------------------------------------------------------- layouts


def test_the_facts_say_what_the_guide_says() -> None:
    assert [p.name for p in H100.profiles] == ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]
    three = H100.profile("3g.40gb")
    assert three is not None
    assert (three.starts, three.size, three.compute, three.memory_mib) == ((0, 4), 4, 3, 40_448)
    assert "1g.5gb" in MIG_PROFILES
    assert H100.profile("1g.5gb") is None


@pytest.mark.parametrize(
    ("taken", "profile", "start"),
    [
        ((), "1g.10gb", 6),  # where no 4g and no 2g could be
        ((), "3g.40gb", 4),  # so that a 4g still fits
        ((), "2g.20gb", 4),
        (((4, "3g.40gb"),), "4g.40gb", 0),
        (((0, "4g.40gb"),), "1g.10gb", 6),
        (((6, "1g.10gb"),), "3g.40gb", 0),
    ],
)
def test_an_instance_goes_where_it_costs_least(taken: tuple[tuple[int, str], ...], profile: str, start: int) -> None:
    best = best_start(H100, taken, profile)
    assert best is not None
    assert best[1] == start


def test_compute_slices_run_out_before_memory_slices() -> None:
    seven = tuple((s, "1g.10gb") for s in range(7))
    assert free_starts(H100, seven, "1g.10gb") == ()
    assert free_starts(H100, ((0, "4g.40gb"), (4, "2g.20gb")), "1g.10gb") == (6,)
    assert free_starts(H100, ((0, "4g.40gb"), (4, "3g.40gb")), "1g.10gb") == ()
    assert free_starts(H100, ((6, "1g.10gb+me"),), "1g.10gb+me") == ()


@given(LAYOUTS, st.lists(st.sampled_from(range(7)), max_size=9))
def test_what_is_placed_really_fits(name: str, kinds: list[int]) -> None:
    layout = MIG_LAYOUTS[name]
    taken: tuple[tuple[int, str], ...] = ()
    for kind in kinds:
        profile = layout.profiles[kind].name
        found = best_start(layout, taken, profile)
        assert (found is None) == (not free_starts(layout, taken, profile))
        if found is not None:
            taken = tuple(sorted((*taken, (found[1], profile))))
    _check_fit(layout, taken)


def _check_fit(layout: MigLayout, taken: tuple[tuple[int, str], ...]) -> None:
    used: list[int] = []
    compute = 0
    for start, name in taken:
        profile = layout.profile(name)
        assert profile is not None
        assert start in profile.starts
        assert sum(1 for _, n in taken if n == name) <= profile.most
        used += range(start, start + profile.size)
        compute += profile.compute
    assert len(set(used)) == len(used)
    assert max(used, default=0) < MEMORY_SLICES
    assert compute <= COMPUTE_SLICES


@given(LAYOUTS, st.sampled_from(range(7)), st.lists(st.tuples(st.sampled_from(range(7)), st.integers(0, 6)), max_size=4))
def test_one_profile_is_counted_exactly(name: str, kind: int, others: list[tuple[int, int]]) -> None:
    layout = MIG_LAYOUTS[name]
    profile = layout.profiles[kind]
    taken: tuple[tuple[int, str], ...] = ()
    for other, which in others:
        starts = free_starts(layout, taken, layout.profiles[other].name)
        if starts:
            taken = tuple(sorted((*taken, (starts[which % len(starts)], layout.profiles[other].name))))
    starts = free_starts(layout, taken, profile.name)
    compute = COMPUTE_SLICES - sum(p.compute for _, n in taken if (p := layout.profile(n)) is not None)
    there = sum(1 for _, n in taken if n == profile.name)
    assert most(layout, taken, profile.name) == min(len(starts), compute // profile.compute, profile.most - there)


# ---------------------------------------------------------------- the world


def _world(*gpus: int, layout: MigLayout | None = H100) -> World:
    world = World()
    world.add_queue(QueueSpec("all", ""))
    for at, count in enumerate(gpus):
        world.add_node(NodeSpec(f"n{at}", gpus=count, gpu_memory_mib=80_000, cpu_milli=64_000, memory_bytes=1 << 40, mig_layout=layout))
    return world


def _job(world: World, name: str, request: Request, count: int = 1, *, priority: int = 50) -> Job:
    podset = Podset("ranks", count)
    job = Job(name, world.queues["all"], priority=priority, preemptible=True, order=len(world.jobs), root=PodsetGroup("", None, [podset]))
    for index in range(count):
        rank = Rank(job, index, f"{name}-{index:03d}", world.intern(request), None)
        rank.podset = podset
        job.ranks.append(rank)
        podset.ranks.append(rank)
    world.add_job(job)
    return job


def _mig(profile: str, count: int = 1) -> Request:
    return Request(count=0, mig=((profile, count),), cpu_milli=100)


def _run(world: World) -> Decisions:
    decisions = run_session(world, ("allocate", "preempt"))
    assert violations(world, decisions) == []
    return decisions


def test_seven_small_instances_fill_one_gpu_before_another_is_partitioned() -> None:
    world = _world(2, 2)
    jobs = [_job(world, f"j{i}", _mig("1g.10gb")) for i in range(8)]
    _run(world)
    places = [j.ranks[0].place for j in jobs]
    assert all(p is not None for p in places)
    assert [(p.node.name, p.devices) for p in places if p is not None] == [("n0", (0,))] * 7 + [("n0", (1,))]


def test_a_gpu_is_whole_or_shared_or_partitioned() -> None:
    world = _world(1)
    small = _job(world, "small", _mig("1g.10gb"))
    _job(world, "whole", Request(count=1, cpu_milli=100))
    _job(world, "half", Request(count=1, milli=500, cpu_milli=100))
    decisions = _run(world)
    assert [p.rank.job.name for p in decisions.placements] == ["small"]
    world.settle()
    world.leave(small.ranks[0], RankState.SUCCEEDED)
    assert world.nodes[0].later_milli == 1000
    assert world.nodes[0].now_mask == 1


def test_a_gang_of_instances_makes_others_leave() -> None:
    world = _world(1)
    _job(world, "low", _mig("3g.40gb"), 2, priority=10)
    _run(world)
    world.settle()
    high = _job(world, "high", _mig("7g.80gb"), priority=60)
    decisions = _run(world)
    assert {e.rank.job.name for e in decisions.evictions} == {"low"}
    assert high.ranks[0].reservation is not None


def test_profiles_that_the_node_lacks_fit_nowhere() -> None:
    world = _world(1)
    _job(world, "other", _mig("1g.5gb"))
    decisions = _run(world)
    assert [why.code for _, why in decisions.refusals] == ["no_such_device"]


_ASKS = st.one_of(
    st.builds(lambda n: Request(count=n, cpu_milli=100), st.integers(1, 3)),
    st.builds(lambda n, s: Request(count=n, milli=s * 10, stacked=n > 1, cpu_milli=100), st.integers(1, 3), st.integers(1, 99)),
    st.builds(lambda m: Request(count=1, milli=0, memory_mib=m, cpu_milli=100), st.integers(1, 80_000)),
    st.builds(lambda k, n: _mig(H100.profiles[k].name, n), st.integers(0, 6), st.integers(1, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_ASKS, st.integers(1, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=14))
def test_nothing_is_given_twice_and_all_is_given_back(stories: list[tuple[Request, int, int, bool]]) -> None:
    """Jobs of all kinds come, are placed, evicted and go again: every session keeps the rules, and the empty world is as it was."""
    world = _world(1, 2, 3)
    before = [_room(world, at) for at in range(3)]
    for number, (request, count, level, leaves) in enumerate(stories):
        _job(world, f"j{number}", request, count, priority=10 + 20 * level)
        mark = [_room(world, at) for at in range(3)]
        _run(world)
        world.rollback(0)
        assert [_room(world, at) for at in range(3)] == mark
        _run(world)
        world.settle()
        for job in list(world.jobs.values()):
            if any(r.state is RankState.RELEASING for r in job.ranks) or (leaves and job.active):
                world.remove_job(job.name)
                leaves = False
    for name in list(world.jobs):
        world.remove_job(name)
    assert [_room(world, at) for at in range(3)] == before


def _room(world: World, at: int) -> tuple[object, ...]:
    node = world.nodes[at]
    slots = [{d: sorted(s) for d, s in some.items()} for some in (node.slots_idle, node.slots_later)]
    return (node.now_mask, node.later_mask, node.later_milli, tuple(node.dev_idle), tuple(node.dev_later), dict(node.sharing), *slots)
