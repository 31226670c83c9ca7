"""Reservations that people declare: who is kept off before, what happens at the start, and after the end."""

from __future__ import annotations

import pytest
from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.reservations import KeptNode, Reservation
from gangline.core.model.spec import Gang, Preemption, Resources
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.windows import LEAD_MS, choose

HOUR = 3600.0


def declare(c: Cluster, *nodes: str, start_s: float = HOUR, length_s: float = HOUR, gpus: int = -1, **more: object) -> None:
    start = c.now + int(start_s * 1000)
    kept = tuple(KeptNode(node, gpus) for node in nodes)
    c.add(ev.ReservationDeclared(reservation=Reservation("r", kept, start, start + int(length_s * 1000), **more)))  # type: ignore[arg-type]


def test_nothing_is_started_that_would_not_end_before_a_maintenance() -> None:
    c = Cluster("n1")
    declare(c, "n1", maintenance=True)
    c.submit("long", ranks=2, time_limit_s=2 * HOUR)
    c.submit("short", ranks=2, time_limit_s=HOUR / 2)
    c.submit("stays", ranks=2, preemptible=False)
    c.submit("moves", ranks=2)
    c.at(1)
    assert c.states("long", "short", "stays", "moves") == ["queued", "placed", "queued", "placed"]
    assert c.code("long") == c.code("stays") == "maintenance"
    assert "maintenance r (from 1970-01-01 01:16 UTC)" in c.job("long").deferral.message  # type: ignore[union-attr]


def test_at_its_start_the_nodes_are_drained_and_at_its_end_given_back() -> None:
    c = Cluster("n1", "n2")
    c.submit("moves", ranks=8, preemption=Preemption(grace_s=5))
    c.submit("stays", ranks=4, preemptible=False)
    c.cycle()
    c.run_all()
    moves, stays = c.job("moves").nodes(), c.job("stays").nodes()
    declare(c, *moves, *stays, maintenance=True, by="ann", reason="new fans", deadline_s=600.0)
    assert c.at(HOUR - 1) == []
    begun = c.at(1)
    assert [e.name for e in of(begun, ev.ReservationBegun) if isinstance(e, ev.ReservationBegun)] == ["r"]
    assert [e.job for e in of(begun, ev.GangPreempting) if isinstance(e, ev.GangPreempting)] == ["moves"]
    assert {n.id for n in c.state.nodes.values() if n.draining} == {"n1", "n2"}
    assert c.state.nodes["n1"].reason == "reservation r: new fans"
    c.at(600)
    assert c.job("stays").state == "preempting", "after the deadline everybody leaves"
    c.at(HOUR)
    assert c.state.reservations == {}
    assert not any(n.draining for n in c.state.nodes.values())


def test_who_has_given_a_node_back_by_hand_is_not_overruled() -> None:
    c = Cluster("n1", "n2")
    declare(c, "n1", "n2", maintenance=True)
    c.at(HOUR)
    c.add(ev.NodeAdministered(node="n1", action="undrain"))
    c.add(ev.NodeAdministered(node="n2", action="drain", reason="it is broken, too"))
    c.submit("a")
    c.at(1)
    assert c.job("a").nodes() == ["n1"]
    c.at(HOUR)
    assert [n.id for n in c.state.nodes.values() if n.draining] == ["n2"]


def test_nodes_are_kept_for_a_user_and_a_queue() -> None:
    c = Cluster("n1", "n2")
    c.submit("other", ranks=8)
    c.cycle()
    c.run_all()
    [node] = c.job("other").nodes()
    declare(c, node, users=("ann",))
    c.submit("fixed", ranks=8, preemptible=False)
    c.at(1)
    assert c.job("fixed").nodes() != [node]
    c.run_all()
    begun = c.at(HOUR)
    assert [(e.job, e.cause) for e in of(begun, ev.GangPreempting) if isinstance(e, ev.GangPreempting)] == [("other", "reserved")]
    c.at(30)
    c.release()
    c.cycle()
    assert c.code("other") == "reserved_for"
    c.submit("hers", ranks=4, user="ann")
    c.submit("his", ranks=4, user="ben", priority=60)
    c.at(1)
    assert c.job("hers").nodes() == [node]
    assert c.states("his", "other") == ["queued", "queued"]
    c.at(HOUR)
    assert c.job("other").state == "queued"
    assert c.job("his").nodes() == [node], "four are left when it is over"


def test_until_then_others_may_use_it_if_they_can_be_moved() -> None:
    c = Cluster("n1")
    declare(c, "n1", queues=("default",), start_s=HOUR)
    c.submit("moves", ranks=2, time_limit_s=3 * HOUR)
    c.submit("stays", ranks=2, time_limit_s=3 * HOUR, preemptible=False)
    c.at(1)
    assert c.states("moves", "stays") == ["placed", "queued"]
    c.at(HOUR - LEAD_MS / 1000)
    c.submit("late", ranks=2, time_limit_s=3 * HOUR)
    c.at(1)
    assert c.job("late").state == "queued"
    c.at(LEAD_MS / 1000)
    assert c.states("late", "stays") == ["placed", "placed"], "all are owners"


def test_some_gpus_of_a_node_are_kept() -> None:
    c = Cluster("n1")
    declare(c, "n1", gpus=3, users=("ann",), start_s=0)
    for i in range(6):
        c.submit(f"j{i}")
    c.submit("hers", ranks=3, user="ann")
    c.at(1)
    assert [c.job(f"j{i}").state for i in range(6)] == ["placed"] * 5 + ["queued"]
    assert c.job("hers").state == "placed"
    assert c.code("j5") == "not_enough_gpus"


def test_a_gang_whose_minimum_waits_does_not_start_its_surplus_on_what_is_kept() -> None:
    c = Cluster("n1", "n2")
    for job, gpus in (("stays", 6), ("leaves", 2), ("here", 7)):
        c.submit(job, ranks=1, gpus=gpus)
    c.cycle()
    c.run_all()
    declare(c, *c.job("here").nodes(), users=("ann",))
    c.add(ev.JobStopRequested(job="leaves"))
    c.submit("grows", gang=Gang(3, 2), resources=Resources(gpus=1, cpus_milli=100))
    c.at(1)
    assert (c.job("grows").state, c.code("grows")) == ("queued", "reserved")
    c.release()
    c.at(1)
    assert c.job("grows").state == "placed"


def test_nobody_is_evicted_on_nodes_that_are_kept() -> None:
    c = Cluster("n1")
    c.submit("low", ranks=8)
    c.cycle()
    c.run_all()
    declare(c, "n1", maintenance=True)
    c.submit("high", ranks=8, priority=90, time_limit_s=2 * HOUR)
    c.at(1)
    assert c.job("low").state == "running"
    c.submit("brief", ranks=8, priority=90, time_limit_s=HOUR / 4)
    c.at(1)
    assert c.job("low").state == "preempting"


def test_gpus_are_chosen_where_nobody_stays() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("stays", ranks=6, preemptible=False)
    c.cycle()
    c.run_all()
    [busy] = c.job("stays").nodes()
    start = c.now + 3_600_000
    found = choose(c.state, 18, start, c.now)
    assert found is not None
    assert (sum(k.gpus for k in found), found[-1]) == (18, KeptNode(busy, 2))
    assert choose(c.state, 19, start, c.now) is None
    declare(c, "n1", maintenance=True)
    assert choose(c.state, 18, start, c.now) is None


def test_a_reservation_is_in_the_state_and_refused_if_it_makes_no_sense() -> None:
    from gangline.core.model.fold import IllegalTransition

    c = Cluster("n1")
    declare(c, "n1", maintenance=True)
    assert load_state(dump_state(c.state)).reservations == c.state.reservations
    for nodes, more in ((("n1",), {"maintenance": True}), (("n9",), {"maintenance": True}), (("n1",), {})):
        with pytest.raises(IllegalTransition):
            declare(c, *nodes, **more)


def test_removing_a_maintenance_gives_its_nodes_back() -> None:
    c = Cluster("n1")
    declare(c, "n1", maintenance=True, start_s=0)
    c.at(1)
    assert c.state.nodes["n1"].draining
    c.add(ev.ReservationRemoved(name="r", by="ann"))
    c.at(1)
    assert not c.state.nodes["n1"].draining
    assert c.state.reservations == {}
