"""Gangs that change their size: decided by the production passes, over the fold, at a time that the test sets."""

from __future__ import annotations

import pytest
from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.fold import IllegalTransition, apply
from gangline.core.model.project import project
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Elastic, Gang, Preemption, Role
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all, decide
from gangline.leader.whyrows import why_row

GROW = Elastic(grow_after_s=60.0)


def sizes(c: Cluster, job: str) -> dict[str, int]:
    return {n: len(p.ranks) for n, p in c.job(job).parts.items()}


def resizing(events: list[ev.LogEvent]) -> ev.GangResizing:
    (found,) = of(events, ev.GangResizing)
    assert isinstance(found, ev.GangResizing)
    return found


def acknowledge(c: Cluster, job: str) -> None:
    j = c.job(job)
    for node, part in j.parts.items():
        if not part.acknowledged:
            c.add(ev.StopAcknowledged(job=job, generation=j.generation, node=node))


def half_taken(**more: object) -> Cluster:
    """An elastic gang of 8 to 16 ranks runs with 8 on one node, since the other node is taken."""
    c = Cluster("n1", "n2")
    c.submit("other", ranks=8)
    c.cycle()
    c.run("other")
    c.submit("a", gang=Gang(16, 8), **{"elastic": GROW, **more})  # type: ignore[arg-type]
    c.cycle()
    c.run("a")
    assert c.job("a").world_size == 8
    return c


def free(c: Cluster, job: str = "other") -> list[ev.LogEvent]:
    c.end(job)
    out = c.cycle()
    c.release()
    return out + c.cycle()


def grown() -> Cluster:
    """The same gang, running with 16 ranks."""
    c = half_taken()
    free(c)
    c.at(60)
    acknowledge(c, "a")
    c.cycle()
    c.run("a")
    assert c.job("a").world_size == 16
    return c


# ---------------------------------------------------------------- growing


def test_it_grows_when_it_has_run_for_a_while_and_keeps_its_devices() -> None:
    c = half_taken()
    first = c.job("a").nodes()[0]
    assert not of(free(c), ev.GangResizing), "it has only just started"
    assert not of(c.at(59), ev.GangResizing)
    e = resizing(c.at(1))
    assert (e.cause, [p.node for p in e.parts], sum(len(p.ranks) for p in e.parts)) == ("grow", ["n1", "n2"], 16)
    job = c.job("a")
    assert job.state == "resizing"
    assert sizes(c, "a") == {first: 8}, "it runs on as it is"
    assert [len(n.holdings["a"].gpus) for n in c.state.nodes.values()] == [8, 8], "and holds what it will have"
    notice = project(c.state, first).gangs[0].notice
    assert notice is not None
    assert (notice.cause, notice.deadline_ms) == ("resize", c.now + 30_000)
    assert project(c.state, first).gangs[0].phase == "run"
    assert not project(c.state, next(n for n in c.state.nodes if n != first)).gangs

    assert c.at(10) == []
    acknowledge(c, "a")
    (placed,) = of(c.cycle(), ev.GangPlaced)
    assert isinstance(placed, ev.GangPlaced)
    assert (placed.generation, job.world_size, job.resize, job.notice) == (2, 16, None, None)
    restart = job.restart
    assert restart is not None
    assert (restart.cause, restart.old_world_size, restart.new_world_size) == ("resize", 8, 16)
    assert restart.failed_at_ms == c.now
    assert len(restart.new_nodes) == 1
    assert job.failures_ms == []
    c.run("a")
    assert c.at(3600) == []


def test_nobody_else_gets_what_it_grows_onto() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    c.submit("late", ranks=8)
    assert not of(c.cycle(), ev.GangPlaced)
    assert c.job("late").state == "queued"


def test_it_grows_at_the_deadline_although_nobody_answers() -> None:
    c = half_taken(preemption=Preemption(grace_s=5.0))
    free(c)
    c.at(60)
    assert c.at(4.9) == []
    assert of(c.at(0.1), ev.GangPlaced)


def test_it_grows_in_steps() -> None:
    c = half_taken(elastic=Elastic(grow_after_s=60.0, step=4))
    c.submit("small", ranks=1)
    free(c)
    assert c.job("small").state == "placed"
    assert sum(len(p.ranks) for p in resizing(c.at(60)).parts) == 12


def test_whole_nodes_of_its_unit() -> None:
    c = Cluster("n1", "n2", "n3")
    for job in ("x", "y"):
        c.submit(job, ranks=8)
    c.cycle()
    c.submit("a", gang=Gang(12, 4, 4), elastic=GROW)
    c.cycle()
    c.run("a", "x", "y")
    assert sizes(c, "a") == {"n3": 4}, "one unit on a node"
    free(c, "x")
    e = resizing(c.at(60))
    assert {p.node: len(p.ranks) for p in e.parts} == {"n1": 4, "n3": 4}


def test_nobody_grows_before_those_who_wait() -> None:
    """Eight GPUs come free: the gang that waits for ten cannot start, and would never if others took them."""
    c = half_taken()
    c.submit("waits", ranks=10)
    free(c)
    assert c.at(60) == []
    c.add(ev.JobStopRequested(job="waits"))
    c.cycle()
    assert c.job("a").state == "resizing"


def test_what_can_never_run_is_in_nobodys_way() -> None:
    c = half_taken()
    c.submit("huge", ranks=100)
    free(c)
    assert resizing(c.at(60)).cause == "grow"


def test_it_does_not_grow_onto_what_would_be_taken_back_at_once() -> None:
    """Queue q waits for nine GPUs of which eight are idle. If it is entitled to nine, it would reclaim what p grew onto."""
    for quota, grows in ((4, False), (8, True)):
        c = Cluster("n1", "n2")
        p = QueueSpec("p", quota=Amounts(quota * 1000, None, None), reclaim_min_runtime_s=3600.0)
        c.add(ev.QueuesDeclared(queues=(p, QueueSpec("q", quota=Amounts((16 - quota) * 1000, None, None)))))
        c.submit("other", ranks=8, queue="p")
        c.cycle()
        c.submit("a", gang=Gang(16, 8), elastic=GROW, queue="p")
        c.cycle()
        c.run("a", "other")
        free(c)
        c.submit("b", ranks=9, queue="q")
        assert bool(of(c.at(60), ev.GangResizing)) is grows, quota


def test_it_does_not_grow_shortly_before_its_time_is_over() -> None:
    c = half_taken(time_limit_s=110.0)
    free(c)
    assert not of(c.at(60), ev.GangResizing)


def test_a_job_of_one_size_never_changes_it() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=4)
    c.cycle()
    c.run("a")
    assert c.at(10_000) == []


def test_replicas_of_a_role_grow_and_shrink_whole() -> None:
    c = Cluster("n1", "n2")
    c.submit("other", ranks=8)
    c.cycle()
    serving = Role("serve", gang=Gang(4, 4), resources=c.job("other").spec.resources, replicas=4, min_replicas=2)
    c.submit("a", roles=(serving,), elastic=GROW, gang=Gang())
    c.cycle()
    c.run("a", "other")
    assert c.job("a").sizes() == (4, 4, 0, 0)
    free(c)
    resizing(c.at(60))
    acknowledge(c, "a")
    c.cycle()
    c.run("a")
    assert c.job("a").sizes() == (4, 4, 4, 4)
    c.submit("vip", ranks=4, priority=90)
    e = resizing(c.cycle())
    assert (e.cause, e.role_sizes, e.beneficiary) == ("shrink", (4, 4, 4, 0), "vip")


# ---------------------------------------------------------------- shrinking


def test_it_gives_up_what_it_can_do_without() -> None:
    c = grown()
    c.submit("vip", ranks=6, priority=90)
    e = resizing(c.cycle())
    assert (e.cause, e.beneficiary, sum(len(p.ranks) for p in e.parts)) == ("shrink", "vip", 10)
    assert c.job("vip").state == "queued"
    acknowledge(c, "a")
    c.cycle()
    assert sizes(c, "a") == {"n1": 8, "n2": 2}
    c.cycle()
    assert c.job("vip").state == "queued", "the ranks that go may still be there"
    c.run("a")
    c.cycle()
    assert c.job("vip").nodes() == ["n2"]
    c.run("vip")
    assert c.at(3600) == [], "neither grows back into it, nor is asked again"
    restart = c.job("a").restart
    assert restart is not None
    assert (restart.cause, restart.old_world_size, restart.new_world_size) == ("resize", 16, 10)


def test_several_slices_are_one_change_and_whole_nodes_go_first() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", gang=Gang(20, 4), elastic=GROW)
    c.cycle()
    c.run("a")
    few = min(sizes(c, "a"), key=lambda n: sizes(c, "a")[n])
    c.submit("v1", ranks=4, priority=90)
    c.submit("v2", ranks=8, priority=90)
    events = c.cycle()
    e = resizing(events)
    assert c.job("v1").nodes() == [few], "what was idle"
    assert sum(len(p.ranks) for p in e.parts) == 12
    assert few not in [p.node for p in e.parts]


def test_it_leaves_as_a_whole_when_its_minimum_is_needed() -> None:
    c = grown()
    c.submit("vip", ranks=12, priority=90)
    events = c.cycle()
    assert not of(events, ev.GangResizing)
    assert of(events, ev.GangPreempting)


def test_a_job_of_one_size_is_evicted_whole() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=16)
    c.cycle()
    c.run("a")
    c.submit("vip", ranks=2, priority=90)
    assert of(c.cycle(), ev.GangPreempting)


def test_what_it_is_growing_onto_can_be_taken_back() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    c.submit("vip", ranks=8, priority=90)
    events = c.cycle()
    e = resizing(events)
    assert (e.cause, sum(len(p.ranks) for p in e.parts)) == ("shrink", 8)
    assert c.job("vip").state == "placed", "nothing has run there, so it is free at once"
    acknowledge(c, "a")
    c.cycle()
    assert c.job("a").world_size == 8
    assert c.job("a").generation == 2


def test_a_second_reason_to_shrink_does_not_ask_again() -> None:
    c = grown()
    c.submit("v1", ranks=2, priority=90)
    c.cycle()
    notice = c.job("a").notice
    acknowledge(c, "a")
    c.now += 1
    c.add(ev.JobSubmitted(job="v2", spec=c.job("v1").spec))
    found = decide(c.state, c.now)
    # what was asked for first is decided first
    assert of(found, ev.GangPlaced)
    c = grown()
    c.submit("v1", ranks=2, priority=90)
    c.cycle()
    notice = c.job("a").notice
    c.submit("v2", ranks=2, priority=90)
    assert sum(len(p.ranks) for p in resizing(c.at(1)).parts) == 12
    assert c.job("a").notice == notice


def test_it_may_have_to_leave_while_it_grows() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    c.submit("vip", ranks=16, priority=90)
    c.cycle()
    job = c.job("a")
    assert (job.state, job.resize) == ("preempting", None)
    assert list(job.held_nodes) == job.nodes()
    c.at(30)
    c.release()
    c.cycle()
    assert c.job("vip").state == "placed"


# ---------------------------------------------------------------- what goes wrong on the way


def test_what_is_left_goes_on_at_once_when_a_node_is_lost() -> None:
    c = grown()
    c.at(5)
    c.add(ev.NodeLost(node="n2", cause="lease_expired", message="gone"))
    events = c.cycle()
    e = resizing(events)
    assert (e.cause, e.lost_nodes, e.lost_ranks) == ("node_lost", ("n2",), tuple(range(8, 16)))
    job = c.job("a")
    assert (job.state, sizes(c, "a"), job.generation) == ("placed", {"n1": 8}, 3)
    restart = job.restart
    assert restart is not None
    assert (restart.cause, restart.lost_nodes, restart.old_world_size, restart.new_world_size) == ("node_lost", ("n2",), 16, 8)
    c.run("a")
    c.join("n2")
    assert not of(c.at(1), ev.GangResizing)
    assert resizing(c.at(60)).cause == "grow"


def test_what_is_lost_is_replaced_at_once_where_there_is_room() -> None:
    c = grown()
    c.join("n3")
    c.at(5)
    c.add(ev.NodeLost(node="n2", cause="lease_expired", message="gone"))
    c.cycle()
    job = c.job("a")
    assert (job.state, sizes(c, "a")) == ("placed", {"n1": 8, "n3": 8})
    restart = job.restart
    assert restart is not None
    assert (restart.cause, restart.lost_nodes, restart.new_nodes) == ("node_lost", ("n2",), ("n3",))
    assert (restart.old_world_size, restart.new_world_size) == (16, 16)
    c.run("a")
    assert c.at(3600) == []


def test_too_little_is_left() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", gang=Gang(24, 12), elastic=GROW)
    c.cycle()
    c.run("a")
    for node in ("n1", "n2"):
        c.add(ev.NodeLost(node=node, cause="lease_expired", message="gone"))
    events = c.cycle()
    assert of(events, ev.GangRequeued)
    assert not of(events, ev.GangResizing)


def test_a_node_that_cannot_prepare_is_left_out() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    acknowledge(c, "a")
    c.cycle()
    new = next(n for n in c.job("a").nodes() if n not in c.job("a").previous_nodes)
    c.add(ev.PrepareFailed(job="a", generation=2, node=new, message="no disk"))
    e = resizing(c.cycle())
    assert (e.cause, [n for n, _ in e.avoid]) == ("prepare_failed", [new])
    job = c.job("a")
    assert (job.state, job.generation, job.world_size) == ("placed", 3, 8)
    c.release()
    c.cycle()
    c.run("a")
    assert not of(c.at(59), ev.GangResizing)
    assert of(c.at(2), ev.GangResizing), "the node is not avoided any more"


@pytest.mark.parametrize("how", ["lost", "back", "draining"])
def test_the_place_to_grow_onto_is_gone_before_the_ranks_have_answered(how: str) -> None:
    c = half_taken()
    free(c)
    c.at(60)
    job = c.job("a")
    (new,) = job.pending_nodes
    if how == "draining":
        c.add(ev.NodeAdministered(node=new, action="drain"))
    else:
        c.add(ev.NodeLost(node=new, cause="rebooted", message="gone", proven=True))
    if how == "back":
        c.add(ev.NodeJoined(registration=c.state.nodes[new].registration))
        c.submit("other2", ranks=8, priority=90)
    events = c.cycle()
    assert sum(len(p.ranks) for p in resizing(events).parts) == 8
    assert "a" not in c.state.nodes[new].holdings
    if how == "back":
        assert c.job("other2").nodes() == [new]
    acknowledge(c, "a")
    c.cycle()
    assert (job.state, job.world_size, job.generation) == ("placed", 8, 2)


def test_a_node_of_a_gang_that_shrinks_dies_before_the_ranks_have_answered() -> None:
    for gone, left in (("n1", {"n2": 4}), ("n2", {"n1": 8})):
        c = Cluster("n1", "n2")
        c.submit("a", gang=Gang(16, 4), elastic=GROW)
        c.cycle()
        c.run("a")
        c.submit("vip", ranks=4, priority=90)
        assert [len(p.ranks) for p in resizing(c.cycle()).parts] == [8, 4]
        c.add(ev.NodeLost(node=gone, cause="lease_expired", message="gone"))
        c.cycle()
        assert (c.job("a").generation, sizes(c, "a")) == (2, left)
        # n2 has nothing for the other job any more, so it gets its place from what is left
        assert c.job("a").state == ("placed" if gone == "n1" else "resizing")


def test_a_stopped_job_gives_back_what_it_would_have_grown_onto() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    (new,) = c.job("a").pending_nodes
    c.add(ev.JobStopRequested(job="a"))
    c.cycle()
    assert c.job("a").outcome == "cancelled"
    assert len(c.state.nodes[new].free_gpus) == 8


def test_ranks_that_fail_when_they_are_asked_have_left() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    c.end("a", 1)
    c.cycle()
    job = c.job("a")
    assert (job.state, job.world_size, job.failures_ms) == ("placed", 16, [])


def test_a_new_leader_goes_on_with_a_change_of_size() -> None:
    c = half_taken()
    free(c)
    c.at(60)
    c.state = load_state(dump_state(c.state))
    attend_to_all(c.state)
    assert decide(c.state, c.now) == []
    acknowledge(c, "a")
    assert of(decide(c.state, c.now), ev.GangPlaced)


def test_people_are_told_what_becomes_of_its_size() -> None:
    c = half_taken()

    def why() -> str:
        return why_row(c.state, c.job("a"), c.now, None, []).message

    assert why() == "runs as generation 1 with 8 of up to 16 ranks, and grows in 60 s at the earliest"
    c.at(60)
    assert why() == "runs as generation 1 with 8 of up to 16 ranks, and grows as soon as there is room that nobody waits for"
    free(c)
    assert why() == "goes on with 16 ranks instead of 8: there is room: from 8 to 16 ranks"


# ---------------------------------------------------------------- the fold


def test_what_the_fold_refuses() -> None:
    c = half_taken()
    free(c)
    job = c.job("a")
    (node,) = job.nodes()
    other = next(n for n in c.state.nodes if n != node)
    ranks = tuple(ev.PlacedRank(i, (i,)) for i in range(8))
    fine = ev.GangResizing(
        job="a", generation=1, parts=(ev.PlacedPart(node, ranks),), cause="shrink", message="m", deadline_ms=c.now, grace_s=0.0
    )

    def refused(parts: tuple[ev.PlacedPart, ...], generation: int = 1) -> str:
        before = dump_state(c.state)
        e = ev.GangResizing(job="a", generation=generation, parts=parts, cause="grow", message="m", deadline_ms=c.now, grace_s=0.0)
        with pytest.raises(IllegalTransition) as found:
            apply(c.state, e, c.state.index + 1, 1, c.now)
        assert dump_state(c.state) == before
        return found.value.why

    assert "runs with 8 to 16" in refused((ev.PlacedPart(node, ranks[:4]),))
    assert "generation" in refused(fine.parts, 2)
    assert "unknown" in refused((ev.PlacedPart("n9", ranks),))
    c.submit("taken", ranks=8)
    c.cycle()
    assert "not all free" in refused((ev.PlacedPart(other, ranks),))
    c.add(fine)
    assert job.state == "resizing"


def test_a_gang_that_is_placed_is_not_told_why_it_has_no_more() -> None:
    """Two gangs get the room that was made for them, and are refused what they could have beyond their minimum, the second like the first."""
    c = Cluster("n1", "n2")
    c.submit("low1", ranks=8)
    c.submit("low2", ranks=8)
    c.cycle()
    c.run("low1", "low2")
    for job in ("v1", "v2"):
        c.submit(job, gang=Gang(16, 8), priority=90)
        c.cycle()
    c.at(30)
    c.release()
    c.cycle()
    assert c.states("v1", "v2") == ["placed", "placed"]
