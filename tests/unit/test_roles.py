"""Roles: how a job's ranks are laid out, placed, numbered, restarted, and what each rank is told. States are made by folding events."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import test_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.core.model import events as ev
from gangline.core.model import roles
from gangline.core.model.documents import DesiredGang
from gangline.core.model.fold import IllegalTransition
from gangline.core.model.jobfile import parse_json_spec, parse_yaml, to_json
from gangline.core.model.narrate import sentence
from gangline.core.model.problems import BadJob
from gangline.core.model.project import project
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Gang, JobSpec, Resources, Role, TopologyRequest
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.model.topologies import Topology
from gangline.core.policy.estimate import start_of
from gangline.core.policy.plan import plan
from gangline.leader.queuerows import queue_rows
from gangline.leader.rows import shown_spec, whole_job
from gangline.nodeagent.environment import Here, rank_environment

LEARNERS = Role("learner", Gang(2, 2), Resources(gpus=1, cpus_milli=2_000, memory_mib=1_000), command=("learn",))
ACTORS = Role("actor", Gang(4, 4), Resources(cpus_milli=1_000, memory_mib=100), command=("act",), env={"A": "1"})


def cluster(*nodes: str, gpus: int = 8, **labels: str) -> Any:
    c = test_policy.Cluster()
    for node in nodes:
        c.join(node, gpus, **labels)
    return c


def submit(c: Any, job: str, *some: Role, **more: Any) -> None:
    c.add(ev.JobSubmitted(job=job, spec=JobSpec(("x",), roles=some, **more)))


def gangs(c: Any, job: str) -> dict[str, DesiredGang]:
    """Return what each node of a job is told about it."""
    return {node: next(g for g in project(c.state, node).gangs if g.job == job) for node in c.job(job).parts}


# ---------------------------------------------------------------- the layout


NESTED = parse_yaml("""
command: [serve]
env: {A: job, B: job}
roles:
  - name: router
  - name: engine
    replicas: 2
    min_replicas: 1
    topology: {required: nvlink, spread: rack, max_skew: 1}
    roles:
      - {name: prefill, resources: {gpus: 4}}
      - {name: decode, ranks: 4, min_ranks: 2, ranks_per_node: 2, resources: {gpus: 1}, command: [decode], env: {B: role}}
""")[0]


def test_leaves_are_in_the_order_of_ranks_and_replicas_have_their_own() -> None:
    found = [(leaf.path, leaf.role, leaf.replica, leaf.gang.ranks, leaf.command) for leaf in roles.leaves(NESTED)]
    assert found == [
        ("000-router", 0, 0, 1, ("serve",)),
        ("001-engine#0000/000-prefill", 1, 0, 1, ("serve",)), ("001-engine#0000/001-decode", 2, 0, 4, ("decode",)),
        ("001-engine#0001/000-prefill", 1, 1, 1, ("serve",)), ("001-engine#0001/001-decode", 2, 1, 4, ("decode",)),
    ]  # fmt: skip
    assert roles.leaves(NESTED)[2].env == {"A": "job", "B": "role"}
    engines = roles.tree(NESTED).members[1]
    assert isinstance(engines, roles.Group)
    assert (engines.needed, engines.topology.spread, engines.topology.required) == (1, "rack", "")
    assert [m.topology.required for m in engines.members] == ["nvlink", "nvlink"]


def test_sizes_and_amounts() -> None:
    assert roles.full(NESTED) == (1, 1, 4, 1, 4)
    assert roles.least(NESTED) == (1, 1, 2, 0, 0)
    assert roles.asked(NESTED) == (11, 16_000, 11_000, 0)
    assert roles.amounts(NESTED, roles.least(NESTED))[:2] == (4, 6_000)
    assert roles.recorded(NESTED, roles.full(NESTED)) == ()
    assert roles.placed(NESTED, (), 11) == roles.full(NESTED)
    assert roles.wrong_sizes(NESTED, (1, 0, 0, 1, 4)) == "", "which of the replicas are there does not matter"
    for wrong in ((1, 0, 0, 0, 0), (0, 1, 4, 1, 4), (1, 1, 1, 0, 0), (1, 1, 5, 0, 0), (1, 1, 4)):
        assert roles.wrong_sizes(NESTED, wrong)


def test_a_job_without_roles_is_one_leaf() -> None:
    spec = JobSpec(("x",), gang=Gang(4, 2), resources=Resources(gpus=2), env={"A": "1"})
    (leaf,) = roles.leaves(spec)
    assert (leaf.name, leaf.gang, leaf.resources, leaf.command, leaf.env) == ("", spec.gang, spec.resources, spec.command, spec.env)
    assert roles.recorded(spec, (3,)) == ()
    assert roles.placed(spec, (), 3) == (3,)


# ---------------------------------------------------------------- the job file


def test_roles_are_written_out_and_read_back() -> None:
    assert parse_json_spec(to_json(NESTED)) == NESTED
    assert NESTED.roles[0].resources == Resources()
    words = to_json(NESTED)
    assert "gang" not in words
    assert words["roles"][1]["roles"][1]["resources"] == {"gpus": 1, "cpus": 1}


def test_elastic_roles_keep_what_the_job_says_of_growing() -> None:
    spec = parse_json_spec({"command": ["x"], "elastic": {"grow_after": "1m"}, "roles": [{"name": "a", "ranks": 2, "min_ranks": 1}]})
    assert spec.elastic.grow_after_s == 60
    assert parse_json_spec(to_json(spec)) == spec


def test_resources_of_the_job_are_for_the_roles_that_have_none() -> None:
    body = {"command": ["x"], "resources": {"cpus": 4}, "roles": [{"name": "a"}, {"name": "b", "resources": {"gpus": 1}}]}
    a, b = parse_json_spec(body).roles
    assert (a.resources.cpus_milli, b.resources.cpus_milli, b.resources.gpus) == (4_000, 1_000, 1)


PROBLEMS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"roles": [{"name": "a"}]}, [("/roles/0", "GL-1103")]),
    ({"gang": {"ranks": 2}, "roles": [{"name": "a", "command": ["x"]}]}, [("/gang", "GL-1108")]),
    ({"elastic": {"step": 2}, "roles": [{"name": "a", "command": ["x"]}]}, [("/elastic/step", "GL-1108")]),
    ({"command": ["x"], "roles": [{"name": "a"}, {"name": "a"}, {}]}, [("/roles/1/name", "GL-1108"), ("/roles/2", "GL-1103")]),
    ({"command": ["x"], "roles": [{"name": "a", "ranks": 1, "roles": [{"name": "b"}]}]}, [("/roles/0/ranks", "GL-1108")]),
    ({"command": ["x"], "roles": [{"name": "a", "min_ranks": 0}]}, [("/roles", "GL-1108")]),
    ({"command": ["x"], "roles": [{"name": "a", "ranks": 3, "min_ranks": 4, "ranks_per_node": 2, "min_replicas": 2}]},
     [("/roles/0/min_ranks", "GL-1108"), ("/roles/0/min_replicas", "GL-1108"), ("/roles/0/ranks", "GL-1108")]),
    ({"command": ["x"], "topology": {"spread": "rack"}, "roles": [{"name": "a", "topology": {"balanced": "rack", "spread": "rack"}}]},
     [("/roles/0/topology/spread", "GL-1108"), ("/topology/spread", "GL-1108")]),
    ({"command": ["x"], "roles": [{"name": "a", "topology": {"spread": "rack"}, "roles": [{"name": "b"}]}]},
     [("/roles/0/topology/spread", "GL-1108")]),
    ({"command": ["x"], "topology": {"max_skew": 1, "required": "rack"}}, [("/topology/max_skew", "GL-1108")]),
    ({"command": ["x"], "roles": [{"name": "a", "ranks": 100_000, "replicas": 2}]}, [("/roles", "GL-1110")]),
    ({"command": ["x"], "roles": [{"name": "a", "replicas": 1_024}, {"name": "b"}]}, [("/roles", "GL-1110")]),
    ({"command": ["x"], "roles": [{"name": f"a{i}"} for i in range(257)]}, [("/roles", "GL-1110")]),
    ({"command": ["x"], "roles": [{"name": "a", "roles": [{"name": "b", "roles": [{"name": "c", "roles": [{"name": "d", "roles": [{}]}]}]}]}]},
     [("/roles/0/roles/0/roles/0/roles/0/roles", "GL-1110")]),
    ({"command": ["x"], "roles": [3, {"name": "b", "resources": {"gpu_model": "H100"}, "env": {"RANK": "1"}}]},
     [("/roles/0", "GL-1102"), ("/roles/1/env/RANK", "GL-1107"), ("/roles/1/resources/gpu_model", "GL-1108")]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "problems"), PROBLEMS)
def test_roles_that_are_refused(body: dict[str, Any], problems: list[tuple[str, str]]) -> None:
    with pytest.raises(BadJob) as bad:
        parse_json_spec(body)
    assert sorted({(p.pointer, p.code) for p in bad.value.problems}) == problems


def test_secrets_of_roles_are_hidden() -> None:
    role = Role("a", env={"MY_TOKEN": "s3cret"}, roles=(Role("b", env={"PASSWORD": "s3cret", "X": "1"}, command=("x",)),))
    assert "s3cret" not in str(shown_spec(JobSpec((), roles=(role,))))


# ---------------------------------------------------------------- placing, numbering


def test_each_rank_gets_what_its_role_asks_for() -> None:
    c = cluster("n1", gpus=2)
    c.join("n2", 0)
    submit(c, "rl", LEARNERS, ACTORS)
    c.cycle()
    job = c.job("rl")
    assert test_policy.placement(c, "rl") == {"n1": [0, 1], "n2": [2, 3, 4, 5]}, "ranks without GPUs go where there are none"
    assert [[r.gpus for r in p.ranks.values()] for p in job.parts.values()] == [[(0,), (1,)], [(), (), (), ()]]
    assert job.holds() == (6, 2_000, 8_000, 2_400)
    held = [(n.holdings["rl"].cpus_milli, n.holdings["rl"].memory_mib) for n in c.state.nodes.values()]
    assert held == [(4_000, 2_000), (4_000, 400)]
    (row,) = queue_rows(c.state, c.now)
    assert (row.allocated.gpus, row.allocated.cpus, row.allocated.memory_mib) == (2, 8.0, 2_400)


def test_parts_are_in_the_order_of_their_lowest_ranks() -> None:
    c = cluster("n1", "n2", gpus=1)
    submit(c, "rl", LEARNERS, Role("actor", Gang(4, 4), Resources(cpus_milli=31_000)))
    c.cycle()
    assert test_policy.placement(c, "rl") == {"n1": [0, 2, 3], "n2": [1, 4, 5]}
    submit(c, "more", Role("a", Gang(2, 2), Resources()))
    c.cycle()
    assert c.job("more").state == "queued", "CPUs are counted by role"


def test_a_gang_with_roles_is_placed_whole_or_waits_and_says_why() -> None:
    c = cluster("n1", gpus=2)
    submit(c, "rl", LEARNERS, Role("actor", Gang(61, 61), Resources(cpus_milli=1_000)))
    c.cycle()
    job = c.job("rl")
    assert (job.state, job.deferral.code, job.deferral.message) == ("queued", "not_enough_cpus", "needs 65 CPUs; 64 CPUs idle or soon so")
    assert start_of(c.state, job, c.now).at_ms is None


def test_an_estimate_lays_roles_out_one_after_another() -> None:
    c = cluster("n1", gpus=2)
    submit(c, "first", LEARNERS, Role("actor", Gang(50, 50), Resources(cpus_milli=1_000)), time_limit_s=100.0)
    c.cycle()
    c.run("first")
    submit(c, "second", Role("a", Gang(20, 20), Resources(cpus_milli=1_000)), Role("b", Gang(40, 40), Resources(cpus_milli=1_000)))
    c.cycle()
    assert start_of(c.state, c.job("second"), c.now).at_ms == c.now + 100_000
    too_large = JobSpec(("x",), roles=(LEARNERS, Role("b", Gang(3, 3), Resources(gpus=1))))
    planned = plan(c.state, too_large, c.now)
    assert planned.outcome == "waits"
    c.add(ev.JobSubmitted(job="third", spec=JobSpec(("x",), roles=(LEARNERS, Role("b", Gang(3, 3), Resources(gpus=1))))))
    assert "3 ranks of role b" in start_of(c.state, c.job("third"), c.now).basis


def test_elastic_roles_start_smaller_and_say_so() -> None:
    c = cluster("n1", gpus=3)
    some = (Role("a", Gang(2, 1), Resources(gpus=1)), Role("b", Gang(4, 1), Resources(gpus=1)))
    submit(c, "e", *some)
    placed = test_policy.only(c.cycle(), ev.GangPlaced)
    assert placed.role_sizes == (2, 1) or placed.role_sizes == (1, 2)
    job = c.job("e")
    assert job.sizes() == placed.role_sizes
    assert [r.leaf for r in job.parts["n1"].ranks.values()] == roles.leaf_of_ranks(placed.role_sizes)
    assert load_state(dump_state(c.state)).jobs["e"].sizes() == placed.role_sizes
    c.run("e")
    c.end("e", 0, code=1)
    again = test_policy.only([e for e in c.cycle() if isinstance(e, ev.GangPlaced)], ev.GangPlaced)
    assert (again.role_sizes, again.parts) == (placed.role_sizes, placed.parts), "a restart in place keeps the roles"


def test_a_gang_that_is_placed_is_not_said_to_wait_for_more() -> None:
    """It is served before all others, since room was made for it; so all others that are looked at then include it with its surplus."""
    c = cluster("n1", gpus=2)
    c.submit("low", ranks=2, priority=10)
    c.cycle()
    c.run("low")
    submit(c, "high", Role("a", Gang(2, 1), Resources(gpus=1)), Role("b", Gang(2, 1), Resources(gpus=1)), priority=50)
    assert test_policy.only([e for e in c.cycle() if isinstance(e, ev.GangPreempting)], ev.GangPreempting).job == "low"
    c.end("low", 0)
    c.end("low", 1)
    found = c.cycle()
    assert c.job("high").state == "placed"
    assert not [e for e in found if isinstance(e, ev.GangsDeferred) and "high" in e.jobs]


def test_replicas_that_have_no_room_are_left_out() -> None:
    c = cluster("n1", "n2", gpus=4)
    pair = (Role("p", Gang(1, 1), Resources(gpus=1)), Role("d", Gang(2, 2), Resources(gpus=1)))
    submit(c, "s", Role("engine", replicas=4, min_replicas=2, roles=pair, topology=TopologyRequest(required="hostname")))
    placed = test_policy.only(c.cycle(), ev.GangPlaced)
    assert placed.role_sizes == (1, 2, 1, 2, 0, 0, 0, 0)
    assert test_policy.placement(c, "s") == {"n1": [0, 1, 2], "n2": [3, 4, 5]}
    row = {r.name: r for r in whole_job(c.job("s")).roles}
    assert (row["d"].ranks, row["d"].asked_ranks, row["d"].min_ranks, row["d"].replicas, row["d"].nodes) == (4, 8, 4, 2, ["n1", "n2"])


def test_roles_are_placed_in_the_order_of_the_file() -> None:
    c = cluster("n1", gpus=3)
    submit(c, "e", Role("z", Gang(2, 1), Resources(gpus=1)), Role("a", Gang(4, 1), Resources(gpus=1)))
    assert test_policy.only(c.cycle(), ev.GangPlaced).role_sizes == (2, 1)


def test_nobody_leaves_for_replicas_that_a_job_can_do_without() -> None:
    c = cluster("n1", gpus=4)
    c.submit("low", ranks=2, priority=10)
    c.cycle()
    c.run("low")
    pair = (Role("p", Gang(1, 1), Resources(gpus=1)), Role("d", Gang(1, 1), Resources(gpus=1)))
    submit(c, "s", Role("engine", replicas=2, min_replicas=1, roles=pair), priority=50)
    for _ in range(5):
        found = c.cycle()
        assert not [e for e in found if isinstance(e, (ev.GangPreempting, ev.GangReserved))]
        if c.job("s").state == "placed":
            c.run("s")
        c.now += 600_000
    assert c.job("s").sizes() == (1, 1, 0, 0)
    submit(c, "t", Role("engine", replicas=2, min_replicas=2, roles=pair), priority=90)
    assert {e.job for e in c.cycle() if isinstance(e, ev.GangPreempting)} == {"low", "s"}, "what it cannot do without is another matter"


def test_topologies_of_roles_hold_inside_of_that_of_the_job() -> None:
    c = test_policy.Cluster()
    c.add(ev.QueuesDeclared(queues=(QueueSpec("default", quota=Amounts()),), topologies=(Topology("default", ("block", "rack")),)))
    for i in range(8):
        c.join(f"n{i}", 2, block=f"b{i // 4}", rack=f"r{i // 2}")
    wide = Role("wide", Gang(2, 2), Resources(gpus=1), topology=TopologyRequest(spread="rack", max_skew=1))
    near = Role("near", Gang(4, 4), Resources(gpus=1), topology=TopologyRequest(required="rack"))
    c.add(ev.JobSubmitted(job="j", spec=JobSpec(("x",), roles=(wide, near), topology=TopologyRequest(required="block"))))
    c.cycle()
    assert c.job("j").state == "queued", "in each of the two racks of a block one rank of wide has a GPU that near would need"
    c.add(ev.JobSubmitted(job="k", spec=JobSpec(("x",), roles=(near, wide), topology=TopologyRequest(preferred="block"))))
    c.cycle()
    assert c.job("k").state == "placed"


def test_a_role_is_in_its_rack_and_another_spread_over_all() -> None:
    c = test_policy.Cluster()
    c.add(ev.QueuesDeclared(queues=(QueueSpec("default", quota=Amounts()),), topologies=(Topology("default", ("rack",)),)))
    for i in range(6):
        c.join(f"n{i}", 4, rack=f"r{i // 2}")
    near = Role("near", Gang(4, 4), Resources(gpus=1), topology=TopologyRequest(required="rack"))
    wide = Role("wide", Gang(6, 6), Resources(gpus=1), topology=TopologyRequest(spread="rack", max_skew=1))
    submit(c, "j", near, wide)
    c.cycle()
    racks = {r: c.state.nodes[n].registration.labels["rack"] for n, p in c.job("j").parts.items() for r in p.ranks}
    assert len({racks[r] for r in range(4)}) == 1
    assert sorted(racks[r] for r in range(4, 10)) == ["r0", "r0", "r1", "r1", "r2", "r2"]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_ranks_of_a_role_enter_each_domain_once(nodes: int, gpus: int, sizes: list[int], random: Any) -> None:
    """Along the ring of ranks 0 → 1 → … → 0 the number of changes between domains is the least possible, on each level at once."""
    c = test_policy.Cluster()
    levels = ("zone", "rack")
    c.add(ev.QueuesDeclared(queues=(QueueSpec("default", quota=Amounts()),), topologies=(Topology("default", levels),)))
    for i in random.sample(range(nodes), nodes):
        c.join(f"n{i}", gpus, zone=f"z{random.randrange(2)}", rack=f"r{random.randrange(2)}")
    submit(c, "j", *(Role(f"x{i}", Gang(size, 1), Resources(gpus=1)) for i, size in enumerate(sizes)))
    c.cycle()
    job = c.job("j")
    where = {r: node for node, part in job.parts.items() for r in part.ranks}
    assert sorted(where) == list(range(len(where)))
    first = 0
    for size in job.sizes() if where else ():
        ring = [c.state.nodes[where[r]] for r in range(first, first + size)]
        first += size
        for depth in (1, 2, 3):
            paths = [(n.registration.labels["zone"], n.registration.labels["rack"], n.id)[:depth] for n in ring]
            changes = sum(a != b for a, b in pairwise([*paths, paths[0]]))
            assert changes == (len(set(paths)) if len(set(paths)) > 1 else 0)


# ---------------------------------------------------------------- what the log refuses


def placed_event(parts: list[tuple[str, list[tuple[int, list[int]]]]], sizes: tuple[int, ...] = ()) -> ev.GangPlaced:
    every = tuple(ev.PlacedPart(n, tuple(ev.PlacedRank(r, tuple(g)) for r, g in ranks)) for n, ranks in parts)
    return ev.GangPlaced(job="rl", generation=1, parts=every, role_sizes=sizes)


A = (0, [0])
B = (1, [1])
WRONG = [
    ([("n1", [A, B, (2, []), (3, []), (4, [])])], (2, 3), "with 4 to 4"),
    ([("n1", [A, B, (2, []), (3, []), (4, []), (5, [2])])], (), "rank 5"),
    ([("n1", [A, (1, []), (2, [1]), (3, []), (4, []), (5, [])])], (), "rank 1"),
    ([("n1", [B, A, (2, []), (3, []), (4, []), (5, [])])], (), "ascend"),
    ([("n2", [(2, []), (3, [])]), ("n1", [A, B, (4, []), (5, [])])], (), "ascend"),
    ([("n1", [A, B, (2, []), (3, []), (4, []), (6, [])])], (), "0 to n - 1"),
    ([("n1", [A, B, (2, []), (3, []), (4, []), (5, [])]), ("n2", [])], (), "without ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "sizes", "why"), WRONG)
def test_placements_that_do_not_match_the_roles_are_refused(parts: Any, sizes: tuple[int, ...], why: str) -> None:
    c = cluster("n1", "n2")
    submit(c, "rl", LEARNERS, ACTORS)
    before = dump_state(c.state)
    with pytest.raises(IllegalTransition, match=why):
        c.add(placed_event(parts, sizes))
    assert dump_state(c.state) == before
    c.add(placed_event([("n1", [A, (2, []), (3, [])]), ("n2", [(1, [0]), (4, []), (5, [])])]))


# ---------------------------------------------------------------- what ranks are told


def test_ranks_are_told_of_their_roles_as_torchelastic_does() -> None:
    c = cluster("n1", "n2", gpus=1)
    submit(c, "rl", LEARNERS, Role("actor", Gang(4, 4), Resources(cpus_milli=31_000), command=("act",), env={"A": "1"}))
    c.cycle()
    spec, told = c.job("rl").spec, {}
    for node, gang in gangs(c, "rl").items():
        for rank in gang.ranks:
            env = rank_environment(gang, rank, spec, Here(node, {}, {}, True, "", 0, "", ""))
            told[rank.rank] = {word: env[word] for word in (
                "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK",
                "WORLD_SIZE", "GANGLINE_ROLE", "GANGLINE_ROLE_LEADERS", "OMP_NUM_THREADS")} | {"A": env.get("A")}  # fmt: skip

    def of(rank: int, *words: str) -> list[str]:
        return [told[rank][word] for word in words]

    # n1: learner 0, actors 2 and 3; n2: learner 1, actors 4 and 5. Groups in order: learners of n1, actors of n1, learners of n2, actors of n2.
    assert [of(r, "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE") for r in range(6)] == [
        ["learner", "0", "2"], ["learner", "1", "2"], ["actor", "0", "4"], ["actor", "1", "4"], ["actor", "2", "4"], ["actor", "3", "4"],
    ]  # fmt: skip
    assert [of(r, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK") for r in range(6)] == [
        ["0", "1", "0", "0"], ["0", "1", "2", "1"], ["0", "2", "1", "0"], ["1", "2", "1", "0"], ["0", "2", "3", "1"], ["1", "2", "3", "1"],
    ]  # fmt: skip
    assert of(5, "GROUP_WORLD_SIZE", "WORLD_SIZE", "GANGLINE_ROLE", "A", "OMP_NUM_THREADS") == ["4", "6", "actor", "1", "31"]
    assert told[0]["A"] is None
    assert told[0]["GANGLINE_ROLE_LEADERS"] == "learner=n1,actor=n1"


def test_replicas_share_the_numbers_of_their_role() -> None:
    c = cluster("n1", gpus=8)
    submit(c, "s", Role("engine", replicas=2, roles=(Role("p", Gang(1, 1)), Role("d", Gang(2, 2)))))
    c.cycle()
    (gang,) = gangs(c, "s").values()
    assert [(r.rank, r.role, r.role_rank, r.replica, r.local_rank) for r in gang.ranks] == [
        (0, 0, 0, 0, 0), (1, 1, 0, 0, 0), (2, 1, 1, 0, 1), (3, 0, 1, 1, 1), (4, 1, 2, 1, 2), (5, 1, 3, 1, 3),
    ]  # fmt: skip
    assert [(r.name, r.ranks, r.group) for r in gang.roles] == [("p", 2, 0), ("d", 4, 1)]
    assert gang.groups == 2


def test_without_roles_the_numbers_are_those_of_the_gang() -> None:
    c = cluster("n1", "n2", gpus=2)
    c.submit("j", ranks=4)
    c.cycle()
    for node_rank, gang in enumerate(gangs(c, "j").values()):
        assert [(r.rank, r.role_rank, r.local_rank) for r in gang.ranks] == [(2 * node_rank + i, 2 * node_rank + i, i) for i in (0, 1)]
        assert [(r.name, r.ranks, r.group) for r in gang.roles] == [("", 4, node_rank)]
        assert gang.groups == 2


def test_the_story_names_roles() -> None:
    text = sentence(ev.JobSubmitted(job="j", spec=JobSpec((), roles=(LEARNERS, ACTORS))))
    assert "6 ranks in the roles learner (2) and actor (4), 2 GPUs" in text
