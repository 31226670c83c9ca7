"""The rules of the scheduling policy that are easy to get wrong, each on the smallest world that shows it."""

from __future__ import annotations

import pytest

from gangline.core.policy import numa
from gangline.core.policy.devices import shares
from gangline.core.policy.fairshare import Claim, divide, set_fair_shares
from gangline.core.policy.gangs import Constraint, Job, Member, Podset, PodsetGroup, Rank, RankState, eviction_slices, next_chunk
from gangline.core.policy.holders import holders
from gangline.core.policy.nodes import NodeSpec, Place
from gangline.core.policy.numa import Zone
from gangline.core.policy.order import victims_in_order
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.refusals import Refusal
from gangline.core.policy.report import Action
from gangline.core.policy.requests import GPU, UNLIMITED, Affinity, Request, mig_gpus, share_of_memory
from gangline.core.policy.session import run_session
from gangline.core.policy.world import Options, World

FREE = (UNLIMITED, UNLIMITED, UNLIMITED)


def cluster(*gpus: int, labels: list[dict[str, str]] | None = None, options: Options | None = None) -> World:
    """Nodes n0, n1, … with so many GPUs, and one queue without bounds."""
    world = World(options)
    world.add_nodes(NodeSpec(f"n{i}", g, 100, 64_000, 1 << 40, labels=(labels or [{}] * len(gpus))[i]) for i, g in enumerate(gpus))
    world.topologies["t"] = ("rack",)
    world.add_queue(QueueSpec("top", quota=FREE))
    return world


def queue(world: World, name: str, quota: float, weight: float = 0, limit: float | None = None, **more: object) -> None:
    bound = UNLIMITED if limit is None else int(limit * GPU)
    quotas, limits = (int(quota * GPU), UNLIMITED, UNLIMITED), (bound, UNLIMITED, UNLIMITED)
    world.add_queue(QueueSpec(name, "top", quotas, limits, (weight, 1, 1), created=len(world.queues), **more))  # type: ignore[arg-type]


def job(
    world: World,
    name: str,
    queue: str = "q",
    ranks: int = 1,
    gpus: float = 1,
    least: int | None = None,
    priority: int = 50,
    on: list[str | None] | None = None,
    tree: PodsetGroup | None = None,
    request: Request | None = None,
    constraint: Constraint | None = None,
    started_s_ago: float | None = 60,
) -> Job:
    """A job; `on` names the node of each rank that runs."""
    root = tree or PodsetGroup("", None, [Podset("", ranks if least is None else least)])
    made = Job(name, world.queues[queue], priority=priority, preemptible=priority < 100, order=len(world.jobs), root=root)
    made.constraint, made.started_s_ago = constraint, started_s_ago if on else None
    whole = float(gpus).is_integer()
    asked = request or Request(int(gpus) if whole else 1, GPU if whole else round(gpus * GPU), cpu_milli=1000)
    places = {}
    for at in range(ranks):
        rank = Rank(made, at, f"{name}-{at}", world.intern(asked), None)
        rank.podset = made.podsets[at % len(made.podsets)]
        rank.podset.ranks.append(rank)
        made.ranks.append(rank)
        node = (on or [None] * ranks)[at]
        if node is not None:
            place = free_place(world, node, asked)
            places[at] = (RankState.RUNNING, place)
            world.node_by_name[node].take(asked, place, -1, -1)
    for _, place in places.values():
        place.node.take(asked, place, 1, 1)
    world.add_job(made, places)
    return made


def free_place(world: World, node: str, request: Request) -> Place:
    found = world.node_by_name[node]
    if not request.count:
        return Place(found)
    if request.whole:
        return Place(found, tuple(d for d in range(found.gpus) if found.now_mask >> d & 1)[: request.count], GPU)
    chosen = shares(found, request, True, "pack")
    assert chosen is not None
    return Place(found, chosen[0], request.milli_on(found.spec.gpu_memory_mib))


def states(world: World, *actions: Action) -> dict[str, str]:
    """Run a session; where each rank is or will be: `n0`, `n0 reserved`, `n0 leaving`, or nothing for those that wait."""
    run_session(world, actions or ("allocate", "consolidate", "reclaim", "preempt", "evict-stale-gangs"))
    out = {}
    for made in world.jobs.values():
        for rank in made.ranks:
            if rank.reservation is not None:
                out[rank.name] = f"{rank.reservation.node.name} reserved"
            elif rank.state in (RankState.EVICTED, RankState.RELEASING) and rank.place:
                out[rank.name] = f"{rank.place.node.name} leaving"
            elif rank.place is not None:
                out[rank.name] = rank.place.node.name
    return out


# ---------------------------------------------------------------- requests


def test_amounts() -> None:
    assert mig_gpus("3g.20gb") == 3
    assert share_of_memory(1, 3000) == 10
    assert share_of_memory(50, 100) == 500
    assert Request(2, 500).vector(100) == (1000, 0, 0)
    assert Request(mig=(("1g.5gb", 2), ("3g.20gb", 1))).vector(0) == (5000, 0, 0)
    with pytest.raises(ValueError, match="does not begin with a number"):
        mig_gpus("large")


# ---------------------------------------------------------------- fair share


def claim(quota: int, demand: int, weight: float, age: int = 0, priority: int = 100, limit: int = UNLIMITED) -> Claim:
    return Claim(quota * GPU, limit, demand * GPU, weight, priority, age)


def shared(total: int, *claims: Claim) -> list[float]:
    divide(list(claims), total * GPU, GPU)
    return [c.share / GPU for c in claims]


def test_quota_first_then_weight() -> None:
    assert shared(10, claim(2, 10, 1), claim(2, 10, 2, 1)) == [4, 6]


def test_who_wants_less_leaves_the_rest() -> None:
    assert shared(10, claim(2, 3, 1), claim(2, 10, 1, 1), claim(0, 10, 1, 2)) == [3, 5, 2]


def test_a_higher_class_takes_all_it_wants() -> None:
    assert shared(10, claim(1, 10, 1), claim(1, 6, 1, 1, priority=200)) == [4, 6]


def test_what_rounding_loses_goes_unit_by_unit_to_the_largest_fraction() -> None:
    assert shared(5, claim(0, 9, 1), claim(0, 9, 1, 1), claim(0, 9, 1, 2)) == [2, 2, 1]


def test_quotas_above_the_total_are_not_cut() -> None:
    assert shared(4, claim(3, 9, 1), claim(3, 9, 1, 1)) == [3, 3]


def test_no_weight_no_surplus() -> None:
    assert shared(10, claim(1, 10, 0), claim(1, 10, 1, 1)) == [1, 9]


def test_children_share_what_their_parent_has() -> None:
    world = cluster(8)
    world.add_queue(QueueSpec("other", quota=(6 * GPU, UNLIMITED, UNLIMITED), created=1))
    world.queues["top"].quota = (2 * GPU, UNLIMITED, UNLIMITED)
    queue(world, "q", 8)
    world.add_queue(QueueSpec("r", "other", (0, UNLIMITED, UNLIMITED), weight=(1, 1, 1)))
    job(world, "a", ranks=8)
    job(world, "b", "r", ranks=8)
    set_fair_shares(world)
    assert world.queues["r"].fair_share[0] == 6 * GPU
    assert world.queues["top"].fair_share[0] == 2 * GPU


# ---------------------------------------------------------------- trees


def tree(min_members: int | None, *members: Member) -> PodsetGroup:
    return PodsetGroup("root", min_members, list(members))


def test_an_unsatisfied_set_asks_for_the_minimum_of_what_it_needs() -> None:
    world = cluster(8)
    queue(world, "q", 8)
    made = job(world, "j", ranks=6, tree=tree(1, Podset("a", 2), Podset("b", 1)))
    assert [r.name for r in next_chunk(made)] == ["j-0", "j-2"]


def test_surplus_goes_before_members_and_members_before_the_gang() -> None:
    world = cluster(8)
    queue(world, "q", 8)
    made = job(world, "j", ranks=5, tree=tree(1, Podset("a", 1), Podset("b", 2)), on=["n0"] * 5)
    names = [[r.name for r in some] for some in eviction_slices(made)]
    assert names == [["j-4"], ["j-2"], ["j-1", "j-3"], ["j-0"]]


def test_victims_are_the_exact_reverse() -> None:
    world = cluster(8)
    queue(world, "q", 8)
    for name, priority in (("old", 50), ("new", 50), ("low", 25)):
        job(world, name, ranks=2 if name == "old" else 1, least=1, priority=priority, on=["n0"] * (2 if name == "old" else 1))
    set_fair_shares(world)
    offered = [[r.name for r in s.ranks] for s in victims_in_order(world, list(world.jobs.values()), {})]
    assert offered == [["low-0"], ["old-1"], ["new-0"], ["old-0"]]


# ---------------------------------------------------------------- allocate


def test_a_gang_that_waits_in_part_waits_as_a_whole() -> None:
    world = cluster(2, 2)
    queue(world, "q", 4)
    leaving = job(world, "old", gpus=2, on=["n0"])
    world.evict(leaving.ranks[0])
    world.settle()
    job(world, "gang", ranks=2, gpus=2)
    assert states(world, "allocate") == {"old-0": "n0 leaving", "gang-0": "n1 reserved", "gang-1": "n0 reserved"}


def test_a_reservation_keeps_others_off() -> None:
    world = cluster(2, 2)
    queue(world, "q", 4)
    leaving = job(world, "old", gpus=2, on=["n0"])
    world.evict(leaving.ranks[0])
    world.settle()
    job(world, "gang", ranks=2, gpus=2)
    job(world, "late")
    assert "late-0" not in states(world, "allocate")


def test_work_that_cannot_be_preempted_stays_within_quota() -> None:
    world = cluster(4)
    queue(world, "q", 1)
    job(world, "a", priority=100)
    late = job(world, "b", priority=100)
    decisions = run_session(world, ["allocate"])
    assert [p.rank.name for p in decisions.placements] == ["a-0"]
    refusal = decisions.refusal(late)
    assert refusal is not None
    assert (refusal.code, refusal.need, refusal.have, refusal.holders) == ("over_quota", {"gpu": 1000}, {"gpu": 0}, ("q",))


def test_preemptible_work_fills_what_is_idle_whatever_its_share() -> None:
    world = cluster(2)
    queue(world, "q", 0)
    job(world, "a", ranks=2)
    assert states(world, "allocate") == {"a-0": "n0", "a-1": "n0"}


def test_queues_take_turns() -> None:
    world = cluster(4)
    queue(world, "p", 2)
    queue(world, "q", 2)
    for at in range(4):
        job(world, f"p{at}", "p")
    for at in range(4):
        job(world, f"q{at}", "q")
    assert sorted(states(world, "allocate")) == ["p0-0", "p1-0", "q0-0", "q1-0"]


def test_a_share_joins_another_before_it_takes_a_fresh_device() -> None:
    world = cluster(1, 2)
    queue(world, "q", 4)
    job(world, "a", gpus=0.5, on=["n1"])
    made = job(world, "b", gpus=0.5)
    states(world, "allocate")
    place = made.ranks[0].place
    assert place is not None
    assert (place.node.name, place.devices) == ("n1", (0,))


def test_amounts_of_memory_fill_a_device_exactly() -> None:
    """Each is charged 34 hundredths of a GPU, and yet three thirds are one device."""
    world = World()
    world.add_node(NodeSpec("n0", 1, 600, 64_000, 1 << 40))
    world.add_queue(QueueSpec("q", quota=FREE))
    for name in "abcd":
        job(world, name, request=Request(1, 0, memory_mib=200))
    assert states(world, "allocate") == {"a-0": "n0", "b-0": "n0", "c-0": "n0"}
    assert world.queues["q"].allocated[0] == 3 * 340


def test_what_nobody_can_place_says_why() -> None:
    world = cluster(2, 2)
    queue(world, "q", 8)
    cases = {
        "fragmented": job(world, "a", gpus=3),
        "not_enough_gpus": job(world, "b", ranks=5),
        "no_node_allowed": job(world, "c", request=Request(1, nodes=())),
        "unknown_topology": job(world, "d", constraint=Constraint("t", "row", "")),
        "no_such_device": job(world, "e", request=Request(mig=(("1g.5gb", 1),))),
        "gang_incomplete": job(world, "f", ranks=1, least=2),
    }
    decisions = run_session(world, ["allocate"])
    for code, made in cases.items():
        refusal = decisions.refusal(made)
        assert refusal is not None
        assert refusal.code == code


def test_who_holds_what_is_short() -> None:
    world = cluster(4)
    for name, ranks in (("p", 1), ("q", 3), ("r", 0)):
        queue(world, name, 4)
        if ranks:
            job(world, f"in-{name}", name, ranks=ranks, on=["n0"] * ranks)
    late = job(world, "late", "r")
    refusal = run_session(world, ["allocate"]).refusal(late)
    assert refusal is not None
    assert holders(world, refusal) == ("q", "p")
    assert holders(world, refusal, most=1) == ("q",)
    assert holders(world, Refusal("over_limit", "", {"gpu": 1}, {}, ("top",))) == ("top",)
    assert holders(world, Refusal("no_nodes", "")) == ()


# ---------------------------------------------------------------- topology


def racks(*names: str) -> list[dict[str, str]]:
    return [{"rack": name} for name in names]


def test_a_required_domain_is_the_fullest_that_holds_the_gang() -> None:
    world = cluster(4, 2, 2, labels=racks("a", "b", "b"))
    queue(world, "q", 8)
    job(world, "small", on=["n1"])
    job(world, "gang", ranks=3, constraint=Constraint("t", "rack", ""))
    assert {v for k, v in states(world, "allocate").items() if k.startswith("gang")} == {"n1", "n2"}


def test_growth_stays_in_the_domain_where_the_gang_is() -> None:
    world = cluster(1, 4, labels=racks("a", "b"))
    queue(world, "q", 8)
    made = job(world, "gang", ranks=2, least=1, on=["n0", None], constraint=Constraint("t", "rack", ""))
    decisions = run_session(world, ["allocate"])
    assert decisions.placements == []
    refusal = decisions.refusal(made)
    assert refusal is not None
    assert refusal.code == "no_domain_fits"


def test_a_preference_never_blocks() -> None:
    world = cluster(1, 1, labels=racks("a", "b"))
    queue(world, "q", 8)
    job(world, "gang", ranks=2, constraint=Constraint("t", "", "rack"))
    assert set(states(world, "allocate").values()) == {"n0", "n1"}


# ---------------------------------------------------------------- evicting


def test_preemption_needs_a_strictly_lower_priority_of_the_same_queue() -> None:
    world = cluster(1)
    queue(world, "q", 1)
    job(world, "running", on=["n0"])
    job(world, "equal")
    assert states(world) == {"running-0": "n0"}
    job(world, "higher", priority=75)
    assert states(world) == {"running-0": "n0 leaving", "higher-0": "n0 reserved"}


def test_a_gang_is_never_left_below_its_minimum() -> None:
    world = cluster(2)
    queue(world, "q", 2)
    job(world, "gang", ranks=2, on=["n0", "n0"])
    job(world, "higher", priority=75)
    assert states(world) == {"gang-0": "n0 leaving", "gang-1": "n0 leaving", "higher-0": "n0 reserved"}


def test_a_victim_stays_if_the_node_has_room_for_it_whatever_the_devices() -> None:
    world = cluster(4)
    queue(world, "q", 4)
    job(world, "two", gpus=2, on=["n0"])
    one = job(world, "one", on=["n0"])
    wide = job(world, "wide", gpus=3, priority=75)
    assert states(world) == {"two-0": "n0 leaving", "one-0": "n0", "wide-0": "n0 reserved"}
    assert (one.ranks[0].place, wide.ranks[0].reservation) == (Place(world.nodes[0], (2,), GPU), Place(world.nodes[0], (0, 1, 3), GPU))


def test_reclaim_takes_what_is_above_its_share_and_the_last_gang_may_be_larger() -> None:
    world = cluster(6)
    queue(world, "p", 3)
    queue(world, "q", 3)
    job(world, "big", "p", gpus=4, on=["n0"])
    job(world, "small", "q", gpus=2, on=["n0"])
    job(world, "wants", "q", gpus=1)
    assert states(world, "reclaim") == {"big-0": "n0 leaving", "small-0": "n0", "wants-0": "n0 reserved"}


def test_reclaim_does_not_go_above_its_own_share() -> None:
    world = cluster(4)
    queue(world, "p", 2)
    queue(world, "q", 1)
    job(world, "a", "p", gpus=3, on=["n0"])
    job(world, "b", "q", gpus=1, on=["n0"])
    job(world, "c", "q", gpus=1)
    assert "a-0" in states(world, "reclaim")
    assert states(world, "reclaim")["a-0"] == "n0"


def test_minimum_runtime_protects_gangs_and_not_surplus() -> None:
    for ranks, outcome in ((1, {"a-0": "n0"}), (2, {"a-0": "n0", "a-1": "n0 leaving", "b-0": "n0 reserved"})):
        world = cluster(ranks)
        queue(world, "p", 0, reclaim_min_runtime_s=120.0)
        queue(world, "q", 2)
        job(world, "a", "p", ranks=ranks, least=1, on=["n0"] * ranks, started_s_ago=60)
        job(world, "b", "q")
        assert states(world, "reclaim") == outcome


def test_consolidation_moves_and_costs_nobody_a_place() -> None:
    world = cluster(2, 2)
    queue(world, "q", 0)
    job(world, "a", on=["n0"])
    job(world, "b", on=["n1"])
    job(world, "wide", gpus=2)
    assert states(world) == {"a-0": "n0", "b-0": "n0 reserved", "wide-0": "n1 reserved"}


def test_consolidation_leaves_alone_what_cannot_be_preempted() -> None:
    world = cluster(2, 2)
    queue(world, "q", 2)
    job(world, "a", priority=100, on=["n0"])
    job(world, "b", priority=100, on=["n1"])
    job(world, "wide", gpus=2)
    assert states(world) == {"a-0": "n0", "b-0": "n1"}


def test_who_was_just_evicted_waits_before_it_evicts() -> None:
    world = cluster(1)
    queue(world, "q", 1)
    job(world, "running", on=["n0"])
    higher = job(world, "higher", priority=75)
    higher.evicted_s_ago, higher.preemption_delay_s = 10, 600
    assert states(world) == {"running-0": "n0"}


@pytest.mark.parametrize(
    ("stale_for_s", "grace_s", "evicted"), [(61, None, True), (59, None, False), (61, 120, False), (1e9, float("inf"), False)]
)
def test_a_stale_gang_goes_after_its_grace(stale_for_s: float, grace_s: float | None, evicted: bool) -> None:
    world = cluster(2)
    queue(world, "q", 2)
    made = job(world, "gang", ranks=2, priority=100, on=["n0", "n0"])
    world.leave(made.ranks[1], RankState.FAILED)
    made.stale_for_s, made.staleness_grace_s = stale_for_s, grace_s
    assert states(world)["gang-0"] == ("n0 leaving" if evicted else "n0")


def test_a_gang_of_which_a_rank_has_succeeded_is_not_stale() -> None:
    world = cluster(2)
    queue(world, "q", 2)
    made = job(world, "gang", ranks=2, on=["n0", "n0"])
    world.leave(made.ranks[1], RankState.SUCCEEDED)
    made.stale_for_s = 1e6
    assert states(world)["gang-0"] == "n0"


# ---------------------------------------------------------------- NUMA, affinity


def test_zones() -> None:
    zones = [Zone((None, 4000, None), (None, 4000, None)) for _ in range(2)]
    large, small = Request(cpu_milli=6000, zone_bound=True), Request(cpu_milli=3000, zone_bound=True)
    assert numa.zones_for(zones, "single-numa-node", large, now=True) is None
    assert numa.zones_for(zones, "restricted", large, now=True) == ((0, (0, 4000, 0)), (1, (0, 2000, 0)))
    first = numa.zones_for(zones, "restricted", small, now=True)
    assert first == ((0, (0, 3000, 0)),)
    numa.take(zones, first, -1, -1)
    assert numa.zones_for(zones, "restricted", small, now=True) == ((1, (0, 3000, 0)),)
    numa.take(zones, ((1, (0, 3000, 0)),), -1, -1)
    # one zone could hold it, so it waits for one rather than take two
    assert numa.zones_for(zones, "restricted", Request(cpu_milli=2000, zone_bound=True), now=True) is None
    assert numa.zones_for(zones, "restricted", Request(cpu_milli=6000), now=True) == ()


def test_ranks_that_repel_each_other_take_a_node_each() -> None:
    world = cluster(4, 4)
    queue(world, "q", 8)
    apart = Request(1, affinity=Affinity((("app", "x"),), repel="hostname"))
    job(world, "gang", ranks=2, request=apart)
    job(world, "third", request=apart)
    assert states(world, "allocate") == {"gang-0": "n0", "gang-1": "n1"}


def test_ranks_that_attract_each_other_share_a_rack() -> None:
    world = cluster(1, 2, 2, labels=racks("a", "b", "b"))
    queue(world, "q", 8)
    together = Request(1, affinity=Affinity((("app", "x"),), attract="rack"))
    job(world, "first", request=together)
    job(world, "gang", ranks=3, request=together)
    assert states(world, "allocate") == {"first-0": "n0"}
    world.rollback(0)
    world.remove_job("first")
    job(world, "late", request=together, on=["n1"])
    assert set(states(world, "allocate").values()) == {"n1", "n2"}


def test_a_world_refuses_what_it_cannot_hold() -> None:
    world = cluster(1)
    with pytest.raises(ValueError, match="is there already"):
        world.add_node(NodeSpec("n0"))
    with pytest.raises(ValueError, match="which is not there"):
        world.add_queue(QueueSpec("q", "nowhere"))
    queue(world, "q", 1)
    job(world, "a", on=["n0"])
    with pytest.raises(ValueError, match="still has ranks"):
        world.remove_node("n0")
    world.remove_job("a")
    world.remove_node("n0")
    assert world.nodes == []


def test_a_placer_follows_the_nodes() -> None:
    world = cluster(1)
    queue(world, "q", 4)
    placer = Placer(world)
    job(world, "a", gpus=2)
    assert run_session(world, placer=placer).placements == []
    world.add_node(NodeSpec("n1", 2, 100, 64_000, 1 << 40))
    assert [p.place.node.name for p in run_session(world, placer=placer).placements] == ["n1"]


def test_who_takes_another_part_of_what_came_free_takes_over_no_eviction() -> None:
    """`claims` is entitled to one of the two devices of `wide`; that `small` may have the other is not why `wide` has to go."""
    world = World()
    world.add_nodes([NodeSpec("n0", 2, 100, 64_000, 1 << 40)])
    for number, (name, quota) in enumerate({"a": 1, "b": 0}.items()):
        world.add_queue(QueueSpec(name, quota=(quota * GPU, UNLIMITED, UNLIMITED), limit=FREE, weight=(0, 1, 1), created=number))
        leaf = (GPU, UNLIMITED, UNLIMITED)
        world.add_queue(QueueSpec(f"{name}q", name, leaf, FREE, (0, 1, 1), created=0))
    job(world, "wide", queue="bq", ranks=2, on=["n0", "n0"])
    job(world, "small", queue="bq")
    job(world, "claims", queue="aq")
    decisions = run_session(world)
    assert {(e.action, e.beneficiary) for e in decisions.evictions} == {("reclaim", "claims")}
    assert {r.rank.job.name for r in decisions.reservations} == {"claims", "small"}
