"""Laws of the scheduling policy on random worlds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangline.core.policy import placing
from gangline.core.policy.audit import violations
from gangline.core.policy.fairshare import Claim, divide
from gangline.core.policy.gangs import Constraint, Job, Podset, PodsetGroup, Rank, RankState
from gangline.core.policy.nodeindex import NodeIndex
from gangline.core.policy.nodes import NodeSpec
from gangline.core.policy.placing import Placer
from gangline.core.policy.queues import QueueSpec
from gangline.core.policy.report import Decisions
from gangline.core.policy.requests import GPU, UNLIMITED, Request
from gangline.core.policy.scoring import _by_score, best_place
from gangline.core.policy.session import run_session
from gangline.core.policy.world import World

SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


#: required, preferred, balanced, spread
CONSTRAINTS = [
    ("", "", "", ""), ("", "", "", ""), ("zone", "", "", ""), ("", "rack", "", ""), ("zone", "rack", "", ""), ("", "", "rack", ""),
    ("zone", "", "rack", ""), ("", "", "", "zone"), ("zone", "", "", "rack"),
]  # fmt: skip


@dataclass(frozen=True)
class JobPlan:
    """One job of a plan. `runs`: it is placed before the session that is looked at, where there is room."""

    name: str
    queue: str
    ranks: int
    min_ranks: int
    priority: int
    order: int
    count: int = 1
    #: 0: an amount of device memory
    milli: int = GPU
    subgroups: int = 1
    #: required, preferred, balanced, spread
    constraint: tuple[str, str, str, str] = ("", "", "", "")
    max_skew: int = 0
    runs: bool = False
    user: str = ""
    #: only nodes with this one
    model: str = ""


@dataclass(frozen=True)
class Plan:
    """What a world is built from."""

    nodes: list[NodeSpec]
    queues: list[QueueSpec]
    jobs: list[JobPlan] = field(default_factory=list)
    #: by queue: its usage, and that of its user ann
    used: dict[str, float | None] = field(default_factory=dict)


@st.composite
def plans(draw: Any, most_jobs: int = 9) -> Plan:
    pods = st.sampled_from([110, 3])
    nodes = [
        NodeSpec(
            f"n{i}", draw(st.integers(0, 4)), 100, 64_000, 64 << 30, draw(pods), {"zone": f"z{i // 3}", "rack": f"r{i % 2}"},
            gpu_model=draw(st.sampled_from("AAB")),
        )
        for i in range(draw(st.integers(1, 5)))
    ]
    by_model = draw(st.sampled_from([False, False, True]))
    amounts = st.sampled_from([None, 0, GPU, 2 * GPU, 4 * GPU])

    def models() -> tuple[Any, ...]:
        some = [(model, draw(amounts), draw(st.sampled_from([UNLIMITED, GPU, 3 * GPU])), draw(st.sampled_from([None, 0, 2]))) for model in "AB"]
        return tuple(each for each in some if draw(st.booleans())) if by_model else ()

    bounds = st.sampled_from([0, GPU, 2 * GPU, 4 * GPU, UNLIMITED])
    queues = []
    for d in range(draw(st.integers(1, 2))):
        weights = (draw(st.integers(0, 2)), 1, 1)
        queues.append(QueueSpec(f"d{d}", "", (draw(bounds), UNLIMITED, UNLIMITED), weight=weights, created=d, models=models()))
        for q in range(draw(st.integers(1, 2))):
            limit = draw(st.sampled_from([UNLIMITED, UNLIMITED, 3 * GPU]))
            weights, priority = (draw(st.integers(0, 3)), 1, 1), draw(st.sampled_from([100, 100, 200]))
            spec = QueueSpec(
                f"d{d}q{q}", f"d{d}", (draw(bounds), UNLIMITED, UNLIMITED), (limit, UNLIMITED, UNLIMITED), weights, priority, q,
                preempt_min_runtime_s=draw(st.sampled_from([None, 100.0])), user_fairness=draw(st.booleans()), models=models(),
            )  # fmt: skip
            queues.append(spec)
    leaves = [q.name for q in queues if q.parent]
    jobs = []
    for at in range(draw(st.integers(1, most_jobs))):
        ranks = draw(st.integers(1, 4))
        count, milli = draw(st.sampled_from([(1, GPU), (1, GPU), (2, GPU), (0, GPU), (1, 500), (1, 300), (2, 500), (1, 0)]))
        subgroups = draw(st.sampled_from([1, 1, 1, 2])) if ranks > 1 else 1
        jobs.append(
            JobPlan(
                name=f"j{at}",
                queue=draw(st.sampled_from(leaves)),
                ranks=ranks,
                min_ranks=draw(st.integers(1, ranks)),
                priority=draw(st.sampled_from([50, 50, 75, 100])),
                order=at,
                count=count,
                milli=milli,
                subgroups=subgroups,
                constraint=draw(st.sampled_from(CONSTRAINTS)),
                max_skew=draw(st.integers(0, 2)),
                runs=draw(st.booleans()),
                user=draw(st.sampled_from(["ann", "bob"])),
                model=draw(st.sampled_from(["", "", "A", "B"])),
            )
        )
    used = {q.name: draw(st.sampled_from([None, 0.0, 0.4, 1.0])) for q in queues}
    return Plan(nodes, queues, jobs, used)


def build(plan: Plan, placed: dict[str, tuple[RankState, Any]] | None = None) -> World:
    """Build the world; `placed` gives state and place (node, devices, thousandths) by the name of a rank."""
    world = World()
    world.topologies["t"] = ("zone", "rack")
    world.add_nodes(plan.nodes)
    for queue in sorted(plan.queues, key=lambda q: bool(q.parent)):
        world.add_queue(queue)
    for name, used in plan.used.items():
        queue = world.queues[name]
        queue.usage = None if used is None else (used, used, used)
        queue.user_usage = {} if used is None else {"ann": (used, used, used)}
    for job in plan.jobs:
        add(world, job, placed or {})
    return world


def add(world: World, plan: JobPlan, placed: dict[str, tuple[RankState, Any]]) -> None:
    least = [plan.min_ranks] if plan.subgroups == 1 else [1, 1]
    podsets = [Podset(f"p{i}", n) for i, n in enumerate(least)]
    job = Job(
        plan.name,
        world.queues[plan.queue],
        priority=plan.priority,
        preemptible=plan.priority < 100,
        order=plan.order,
        root=PodsetGroup("", None, list(podsets)),
    )
    job.user, job.started_s_ago = plan.user, 60.0 if plan.runs else None
    if any(plan.constraint):
        required, preferred, balanced, spread = plan.constraint
        job.constraint = Constraint("t", required, preferred, balanced=balanced, spread=spread, max_skew=plan.max_skew)
    places = {}
    nodes = tuple(n.name for n in world.nodes if n.model == plan.model) if plan.model else None
    for at in range(plan.ranks):
        memory_mib = 0 if plan.milli else 33
        request = Request(count=plan.count, milli=plan.milli, memory_mib=memory_mib, cpu_milli=1000, memory_bytes=1 << 30, nodes=nodes)
        rank = Rank(job, at, f"{plan.name}-{at}", world.intern(request), None)
        rank.podset = podsets[at % len(podsets)]
        rank.podset.ranks.append(rank)
        job.ranks.append(rank)
        if rank.name in placed:
            state, (node, devices, milli) = placed[rank.name]
            place = best_place_of(world, node, devices, milli)
            places[at] = (state, place)
    world.add_job(job, places)


def best_place_of(world: World, node: str, devices: tuple[int, ...], milli: int) -> Any:
    from gangline.core.policy.nodes import Place

    return Place(world.node_by_name[node], devices, milli)


def warmed(plan: Plan) -> tuple[Plan, dict[str, tuple[RankState, Any]]]:
    """Place the jobs that run at the start, by allocating them alone, without quotas in the way."""
    free = [replace(q, quota=(UNLIMITED,) * 3, limit=(UNLIMITED,) * 3, models=()) for q in plan.queues]
    world = build(Plan(plan.nodes, free, [j for j in plan.jobs if j.runs]))
    run_session(world, ["allocate"])
    return plan, running(world)


def running(world: World) -> dict[str, tuple[RankState, Any]]:
    """Return where ranks are after a round: what was bound runs, what was evicted waits again."""
    return {
        r.name: (RankState.RUNNING, (r.place.node.name, r.place.devices, r.place.milli))
        for j in world.jobs.values()
        for r in j.ranks
        if r.state in (RankState.BINDING, RankState.RUNNING) and r.place
    }


def picture(world: World) -> Any:
    """Everything that a rollback must restore."""
    return (
        [
            (
                (n.cpu_idle, n.cpu_later, n.memory_idle, n.memory_later, n.pods_idle, n.pods_later),
                (n.dev_idle[:], n.dev_later[:], n.now_mask, n.later_mask, n.later_milli, sorted(n.sharing.items())),
            )
            for n in world.nodes
        ],
        [(q.name, q.allocated, q.nonpreemptible, q.waiting, sorted(j.name for j in q.working)) for q in world.queues.values()],
        [(q.name, sorted(q.users.items())) for q in world.queues.values()],
        [(q.name, m, a.allocated, a.nonpreemptible) for q in world.queues.values() for m, a in q.models.items()],
        [(r.name, r.state, r.place, r.reservation, r.charged) for j in world.jobs.values() for r in j.ranks],
        [(j.name, j.active, [p.active for p in j.podsets]) for j in world.jobs.values()],
        {
            (q.name, s): [(k, j.name) for k, j in group]
            for q, groups in world.waiting_groups().items()
            for s, group in groups.items()
        },
    )


def told(decisions: Decisions) -> Any:
    return (
        [(p.rank.name, p.place.node.name, p.place.devices) for p in decisions.placements],
        [(e.rank.name, e.action, e.beneficiary, e.moved) for e in decisions.evictions],
        [(r.rank.name, r.place.node.name, r.place.devices, r.moved) for r in decisions.reservations],
        sorted((j.name, why.code, why.message) for jobs, why in decisions.refusals for j in jobs),
    )


@given(plans())
@SETTINGS
def test_nothing_is_broken_and_everything_can_be_undone(plan: Plan) -> None:
    plan, placed = warmed(plan)
    world = build(plan, placed)
    before = picture(world)
    decisions = run_session(world)
    assert violations(world, decisions) == []
    assert decisions.withheld == {}, "each eviction lowers the potential"
    world.rollback(0)
    assert picture(world) == before


@given(plans(), st.randoms(use_true_random=False))
@SETTINGS
def test_the_order_of_the_input_does_not_matter(plan: Plan, random: Any) -> None:
    plan, placed = warmed(plan)
    first = told(run_session(build(plan, placed)))
    nodes, queues, jobs = list(plan.nodes), list(plan.queues), list(plan.jobs)
    for some in (nodes, queues, jobs):
        random.shuffle(some)
    assert told(run_session(build(Plan(nodes, queues, jobs, plan.used), placed))) == first


@given(plans())
@SETTINGS
def test_rounds_come_to_rest(plan: Plan) -> None:
    """With nothing new, evictions end: nobody is evicted for one who is then evicted for the first."""
    plan, placed = warmed(plan)
    evictions = []
    for _ in range(14):
        world = build(plan, placed)
        evictions.append([(e.rank.name, e.action, e.beneficiary) for e in run_session(world).evictions])
        placed = running(world)
    assert evictions[-4:] == [[]] * 4, evictions


@given(plans())
@SETTINGS
def test_within_the_quota_of_a_model_nothing_is_reclaimed(plan: Plan) -> None:
    plan, placed = warmed(plan)
    world = build(plan, placed)
    had = {(q, m): a.allocated for q in world.queues.values() for m, a in q.models.items() if a.quota is not None and a.allocated <= a.quota}
    decisions = run_session(world)
    for eviction in decisions.evictions:
        if eviction.action != "reclaim" or eviction.moved or not eviction.rank.request.count:
            continue
        mine, side = world.jobs[eviction.beneficiary].queue, eviction.rank.job.queue
        for queue in side.path:
            if queue not in mine.path:
                assert (queue, eviction.place.node.model) not in had, f"{eviction.rank} was within the quota of {queue} and was reclaimed"


@given(plans())
@SETTINGS
def test_gangs_that_are_young_are_not_preempted(plan: Plan) -> None:
    plan, placed = warmed(plan)
    world = build(plan, placed)
    for eviction in run_session(world).evictions:
        job = eviction.rank.job
        if eviction.action == "preempt" and not eviction.moved and job.queue.preempt_min_runtime_s is not None and job.started_s_ago is not None:
            assert job.active, f"{job} lost more than its surplus"


@given(plans())
@SETTINGS
def test_who_waits_has_a_reason(plan: Plan) -> None:
    plan, placed = warmed(plan)
    world = build(plan, placed)
    decisions = run_session(world)
    explained = {j.name for jobs, _ in decisions.refusals for j in jobs}
    served = {p.rank.job.name for p in decisions.placements} | {r.rank.job.name for r in decisions.reservations}
    for job in world.jobs.values():
        if all(r.state is RankState.PENDING for r in job.ranks):
            assert job.name in explained | served


@given(plans())
@SETTINGS
def test_a_kept_world_decides_like_a_new_one(plan: Plan) -> None:
    plan, placed = warmed(plan)
    kept = build(plan, placed)
    placer = Placer(kept)
    for _ in range(4):
        told_by_kept = told(run_session(kept, placer=placer))
        fresh = build(plan, running_now(kept, before=True))
        assert told(run_session(fresh)) == told_by_kept
        kept.settle()
        for job in kept.jobs.values():
            for rank in job.ranks:
                if rank.state is RankState.RELEASING:
                    kept.leave(rank)


def running_now(world: World, before: bool) -> dict[str, tuple[RankState, Any]]:
    """Return where ranks were before the session's decisions."""
    assert before
    states = (RankState.RUNNING, RankState.EVICTED)
    return {
        r.name: (RankState.RUNNING, (r.place.node.name, r.place.devices, r.place.milli))
        for j in world.jobs.values()
        for r in j.ranks
        if r.state in states and r.place
    }


@given(plans(), st.integers(0, 8))
@SETTINGS
def test_the_index_finds_the_best_node(plan: Plan, steps: int) -> None:
    plan, placed = warmed(plan)
    world = build(plan, placed)
    index = NodeIndex(world, world.nodes)
    waiting = [r for j in world.jobs.values() for r in j.ranks if r.state is RankState.PENDING and r.request.plain]
    for rank in waiting[:steps]:
        found = best_place(world, rank, index)
        assert found == _by_score(world, rank, world.nodes, None)
        if found is not None and not found[1]:
            world.bind(rank, found[0])
        elif found is not None:
            world.reserve(rank, found[0])


@given(plans())
@SETTINGS
def test_equal_ranks_placed_together_are_placed_as_one_by_one(plan: Plan) -> None:
    plan, placed = warmed(plan)
    together = told(run_session(build(plan, placed)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "by_index", lambda _world, _request: False)
        patch.setattr(Placer, "_too_many", lambda _self, _job, _chunk: False)
        one_by_one = told(run_session(build(plan, placed)))
    assert together[:3] == one_by_one[:3]
    # Where nodes run out of room for pods, what is short is said of the whole chunk, not of the rank that found no place.
    assert [name for name, *_ in together[3]] == [name for name, *_ in one_by_one[3]]


@st.composite
def claims(draw: Any) -> list[Claim]:
    return [
        Claim(
            quota=draw(st.sampled_from([0, 500, 1000, 2000, 7000, UNLIMITED])),
            limit=draw(st.sampled_from([UNLIMITED, UNLIMITED, 1500, 4000])),
            demand=draw(st.integers(0, 20)) * draw(st.sampled_from([1000, 500])),
            weight=draw(st.integers(0, 4)),
            priority=draw(st.sampled_from([100, 100, 200])),
            age=at,
            used=draw(st.sampled_from([None, 0.0, 0.3, 0.9])),
        )
        for at in range(draw(st.integers(1, 6)))
    ]


@given(claims(), st.integers(0, 40))
@SETTINGS
def test_fair_shares_add_up(some: list[Claim], total: int) -> None:
    divide(some, total * GPU, GPU)
    guaranteed = [min(total * GPU if c.quota >= UNLIMITED else c.quota, c.wanted) for c in some]
    for claim, least in zip(some, guaranteed, strict=True):
        assert least <= claim.share <= claim.wanted
        assert claim.weight or claim.share == least
    assert sum(c.share for c in some) <= max(total * GPU, sum(guaranteed))
    left = total * GPU - sum(c.share for c in some)
    if left > 0:
        assert all(c.share == c.wanted for c in some if c.weight)
