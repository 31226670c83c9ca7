"""When a job takes part: dependencies, hold and release, begin, deadline, ageing. States are made by folding events."""

from __future__ import annotations

from typing import Any

import pytest
from policycluster import Cluster

from gangline.core.model import events as ev
from gangline.core.model.arrays import parse_array
from gangline.core.model.fold import IllegalTransition
from gangline.core.model.queues import QueueSpec
from gangline.core.model.spec import Condition, Dependency, Restart
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy import ageing, recovery
from gangline.core.policy.decide import attend_to_all, settle
from gangline.core.policy.estimate import start_of

H = 3_600_000
NO_RESTART = Restart(on_rank_failure="never")


def after(job: str, when: Condition = "after_ok") -> Dependency:
    return Dependency(job, when)


def finish(c: Cluster, job: str, code: int = 0) -> None:
    c.run(job)
    c.end(job, code)
    c.cycle()


def depends(c: Cluster, job: str, on: str, when: Condition = "after_ok", **more: Any) -> None:
    c.submit(job, depends_on=(after(on, when),), **more)


# ---------------------------------------------------------------- dependencies


@pytest.mark.parametrize(
    ("when", "code", "outcome"),
    [
        ("after_ok", 0, "placed"), ("after_ok", 1, "cancelled"), ("after_not_ok", 0, "cancelled"), ("after_not_ok", 1, "placed"),
        ("after_any", 0, "placed"), ("after_any", 1, "placed"),
    ],
)  # fmt: skip
def test_conditions(when: Condition, code: int, outcome: str) -> None:
    c = Cluster("n1")
    c.submit("a", restart=NO_RESTART)
    depends(c, "b", "a", when)
    c.cycle()
    assert c.job("b").deferral.code == "dependency"
    finish(c, "a", code)
    b = c.job("b")
    assert (b.outcome or b.state) == outcome
    assert c.state.dependents == {}
    if outcome == "cancelled":
        assert b.cause == "dependency_failed"
        assert "waited for a" in b.message


def test_after_start() -> None:
    c = Cluster("n1")
    c.submit("a")
    depends(c, "b", "a", "after_start")
    c.cycle()
    assert c.job("b").state == "queued"
    c.run("a")
    c.cycle()
    assert c.job("b").state == "placed"
    c.submit("never")
    depends(c, "d", "never", "after_start")
    c.add(ev.JobStopRequested(job="never"))
    c.cycle()
    assert (c.job("d").cause, c.job("d").message) == ("dependency_failed", "it waited for never to start, and that ended without having started")


def test_what_has_happened_already_counts() -> None:
    c = Cluster("n1")
    c.submit("a", restart=NO_RESTART)
    c.cycle()
    finish(c, "a", 1)
    depends(c, "b", "a")
    depends(c, "d", "a", "after_any")
    c.cycle()
    assert (c.job("b").cause, c.job("d").state) == ("dependency_failed", "placed")


def test_a_chain_is_cancelled_link_by_link_in_one_cycle() -> None:
    c = Cluster("n1")
    c.submit("j0", restart=NO_RESTART)
    for i in range(1, 30):
        depends(c, f"j{i}", f"j{i - 1}")
    depends(c, "clean", "j29", "after_not_ok")
    c.cycle()
    finish(c, "j0", 1)
    assert {c.job(f"j{i}").cause for i in range(1, 30)} == {"dependency_failed"}
    assert c.job("clean").state == "placed"


def test_all_of_several_dependencies_must_be_met() -> None:
    c = Cluster("n1")
    c.submit("a")
    c.submit("b")
    c.submit("d", depends_on=(after("a"), after("b", "after_any")))
    c.cycle()
    assert c.job("d").deferral.message == "waits for a to succeed, for b to end"
    finish(c, "a")
    assert c.job("d").deferral.message == "waits for b to end", "what is recorded is what is still waited for"
    finish(c, "b")
    assert c.job("d").state == "placed"


def test_a_dependency_on_an_array_is_one_on_all_of_it() -> None:
    c = Cluster("n1")
    c.submit("a", array=parse_array("0-2%1"), restart=NO_RESTART)
    depends(c, "started", "a", "after_start")
    depends(c, "ok", "a")
    depends(c, "one", "a.1")
    c.cycle()
    finish(c, "a.0")
    finish(c, "a.1")
    assert [c.job(j).state for j in ("started", "ok", "one")] == ["queued", "queued", "placed"]
    c.run("a.2")
    c.cycle()
    assert c.job("started").state == "placed"
    c.end("a.2", 1)
    c.cycle()
    assert c.job("ok").cause == "dependency_failed"


def test_an_array_waits_for_what_it_depends_on() -> None:
    c = Cluster("n1")
    c.submit("a")
    c.submit("b", array=parse_array("0-5"), depends_on=(after("a"),))
    c.cycle()
    assert (c.job("b").deferral.code, list(c.job("b").elements.live)) == ("dependency", [])
    finish(c, "a")
    assert len(c.job("b").elements.live) == 6


def test_only_known_jobs_can_be_waited_for() -> None:
    c = Cluster("n1")
    with pytest.raises(IllegalTransition, match="not known"):
        depends(c, "b", "nobody")


def test_a_stopped_job_is_waited_for_no_more_and_waits_no_more() -> None:
    c = Cluster("n1")
    c.submit("a")
    depends(c, "b", "a")
    c.add(ev.JobStopRequested(job="b"))
    c.cycle()
    assert c.state.dependents == {}
    assert c.job("b").cause == "stopped"


def test_dependents_are_found_after_a_reload() -> None:
    c = Cluster("n1")
    c.submit("a", array=parse_array("0-3"))
    depends(c, "b", "a.2")
    depends(c, "d", "a")
    loaded = load_state(dump_state(c.state))
    assert loaded.dependents == c.state.dependents == {"a.2": {"b": None}, "a": {"b": None, "d": None}}


# ---------------------------------------------------------------- hold, begin, deadline


def test_hold_and_release() -> None:
    c = Cluster("n1")
    c.submit("a", hold=True)
    c.cycle()
    assert (c.job("a").state, c.job("a").deferral.code) == ("queued", "held")
    c.add(ev.JobReleased(job="a"))
    c.cycle()
    assert c.job("a").state == "placed"
    with pytest.raises(IllegalTransition, match="not held"):
        c.add(ev.JobReleased(job="a"))


def test_what_runs_goes_on_when_it_is_held_unless_it_is_asked_to_leave() -> None:
    c = Cluster("n1")
    c.submit("a")
    c.cycle()
    c.run("a")
    c.add(ev.JobHeld(job="a", by="ann"))
    c.cycle()
    assert c.job("a").state == "running"
    c.add(ev.JobHeld(job="a", by="ann", reason="upgrade", requeue=True))
    c.cycle()
    assert (c.job("a").state, c.job("a").notice.cause) == ("preempting", "held")
    c.add(ev.StopAcknowledged(job="a", generation=1, node="n1"))
    c.cycle()
    assert (c.job("a").state, c.job("a").deferral.message) == ("queued", "held by ann: upgrade")


def test_begin_is_a_timer() -> None:
    c = Cluster("n1")
    c.submit("a", begin_after_s=60.0)
    c.cycle()
    a = c.job("a")
    assert (a.begin_at_ms, a.deferral.code) == (1_060_000, "before_begin")
    assert a.deferral.message == "not before 1970-01-01T00:17:40Z"
    assert settle(c.state, c.now) == 1_060_000
    assert start_of(c.state, a, c.now).at_ms == 1_060_000
    c.now = 1_059_999
    c.cycle()
    assert a.state == "queued"
    c.now = 1_060_000
    c.cycle()
    assert a.state == "placed"


def test_a_job_that_cannot_make_its_deadline_is_not_waited_for() -> None:
    c = Cluster("n1", gpus=1)
    c.submit("x")
    c.submit("a", deadline_ms=2_000_000, time_limit_s=400.0)
    c.submit("b", deadline_ms=2_000_000)
    c.cycle()
    c.now = 1_600_000
    c.cycle()
    assert c.job("a").state == "queued"
    assert recovery.due_ms(c.state, c.job("a"), c.now) == 1_600_001
    c.now = 1_600_001
    c.cycle()
    assert (c.job("a").outcome, c.job("a").cause) == ("failed", "deadline")
    c.now = 2_000_000
    c.cycle()
    assert (c.job("b").cause, c.job("b").message) == ("deadline", "its deadline, 1970-01-01T00:33:20Z, has passed")


def test_a_job_that_runs_is_stopped_at_its_deadline() -> None:
    c = Cluster("n1")
    c.submit("a", deadline_ms=1_050_000, time_limit_s=45.0)
    c.cycle()
    c.now = 1_020_000
    c.run("a")
    c.now = 1_030_000
    c.cycle()
    assert c.job("a").state == "running", "what it needs is no longer the question once it runs"
    c.now = 1_050_000
    c.cycle()
    assert (c.job("a").outcome, c.job("a").cause) == ("failed", "deadline")


def test_who_is_done_in_time_has_made_the_deadline() -> None:
    c = Cluster("n1")
    c.submit("a", deadline_ms=1_050_000)
    c.cycle()
    c.run("a")
    c.now = 1_050_000
    c.end("a")
    c.cycle()
    assert c.job("a").outcome == "succeeded"


def test_a_job_that_may_not_begin_in_time_is_not_waited_for() -> None:
    c = Cluster("n1")
    c.submit("a", begin_after_s=3600.0, deadline_ms=2_000_000)
    c.submit("b", begin_after_s=60.0, deadline_ms=1_100_000, time_limit_s=50.0)
    c.cycle()
    assert (c.job("a").cause, c.job("b").cause) == ("deadline", "deadline")


def test_the_deadline_of_an_array_ends_what_is_to_come() -> None:
    c = Cluster("n1", gpus=1)
    c.submit("a", array=parse_array("0-9%1"), deadline_after_s=10.0)
    c.cycle()
    c.run("a.0")
    c.now += 10_000
    c.cycle()
    assert (c.job("a.0").cause, c.job("a").cause, c.job("a").outcome) == ("deadline", "deadline", "failed")


# ---------------------------------------------------------------- ageing


def aged(c: Cluster, per_hour: float = 2.0, most: int | None = None) -> Cluster:
    c.add(ev.QueuesDeclared(queues=(QueueSpec("default", ageing_per_hour=per_hour, ageing_most=most),)))
    return c


def test_points_come_with_waiting_and_end() -> None:
    c = aged(Cluster("n1", gpus=1), per_hour=2.0, most=3)
    c.submit("x")
    c.submit("a")
    c.cycle()
    a = c.job("a")
    found = [ageing.points(c.state, a, c.now + minutes * 60_000) for minutes in (0, 30, 31, 60, 61, 90, 91, 121, 6000)]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_who_has_waited_stands_before_a_little_more_priority() -> None:
    c = aged(Cluster("n1", gpus=1), per_hour=2.0)
    c.submit("x", priority=90)
    c.submit("old", priority=50)
    c.cycle()
    c.run("x")
    c.now += 3 * H + 60_000
    c.submit("young", priority=55)
    c.submit("higher", priority=57)
    c.cycle()
    c.end("x")
    c.cycle()
    assert c.job("higher").state == "placed", "6 points are not enough to overtake it"
    finish(c, "higher")
    assert c.job("old").state == "placed"


def test_points_preempt_nobody_and_protect_who_overtook() -> None:
    c = aged(Cluster("n1", gpus=1), per_hour=2.0)
    c.submit("x", priority=55)
    c.submit("old", priority=50)
    c.cycle()
    c.run("x")
    c.now += 6 * H
    c.cycle()
    assert c.job("x").state == "running", "10 points more than what runs, and nobody is evicted"
    c.end("x")
    c.cycle()
    c.run("old")
    c.submit("young", priority=55)
    c.cycle()
    assert c.job("old").state == "running", "it stands at 60, and 55 does not preempt it"
    c.submit("more", priority=61)
    c.cycle()
    assert c.job("old").state == "preempting"


def test_the_next_point_is_a_timer_and_nothing_else_is_looked_at() -> None:
    c = aged(Cluster("n1", gpus=1), per_hour=1.0)
    c.submit("x")
    for i in range(50):
        c.submit(f"j{i}")
    c.cycle()
    due = settle(c.state, c.now)
    assert due is not None
    for point in range(1, 11):
        times = {recovery.due_ms(c.state, c.job(f"j{i}"), c.now) for i in range(50)}
        assert times == {point * H + 1_020_000}, "all of one minute come together"
        c.now = times.pop()
        c.cycle()
        assert ageing.points(c.state, c.job("j7"), c.now) == point
    assert recovery.due_ms(c.state, c.job("j7"), c.now) is None, "at most ageing_most changes in a life"


def test_waiting_before_it_could_run_does_not_count() -> None:
    c = aged(Cluster("n1", gpus=1))
    c.submit("x")
    c.submit("a", hold=True)
    c.submit("b", begin_after_s=5 * 3600.0)
    c.cycle()
    c.now += 4 * H
    c.add(ev.JobReleased(job="a"))
    c.cycle()
    c.now += H + 60_000
    assert (ageing.points(c.state, c.job("a"), c.now), ageing.points(c.state, c.job("b"), c.now)) == (2, 0)


def test_the_clock_stops_while_it_is_placed_and_goes_on_when_it_is_queued_again() -> None:
    c = aged(Cluster("n1", gpus=1), per_hour=1.0)
    c.submit("x")
    c.submit("a")
    c.cycle()
    c.now += 2 * H + 60_000
    finish(c, "x")
    assert ageing.points(c.state, c.job("a"), c.now + 50 * H) == 2
    c.run("a")
    c.now += 50 * H
    c.add(ev.JobHeld(job="a", requeue=True))
    c.cycle()
    c.add(ev.StopAcknowledged(job="a", generation=1, node="n1"), ev.JobReleased(job="a"))
    c.cycle()
    assert ageing.points(c.state, c.job("a"), c.now) == 2


def test_another_leader_finds_all_timers() -> None:
    c = aged(Cluster("n1", gpus=1))
    c.submit("x")
    c.submit("a", begin_after_s=30.0)
    c.submit("b", deadline_after_s=20.0)
    c.cycle()
    c.state = load_state(dump_state(c.state))
    attend_to_all(c.state)
    c.cycle()
    assert settle(c.state, c.now) == 1_020_000
