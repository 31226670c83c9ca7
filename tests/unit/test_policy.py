"""The policy as a pure function: states are made by folding events, never by hand."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import policycluster
import pytest

from gangline.core.model import events as ev
from gangline.core.model.fold import IllegalTransition, apply
from gangline.core.model.project import project
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Elastic, Gang, JobSpec, Preemption, Resources, Restart, TopologyRequest
from gangline.core.model.state import Job, State
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.model.topologies import Topology
from gangline.core.policy import recovery as recovery_rules
from gangline.core.policy.decide import attend_to_all, decide, settle, wake
from gangline.core.policy.gangs import Job as EngineJob
from gangline.core.policy.gangs import Rank as EngineRank
from gangline.core.policy.mirror import Mirror
from gangline.core.policy.placing import Placer
from gangline.core.policy.recovery import AVOID_MS, PREPARE_TIMEOUT_MS


class Cluster(policycluster.Cluster):
    """Its ranks end one by one."""

    BEGINS_MS = 1_000

    def end(self, job: str, rank: int, code: int = 0, cause: str = "") -> None:
        j = self.job(job)
        node = next(n for n, p in j.parts.items() if rank in p.ranks)
        generation = j.parts[node].ranks[rank].generation
        self.add(ev.RanksExited(job=job, node=node, exits=(ev.RankExit(rank, generation, code, cause),)))


def only(events: list[ev.LogEvent], kind: type[ev.LogEvent]) -> ev.LogEvent:
    (found,) = [e for e in events if isinstance(e, kind)]
    return found


def placement(c: Cluster, job: str) -> dict[str, list[int]]:
    return {n: list(p.ranks) for n, p in c.job(job).parts.items()}


# ---------------------------------------------------------------- placing


def test_gangs_are_placed_whole_or_not_at_all() -> None:
    c = Cluster("n1", "n2")
    c.submit("big", ranks=12)
    c.submit("other", ranks=12)
    c.cycle()
    assert placement(c, "big") == {"n1": list(range(8)), "n2": list(range(8, 12))}
    assert c.job("other").state == "queued"
    deferral = c.job("other").deferral
    assert deferral is not None
    assert (deferral.code, deferral.need["gpus"], deferral.have["gpus"]) == ("not_enough_gpus", 12, 4)


def test_priority_comes_before_order_of_submission() -> None:
    c = Cluster("n1")
    c.submit("low", ranks=8)
    c.submit("high", ranks=8, priority=90)
    c.cycle()
    assert c.job("high").state == "placed"
    assert c.job("low").state == "queued"


def test_small_gangs_fill_the_node_that_they_fill_best() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=5)
    c.cycle()
    c.submit("b", ranks=3)
    c.cycle()
    assert c.job("b").nodes() == c.job("a").nodes()


def test_ranks_per_node_is_exact_and_its_fragmentation_is_said() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=3)
    c.cycle()
    c.submit("b", gang=Gang(12, 12, 6))
    c.cycle()
    deferral = c.job("b").deferral
    assert deferral is not None
    assert deferral.code == "fragmented"


def test_an_elastic_gang_starts_with_what_there_is() -> None:
    c = Cluster("n1")
    c.submit("a", gang=Gang(16, 4))
    c.cycle()
    assert c.job("a").world_size == 8


def test_one_model_is_preferred_in_the_order_of_the_job() -> None:
    c = Cluster("n1", "n2")
    c.join("n3", model="A100")
    c.submit("a", resources=Resources(gpus=1, gpu_models=("A100", "H100"), cpus_milli=0))
    c.submit("b", resources=Resources(gpus=1, gpu_models=("V100",), cpus_milli=0))
    c.cycle()
    assert c.job("a").nodes() == ["n3"]
    assert c.job("b").deferral is not None
    assert c.job("b").deferral.code == "no_such_model"


def test_a_refusal_is_recorded_once_and_again_when_the_reason_changes() -> None:
    c = Cluster("n1")
    c.submit("a", ranks=9)
    assert isinstance(only(c.cycle(), ev.GangsDeferred), ev.GangsDeferred)
    c.join("n2", gpus=0)
    assert c.cycle() == []
    c.add(ev.NodeAdministered(node="n1", action="cordon"))
    c.add(ev.NodeAdministered(node="n2", action="cordon"))
    deferred = only(c.cycle(), ev.GangsDeferred)
    assert isinstance(deferred, ev.GangsDeferred)
    assert deferred.code == "no_nodes"


def test_thousands_of_equal_pending_jobs_cost_one_event() -> None:
    c = Cluster("n1")
    c.submit("first", ranks=8)
    for i in range(400):
        c.submit(f"j{i}", ranks=8)
    assert len([e for e in c.cycle() if isinstance(e, ev.GangsDeferred)]) == 1


# ---------------------------------------------------------------- failures of ranks


def test_exit_codes_signals_and_policies_that_are_final() -> None:
    for rules, code in (
        (Restart(fail_exit_codes=(2,)), 2),
        (Restart(fail_signals=("SIGABRT",)), -6),
        (Restart(on_rank_failure="never"), 1),
        (Restart(max_restarts=0), 1),
    ):
        c = Cluster("n1")
        c.submit("a", ranks=2, restart=rules)
        c.cycle()
        c.run("a")
        c.end("a", 1, code)
        c.cycle()
        assert c.job("a").outcome == "failed"
        assert c.job("a").exit_code == (code if code > 0 else 128 - code)


def test_the_budget_counts_application_failures_only() -> None:
    c = Cluster("n1")
    c.submit("a", restart=Restart(max_restarts=2, backoff_initial_s=0.001))
    for code, cause in ((1, ""), (-9, "lost"), (1, ""), (-9, "node_restart"), (1, "")):
        c.cycle()
        c.now += 1_000
        c.cycle()
        c.run("a")
        c.end("a", 0, code, cause)
    c.cycle()
    job = c.job("a")
    assert (job.outcome, job.cause, job.generation) == ("failed", "restarts_exhausted", 5)


def test_backoff_doubles_and_a_healthy_generation_ends_the_row() -> None:
    c = Cluster("n1")
    c.submit("a", restart=Restart(backoff_initial_s=1, backoff_max_s=3))
    waits = []
    for _ in range(5):
        c.cycle()
        c.run("a")
        c.end("a", 0, 1)
        c.cycle()
        waits.append(max(0, c.job("a").not_before_ms - c.now))
        c.now += 5_000
    assert waits == [0, 1_000, 2_000, 3_000, 3_000]
    c.cycle()
    c.run("a")
    c.now += 700_000
    c.end("a", 0, 1)
    restarting = only(c.cycle(), ev.GangRestarting)
    assert isinstance(restarting, ev.GangRestarting)
    assert restarting.not_before_ms == 0


def test_only_the_failed_rank_restarts_when_the_job_says_so() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=16, restart=Restart(on_rank_failure="rank"))
    c.cycle()
    c.run("a")
    c.end("a", 9, 1)
    c.cycle()
    job = c.job("a")
    assert (job.state, job.generation) == ("running", 2)
    assert [job.rank(r).generation for r in (0, 9)] == [1, 2]  # type: ignore[union-attr]
    c.add(ev.RanksStarted(job="a", generation=2, node="n2", ranks=(9,)))
    for r in range(16):
        c.end("a", r)
    c.cycle()
    assert job.outcome == "succeeded"


def test_the_same_decisions_when_everything_is_looked_at() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", ranks=16)
    c.cycle()
    c.run("a")
    c.submit("b", ranks=4)
    c.cycle()
    c.run("b")
    for _ in range(3):
        attend_to_all(c.state)
        assert decide(c.state, c.now) == []
        settle(c.state, c.now)


def test_what_was_due_and_came_to_nothing_is_not_due_again() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", ranks=24)
    c.cycle()
    c.add(ev.PrepareFailed(job="a", generation=1, node="n1", message="no disk"))
    c.cycle()
    assert c.job("a").state == "queued"
    c.add(ev.NodeAdministered(node="n2", action="cordon"))
    c.cycle()
    assert c.state.scratch.timers[0][0] == c.now + AVOID_MS
    c.now += AVOID_MS
    c.cycle()
    c.now += 1
    wake(c.state, c.now)
    assert decide(c.state, c.now) == []
    assert (settle(c.state, c.now) or c.now + 1) > c.now, "it would look again and again, as fast as it can"


# ---------------------------------------------------------------- failures of nodes


def test_a_lost_node_requeues_and_what_still_runs_elsewhere_is_held() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=16)
    c.cycle()
    c.run("a")
    c.add(ev.NodeLost(node="n2", cause="lease_expired", message=""))
    requeued = only(c.cycle(), ev.GangRequeued)
    assert isinstance(requeued, ev.GangRequeued)
    assert (requeued.lost_nodes, requeued.lost_ranks) == (("n2",), tuple(range(8, 16)))
    assert c.state.nodes["n1"].free_gpus == ()
    c.submit("b", ranks=1)
    c.cycle()
    assert c.job("b").state == "queued"
    c.add(ev.PartReleased(job="a", node="n1"))
    c.cycle()
    assert c.job("b").state == "placed"


def test_a_gang_has_the_devices_reserved_that_its_own_dying_ranks_hold() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", ranks=16)
    c.cycle()
    c.run("a")
    c.add(ev.NodeLost(node="n2", cause="lease_expired", message=""))
    c.cycle()
    assert c.job("a").deferral is not None
    assert c.job("a").deferral.code == "reserved"
    c.submit("b", ranks=8)
    c.cycle()
    assert c.job("b").state == "queued"
    c.add(ev.PartReleased(job="a", node="n1"))
    c.cycle()
    assert c.job("a").nodes() == ["n1", "n3"]
    assert c.job("a").generation == 2
    c.run("a")
    assert len(c.state.nodes["n1"].holdings["a"].gpus) == 8


def test_a_rank_failure_that_was_a_node_failure_is_forgiven() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", ranks=16)
    c.cycle()
    c.run("a")
    c.end("a", 0, 1)
    c.cycle()
    assert len(c.job("a").failures_ms) == 1
    c.now += 8_000
    c.add(ev.NodeLost(node="n2", cause="lease_expired", message=""))
    c.cycle()
    assert c.job("a").failures_ms == []
    assert c.job("a").restart.failed_at_ms == 1_000  # type: ignore[union-attr]


def test_on_disconnect_keep_waits_for_proof() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=8, on_disconnect="keep")
    c.cycle()
    c.run("a")
    c.add(ev.NodeLost(node="n1", cause="lease_expired", message=""))
    assert c.cycle() == []
    assert c.job("a").state == "running"
    c.add(ev.NodeAdministered(node="n1", action="confirm_dead"))
    c.cycle()
    assert c.job("a").nodes() == ["n2"]


def test_what_may_still_run_on_a_lost_node_is_not_started_elsewhere() -> None:
    """RELIABILITY S6, with `on_disconnect: keep`: neither a restart, nor a drain, nor a barrier that waits in vain moves the gang."""
    for happens in ("rank", "drain", "barrier"):
        c = Cluster("n1", "n2", "n3", "n4")
        c.submit("a", ranks=16, on_disconnect="keep")
        c.cycle()
        if happens != "barrier":
            c.run("a")
        c.add(ev.NodeLost(node="n1", cause="lease_expired", message=""))
        if happens == "rank":
            c.end("a", 8, code=1)
        elif happens == "drain":
            c.add(ev.NodeAdministered(node="n2", action="drain"))
        for _ in range(4):
            c.now += PREPARE_TIMEOUT_MS
            c.cycle()
        assert c.job("a").nodes() == ["n1", "n2"]
        assert c.job("a").generation == 1
        # What it reads when it comes back, before anybody knows that it has: its ranks are wanted, unless they are to end anyway.
        assert [g.job for g in project(c.state, "n1").gangs] == ([] if happens == "rank" else ["a"])
        c.join("n1")
        c.cycle()
        assert c.job("a").generation == 2 or c.job("a").state == "queued", "it goes on at once when the node is back"


def test_ranks_that_were_leaving_a_lost_node_are_waited_for_if_they_may_go_on() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", on_disconnect="keep", preemption=Preemption(grace_s=1))
    c.cycle()
    c.run("a")
    c.add(ev.NodeAdministered(node="n1", action="drain"))
    c.cycle()
    c.now += 1_000
    c.cycle()
    assert c.job("a").nodes() == ["n2"]
    c.add(ev.NodeLost(node="n1", cause="lease_expired", message=""))
    c.now += PREPARE_TIMEOUT_MS + 1_000
    assert c.cycle() == [], "nobody is charged with it"
    assert project(c.state, "n2").gangs[0].phase == "prepare"
    # The younger generation loses its node meanwhile: it is not even placed, for it could wait for ever.
    c.add(ev.PrepareFailed(job="a", generation=2, node="n2", message="no disk"))
    c.cycle()
    assert c.job("a").deferral is not None
    assert c.job("a").deferral.code == "ranks_may_run"
    c.add(ev.NodeAdministered(node="n1", action="confirm_dead"))
    c.cycle()
    assert c.job("a").nodes() == ["n3"]
    assert "a" not in c.state.nodes["n1"].holdings


def test_no_generation_starts_before_the_older_one_is_gone_from_other_nodes() -> None:
    """RELIABILITY S6: ranks that were told to leave have their grace, and no second copy runs meanwhile."""
    for ranks, nodes in ((1, ["n2"]), (16, ["n2", "n3"])):
        c = Cluster("n1", "n2", "n3")
        c.submit("a", ranks=ranks, preemption=Preemption(grace_s=1))
        c.cycle()
        c.run("a")
        c.add(ev.NodeAdministered(node="n1", action="drain"))
        c.cycle()
        c.now += 1_000
        c.cycle()
        if ranks > 1:
            c.add(ev.PartReleased(job="a", node="n2"))
            c.cycle()
        assert c.job("a").nodes() == nodes
        for n in nodes if ranks > 1 else []:
            c.add(ev.NodePrepared(job="a", generation=2, node=n, address=n, port=1))
        c.now += PREPARE_TIMEOUT_MS + 1_000
        assert c.cycle() == []
        assert {g.phase for n in nodes for g in project(c.state, n).gangs} == {"prepare"}
        c.state.scratch.nodes.clear()
        c.add(ev.PartReleased(job="a", node="n1"))
        assert set(nodes) <= set(c.state.scratch.nodes), "their documents change"
        c.cycle()
        assert {g.phase for n in nodes for g in project(c.state, n).gangs} == {"run"}
        c.now += PREPARE_TIMEOUT_MS
        assert c.cycle() == [], "they have their time from now on"


def test_a_rank_that_does_not_start_again_is_not_waited_for_for_ever() -> None:
    for says in (True, False):
        c = Cluster("n1", "n2", "n3")
        c.submit("a", ranks=16, restart=Restart(on_rank_failure="rank"))
        c.cycle()
        c.run("a")
        c.now += 1_000_000
        c.end("a", 3, code=1)
        only(c.cycle(), ev.RankRestarting)
        if says:
            c.add(ev.PrepareFailed(job="a", generation=2, node="n1", message="device 3 is not healthy"))
        else:
            c.now += PREPARE_TIMEOUT_MS + 30_000
        requeued = only(c.cycle(), ev.GangRequeued)
        assert isinstance(requeued, ev.GangRequeued)
        assert [n for n, _ in requeued.avoid] == ["n1"]


def test_the_backoff_of_one_rank_ends_also_while_others_start() -> None:
    c = Cluster("n1")
    c.submit("a", ranks=2, restart=Restart(on_rank_failure="rank", backoff_initial_s=5))
    c.cycle()
    for generation in (1, 2):
        c.add(ev.RanksStarted(job="a", generation=generation, node="n1", ranks=(0,)))
        c.end("a", 0, code=1)
        c.cycle()
    assert c.job("a").generation == 2
    c.now += 5_000
    only(c.cycle(), ev.RankRestarting)


def test_a_node_that_came_back_rebooted_has_nothing_left() -> None:
    c = Cluster("n1")
    c.submit("a", on_disconnect="keep")
    c.cycle()
    c.run("a")
    c.add(ev.NodeLost(node="n1", cause="rebooted", message="", proven=True))
    c.join("n1", boot="b2")
    c.cycle()
    assert c.job("a").state == "placed"
    assert c.job("a").generation == 2


def test_a_node_that_does_not_prepare_in_time_is_charged() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", ranks=16, preemption=Preemption(grace_s=5))
    c.cycle()
    c.add(ev.NodePrepared(job="a", generation=1, node="n1", address="n1", port=1))
    c.now += PREPARE_TIMEOUT_MS + 5_000 - 1
    assert c.cycle() == []
    c.now += 1
    requeued = only(c.cycle(), ev.GangRequeued)
    assert isinstance(requeued, ev.GangRequeued)
    assert requeued.avoid == (("n2", c.now + AVOID_MS),)
    c.add(ev.PartReleased(job="a", node="n1"))
    c.cycle()
    assert c.job("a").nodes() == ["n1", "n3"]


def test_preparing_that_fails_everywhere_is_the_jobs_fault() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a")
    for _ in range(3):
        c.cycle()
        job = c.job("a")
        c.add(ev.PrepareFailed(job="a", generation=job.generation, node=job.nodes()[0], message="no such directory"))
    c.cycle()
    assert c.job("a").outcome == "failed"
    assert "no such directory" in c.job("a").message


def test_time_limit_drain_deadline_and_stop() -> None:
    c = Cluster("n1", "n2")
    c.submit("limited", time_limit_s=60)
    c.submit("stays", preemptible=False)
    c.cycle()
    c.run("limited")
    c.run("stays")
    c.now += 59_999
    assert c.cycle() == []
    c.now += 1
    assert isinstance(only(c.cycle(), ev.GangFinished), ev.GangFinished)
    c.add(ev.NodeAdministered(node="n1", action="drain", deadline_s=100))
    assert c.cycle() == []
    c.now += 100_000
    preempting = only(c.cycle(), ev.GangPreempting)
    assert isinstance(preempting, ev.GangPreempting)
    c.add(ev.StopAcknowledged(job="stays", generation=1, node="n1"))
    c.cycle()
    assert c.job("stays").nodes() == ["n2"]
    c.add(ev.JobStopRequested(job="stays", by="ann"))
    c.cycle()
    assert (c.job("stays").outcome, c.job("stays").message) == ("cancelled", "stopped by ann: stopped")


# ---------------------------------------------------------------- the fold


def test_a_refused_event_leaves_the_state_as_it_was() -> None:
    c = Cluster("n1")
    c.submit("a", ranks=2)
    c.cycle()
    before = dump_state(c.state)
    bad: list[ev.LogEvent] = [
        ev.JobSubmitted(job="a", spec=JobSpec(("x",))),
        ev.GangPlaced(job="a", generation=2, parts=()),
        ev.GangReleased(job="a", generation=2, master_addr="", master_port=0),
        ev.RanksExited(job="a", node="n1", exits=(ev.RankExit(0, 1, 0), ev.RankExit(7, 1, 0))),
        ev.RanksStarted(job="a", generation=1, node="n1", ranks=(0, 0, 9)),
        ev.PartReleased(job="a", node="n1"),
        ev.NodeLost(node="nope", cause="", message=""),
        ev.GangsDeferred(jobs=("a",), code="x", message=""),
        ev.LeaderElected(scheduler="s"),
        ev.NodeAdministered(node="n1", action="confirm_dead"),
    ]
    for event in bad:
        with pytest.raises(IllegalTransition):
            apply(c.state, event, c.state.index + 1, 1, c.now)
        assert dump_state(c.state) == before, event


def test_finished_is_for_ever() -> None:
    c = Cluster("n1")
    c.submit("a")
    c.cycle()
    c.run("a")
    c.end("a", 0)
    c.cycle()
    for event in (ev.JobStopRequested(job="a"), ev.GangFinished(job="a", outcome="failed", cause="", message=""),
                  ev.GangPlaced(job="a", generation=2, parts=()), ev.RanksExited(job="a", node="n1", exits=())):  # fmt: skip
        with pytest.raises(IllegalTransition, match="stays so"):
            apply(c.state, event, c.state.index + 1, 1, c.now)


def test_a_stored_state_is_the_state() -> None:
    c = Cluster("n1", "n2", "n3")
    c.submit("a", ranks=16)
    c.submit("b", ranks=16)
    c.cycle()
    c.run("a")
    again = load_state(dump_state(c.state))
    assert dump_state(again) == dump_state(c.state)
    assert again.queue == c.state.queue
    assert again.running == c.state.running


def test_a_job_that_the_rules_trip_over_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Cluster("n1")
    c.submit("running")
    c.cycle()
    c.run("running")
    c.submit("poison")
    c.submit("good")
    real_place, real_step = Placer.place, recovery_rules.next_step

    def place(placer: Placer, job: EngineJob, chunk: list[EngineRank], reserve_only: bool) -> object:
        return 1 // 0 if job.name == "poison" else real_place(placer, job, chunk, reserve_only)

    def step(state: State, job: Job, now_ms: int) -> object:
        return 1 // 0 if job.id == "running" else real_step(state, job, now_ms)

    monkeypatch.setattr(Placer, "place", place)
    monkeypatch.setattr(recovery_rules, "next_step", step)
    attend_to_all(c.state)
    while decisions := decide(c.state, c.now):
        c.add(*decisions)
    assert c.job("good").state == "placed"
    deferral = c.job("poison").deferral
    assert deferral is not None
    assert deferral.code == "policy_error"
    assert "ZeroDivisionError" in c.state.scratch.faults["poison"]
    assert "ZeroDivisionError" in c.state.scratch.faults["running"]


# ---------------------------------------------------------------- topology


def racks(**sizes: int) -> Cluster:
    """Return a cluster with so many nodes of 8 GPUs in each rack; names mix the racks, so that only labels tell where a node is."""
    c = Cluster()
    number = 0
    for at in range(max(sizes.values())):
        for rack, size in sizes.items():
            if at < size:
                number += 1
                c.join(f"n{number}", rack=rack)
    return c


def racks_of(c: Cluster, job: str) -> list[str]:
    return [c.state.nodes[n].registration.labels["rack"] for n in c.job(job).nodes()]


def declare(c: Cluster, *topologies: Topology) -> None:
    c.add(ev.QueuesDeclared(queues=(QueueSpec("default"),), topologies=topologies))


def refusal(c: Cluster, job: str) -> tuple[str, dict[str, int], dict[str, int]]:
    deferral = c.job(job).deferral
    assert deferral is not None
    return deferral.code, deferral.need, deferral.have


def test_a_gang_that_requires_a_rack_is_in_one() -> None:
    c = racks(a=2, b=2)
    c.submit("x", ranks=16, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert racks_of(c, "x") == ["a", "a"]


def test_a_gang_waits_for_a_rack_though_enough_is_free_elsewhere() -> None:
    c = racks(a=2, b=2, c=1)
    c.submit("x", ranks=24, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert refusal(c, "x") == ("no_domain_fits", {"ranks": 24}, {"ranks": 16, "domains": 3})
    assert "one domain of rack" in str(c.job("x").deferral)
    c.join("n6", rack="b")
    c.cycle()
    assert racks_of(c, "x") == ["b", "b", "b"]


def test_a_refusal_counts_ranks_also_where_they_are_placed_a_node_at_a_time() -> None:
    c = racks(a=2, b=1)
    c.submit("x", gang=Gang(24, 24, 8), topology=TopologyRequest(required="rack"))
    c.cycle()
    assert refusal(c, "x") == ("no_domain_fits", {"ranks": 24}, {"ranks": 16, "domains": 2})


def test_a_node_counts_for_one_unit() -> None:
    c = racks(a=2, b=1)
    c.submit("x", gang=Gang(6, 6, 2), topology=TopologyRequest(required="rack"))
    c.cycle()
    assert refusal(c, "x") == ("no_domain_fits", {"ranks": 6}, {"ranks": 4, "domains": 2})


def test_a_gang_that_prefers_a_rack_takes_several_where_none_holds_it() -> None:
    c = racks(a=2, b=2)
    c.submit("x", ranks=24, topology=TopologyRequest(preferred="rack"))
    c.submit("y", ranks=8, topology=TopologyRequest(preferred="rack"))
    c.cycle()
    assert c.job("x").state == c.job("y").state == "placed"
    assert sorted(racks_of(c, "x")) in (["a", "a", "b"], ["a", "b", "b"])


def test_a_gang_that_prefers_a_rack_stays_in_one_where_one_holds_it() -> None:
    c = racks(a=2, b=3)
    c.submit("one", ranks=8)
    c.cycle()
    c.submit("x", ranks=16, topology=TopologyRequest(preferred="rack"))
    c.cycle()
    assert len(set(racks_of(c, "x"))) == 1


def test_required_and_preferred_together() -> None:
    c = Cluster()
    for n, block, rack in (("n1", "1", "a"), ("n2", "2", "c"), ("n3", "1", "b"), ("n4", "2", "d"), ("n5", "1", "a"), ("n6", "2", "c")):
        c.join(n, block=block, rack=rack)
    c.submit("near", ranks=16, topology=TopologyRequest(required="block", preferred="rack"))
    c.submit("wide", ranks=24, topology=TopologyRequest(required="block", preferred="rack"))
    c.submit("never", ranks=32, topology=TopologyRequest(required="block", preferred="rack"))
    c.cycle()
    assert len(set(racks_of(c, "near"))) == 1
    assert len({c.state.nodes[n].registration.labels["block"] for n in c.job("wide").nodes()}) == 1
    assert refusal(c, "never")[0] == "no_domain_fits"


def test_the_order_of_ranks_follows_the_topology() -> None:
    c = racks(a=2, b=2, c=2)
    c.submit("x", gang=Gang(48, 48, 8))
    c.cycle()
    assert racks_of(c, "x") == ["a", "a", "b", "b", "c", "c"]
    assert placement(c, "x") == {n: list(range(8 * i, 8 * i + 8)) for i, n in enumerate(["n1", "n4", "n2", "n5", "n3", "n6"])}


def test_units_stay_whole_and_a_restart_in_place_keeps_the_order() -> None:
    c = racks(a=2, b=2)
    c.submit("x", gang=Gang(8, 8, 2), topology=TopologyRequest(preferred="rack"), resources=Resources(gpus=4, cpus_milli=0))
    c.cycle()
    before = placement(c, "x")
    assert [len(ranks) for ranks in before.values()] == [2, 2, 2, 2]
    c.run("x")
    c.end("x", 3, 1)
    c.cycle()
    assert (c.job("x").generation, placement(c, "x")) == (2, before)
    assert list(placement(c, "x")) == list(before)


def test_a_gang_that_lost_a_node_is_placed_in_one_rack_again() -> None:
    c = racks(a=3, b=2)
    c.submit("x", ranks=16, topology=TopologyRequest(required="rack"))
    c.submit("other", ranks=8, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert (racks_of(c, "x"), racks_of(c, "other")) == (["b", "b"], ["a"])
    c.run("x")
    lost = c.job("x").nodes()[0]
    c.add(ev.NodeLost(node=lost, cause="lease_expired", message=""))
    c.cycle()
    assert racks_of(c, "x") == ["a", "a"]


def test_a_rack_can_be_the_node_itself() -> None:
    c = Cluster("n1", "n2")
    c.submit("x", ranks=4)
    c.cycle()
    c.submit("y", ranks=8, topology=TopologyRequest(required="hostname"))
    c.submit("z", ranks=5, topology=TopologyRequest(required="hostname"))
    c.cycle()
    assert len(c.job("y").nodes()) == 1
    assert refusal(c, "z") == ("no_domain_fits", {"ranks": 5}, {"ranks": 4, "domains": 2})


def test_undeclared_levels_are_the_labels_that_all_nodes_carry() -> None:
    c = racks(a=2)
    c.join("plain")
    c.submit("x", ranks=16, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert refusal(c, "x")[0] == "unknown_topology"
    c.add(ev.NodeLost(node="plain", cause="lease_expired", message=""))
    c.cycle()
    assert racks_of(c, "x") == ["a", "a"]


def test_declared_levels_leave_out_nodes_without_the_labels() -> None:
    c = racks(a=2)
    c.join("n0")
    declare(c, Topology("default", ("row", "rack")), Topology("flat", ("rack",)))
    c.submit("x", ranks=16, topology=TopologyRequest(preferred="rack", name="flat"))
    c.submit("y", ranks=1, topology=TopologyRequest(preferred="rack"))
    c.submit("z", ranks=1, topology=TopologyRequest(required="rack", name="none"))
    c.cycle()
    assert racks_of(c, "x") == ["a", "a"]
    assert refusal(c, "y") == ("outside_topology", {"ranks": 1}, {"ranks": 0})
    assert "carries all labels" in str(c.job("y").deferral)
    assert refusal(c, "z")[0] == "unknown_topology"
    declare(c, Topology("default", ("rack",)))
    c.add(ev.GangFinished(job="x", outcome="cancelled", cause="stopped", message=""))
    for n in ("n1", "n2"):
        c.add(ev.PartReleased(job="x", node=n))
    c.cycle()
    assert racks_of(c, "y") == ["a"]


@pytest.mark.parametrize(
    ("ranks", "asked", "busy", "nodes", "said"),
    [
        (16, TopologyRequest(required="rack"), 0, ["n2", "n5"], ""),
        (24, TopologyRequest(required="rack"), 0, [], "needs room for 24 ranks in one domain of rack; the best of 3 has room for 20"),
        (24, TopologyRequest(required="block", preferred="rack"), 0, ["n4", "n2", "n5"], ""),
        (24, TopologyRequest(preferred="rack"), 0, ["n4", "n2", "n5"], ""),
        (24, TopologyRequest(preferred="rack"), 1, ["n5", "n3", "n6", "n7"], ""),
        (48, TopologyRequest(required="block"), 0, [], "needs room for 48 ranks in one domain of block; the best of 2 has room for 24"),
    ],
)
def test_the_worked_example(ranks: int, asked: TopologyRequest, busy: int, nodes: list[str], said: str) -> None:
    """docs/topology.md."""
    c = Cluster()
    for node, domain in {"n1": "b1 r1", "n4": "b1 r1", "n2": "b1 r2", "n5": "b1 r2", "n3": "b2 r3", "n6": "b2 r3", "n7": "b2 r3"}.items():
        block, rack = domain.split()
        c.join(node, block=block, rack=rack)
    for job, (node, gpus) in {"one": ("n1", 8), "two": ("n3", 4), "three": ("n5", busy)}.items():
        if gpus:
            c.submit(job, ranks=gpus, priority=200, preemptible=False)
            part = ev.PlacedPart(node, tuple(ev.PlacedRank(r, (r,)) for r in range(gpus)))
            c.add(ev.GangPlaced(job=job, generation=1, parts=(part,)))
    c.submit("x", ranks=ranks, topology=asked)
    c.cycle()
    deferral = c.job("x").deferral
    assert (c.job("x").nodes(), deferral.message if deferral else "") == (nodes, said)


def test_room_is_made_in_one_rack_only() -> None:
    c = racks(a=2, b=2)
    for low in ("x", "y"):
        c.submit(low, ranks=16, priority=10, topology=TopologyRequest(required="rack"))
    c.cycle()
    for low in ("x", "y"):
        c.run(low)
    c.submit("high", ranks=9, priority=90, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert sorted(c.job(low).state for low in ("x", "y")) == ["preempting", "running"]
    assert refusal(c, "high")[0] == "reserved"


def test_without_nodes_the_topology_is_not_to_blame() -> None:
    c = Cluster()
    c.submit("x", topology=TopologyRequest(required="rack"))
    c.submit("y", topology=TopologyRequest(preferred="hostname"))
    c.cycle()
    assert refusal(c, "x")[0] == refusal(c, "y")[0] == "no_nodes"


def test_one_model_is_kept_inside_a_topology_unless_several_are_allowed() -> None:
    c = Cluster()
    for n, model, rack in (("n1", "H100", "a"), ("n2", "A100", "a"), ("n3", "H100", "b")):
        c.join(n, model=model, rack=rack)
    c.submit("x", ranks=16, topology=TopologyRequest(required="rack"))
    c.submit("y", ranks=20)
    c.cycle()
    assert refusal(c, "x") == ("no_one_model", {"ranks": 16}, {"ranks": 8})
    assert refusal(c, "y") == ("no_one_model", {"ranks": 20}, {"ranks": 16})
    mixed = Resources(gpus=1, cpus_milli=100, gpu_model_mix=True)
    c.submit("z", ranks=16, topology=TopologyRequest(required="rack"), resources=mixed)
    c.cycle()
    assert racks_of(c, "z") == ["a", "a"]


def test_levels_come_and_go_with_the_labels_of_the_nodes() -> None:
    c = Cluster("n1")
    c.join("n2", rack="a")
    c.submit("x", ranks=8, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert refusal(c, "x")[0] == "unknown_topology"
    c.join("n1", rack="b")
    c.cycle()
    assert len(racks_of(c, "x")) == 1
    c.join("n2", row="1")
    c.submit("y", ranks=1, topology=TopologyRequest(required="rack"))
    c.cycle()
    assert refusal(c, "y")[0] == "unknown_topology"
    assert dump_state(load_state(dump_state(c.state))) == dump_state(c.state)


def test_a_more_important_gang_asks_a_less_important_one_to_leave_and_has_its_place_reserved() -> None:
    c = Cluster("n1", "n2")
    c.submit("old", ranks=8, preemption=Preemption(grace_s=5))
    c.submit("young", ranks=8, preemption=Preemption(grace_s=5))
    c.cycle()
    c.run("old")
    c.run("young")
    c.submit("high", ranks=8, priority=90)
    decided = c.cycle()
    preempting = only(decided, ev.GangPreempting)
    assert isinstance(preempting, ev.GangPreempting)
    assert (preempting.job, preempting.cause, preempting.deadline_ms) == ("young", "preempted", c.now + 5_000)
    deferred = only(decided, ev.GangsDeferred)
    assert isinstance(deferred, ev.GangsDeferred)
    assert (deferred.jobs, deferred.code) == (("high",), "reserved")
    # Nobody else is disturbed while it waits, and nobody else gets its place.
    c.submit("late", ranks=8)
    assert not [e for e in c.cycle() if isinstance(e, ev.GangPreempting | ev.GangPlaced)]
    for rank in range(8):
        c.end("young", rank, -15)
    placed = only(c.cycle(), ev.GangPlaced)
    assert isinstance(placed, ev.GangPlaced)
    assert placed.job == "high"
    assert c.job("young").state == "queued"
    assert c.job("young").restart.cause == "preempted"  # type: ignore[union-attr]
    assert c.job("young").failures_ms == []
    assert c.cycle() == []


def test_quota_limit_and_hold_are_kept_and_over_quota_work_is_reclaimed() -> None:
    c = Cluster("n1")
    gpus = lambda n: Amounts(gpus_milli=n * 1000)  # noqa: E731
    queues = (QueueSpec("a", quota=gpus(4)), QueueSpec("b", quota=gpus(4), limit=gpus(6)), QueueSpec("c", state="hold"))
    c.add(ev.QueuesDeclared(queues=queues))
    c.submit("b1", ranks=6, queue="b")
    c.submit("b2", ranks=1, queue="b")
    c.submit("c1", ranks=1, queue="c")
    c.cycle()
    assert [c.job(j).state for j in ("b1", "b2", "c1")] == ["placed", "queued", "queued"]
    assert c.job("b2").deferral.code == "over_limit"  # type: ignore[union-attr]
    assert c.job("c1").deferral.code == "queue_held"  # type: ignore[union-attr]
    c.run("b1")
    c.submit("a1", ranks=4, queue="a")
    assert not [e for e in c.cycle() if isinstance(e, ev.GangPreempting)], "it has only just begun"
    c.now += 61_000
    preempting = only(c.cycle(), ev.GangPreempting)
    assert isinstance(preempting, ev.GangPreempting)
    assert (preempting.job, preempting.cause) == ("b1", "reclaimed")


def test_infrastructure_that_fails_again_and_again_is_not_restarted_in_a_spin() -> None:
    c = Cluster("n1")
    c.submit("a", restart=Restart(backoff_initial_s=2))
    waits = []
    for _ in range(3):
        c.cycle()
        c.run("a")
        c.end("a", 0, -9, "lost")
        c.cycle()
        waits.append(max(0, c.job("a").not_before_ms - c.now))
        c.now += 3_000
    assert waits == [0, 2_000, 2_000]
    assert c.job("a").failures_ms == []


def _waits_after_two_failures(c: Cluster, **spec: Any) -> int:
    """Return until when a gang waits that has failed twice in a row."""
    c.submit("a", restart=Restart(backoff_initial_s=60, backoff_max_s=60), **spec)
    for _ in range(2):
        c.cycle()
        c.run("a")
        c.end("a", 0, 1)
        c.cycle()
    assert (c.job("a").state, c.job("a").not_before_ms) == ("restarting", c.now + 60_000)
    return c.now + 60_000


def test_a_gang_that_loses_its_node_while_it_waits_to_restart_waits_on() -> None:
    c = Cluster("n1", "n2")
    until = _waits_after_two_failures(c)
    c.now += 1_000
    # Long after the failure, so it is not taken for one of the node.
    c.job("a").restart = msgspec.structs.replace(c.job("a").restart, failed_at_ms=c.now - 100_000)
    c.add(ev.NodeLost(node=next(iter(c.job("a").parts)), cause="lease_expired", message=""))
    requeued = only(c.cycle(), ev.GangRequeued)
    assert isinstance(requeued, ev.GangRequeued)
    assert (requeued.forgive, requeued.not_before_ms) == (False, until)
    assert (c.job("a").state, c.job("a").not_before_ms) == ("queued", until)
    c.now = until
    assert c.cycle()
    assert c.job("a").state == "placed"


def test_a_gang_that_makes_room_while_it_waits_to_restart_waits_on() -> None:
    c = Cluster("n1")
    until = _waits_after_two_failures(c, gang=Gang(4, 2), elastic=Elastic(1.0), resources=Resources(gpus=2))
    c.now += 1_000
    c.submit("b", ranks=1, priority=150, preemptible=False, resources=Resources(gpus=4))
    only(c.cycle(), ev.GangResizing)
    assert c.job("a").state == "resizing"
    c.now += 31_000
    c.cycle()
    assert (c.job("a").state, c.now < until) == ("resizing", True)
    c.now = until
    c.cycle()
    assert c.job("a").state == "placed"


def test_of_ranks_that_restart_alone_each_failure_counts() -> None:
    c = Cluster("n1")
    c.submit("a", ranks=2, restart=Restart(on_rank_failure="rank", fail_exit_codes=(3,)))
    c.cycle()
    c.run("a")
    c.end("a", 0, 1)
    c.end("a", 1, 3)
    c.cycle()
    assert (c.job("a").outcome, c.job("a").exit_code) == ("failed", 3)


@pytest.mark.parametrize("seed", range(20))
def test_the_mirror_knows_which_labels_all_nodes_carry(seed: int) -> None:
    rng = random.Random(seed)
    c = Cluster()
    for step in range(40):
        node = f"n{rng.randrange(5)}"
        known = c.state.nodes.get(node)
        if known is not None and known.status == "up" and rng.random() < 0.4:
            c.add(ev.NodeLost(node=node, cause="lease_expired", message=""))
        else:
            c.join(node, **{level: rng.choice("ab") for level in ("zone", "rack", "nvlink", "other") if rng.random() < 0.8})
        c.submit(f"j{step}", topology=TopologyRequest(preferred=rng.choice(("rack", "zone"))))
        c.cycle()
        up = [n.registration.labels for n in c.state.nodes.values() if n.status == "up"]
        mirror = c.state.scratch.mirror
        assert isinstance(mirror, Mirror)
        expected = [level for level in ("zone", "block", "rack", "nvlink") if all(level in labels for labels in up)]
        assert mirror.world.topologies["default"] == (*expected, "hostname")
        for job in c.state.jobs.values():
            if job.state == "queued" and job.deferral is not None and len(up) and job.spec.topology.preferred in expected:
                assert job.deferral.code != "unknown_topology"
