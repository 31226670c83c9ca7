"""Devices and nodes that go bad: symptoms from reports, the states, tests, blame, and what becomes of gangs (rows 44, 45, 64 to 67)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.documents import CheckReport, DriverReport, GpuReport, Observed, XidCount
from gangline.core.model.foldhealth import as_reported
from gangline.core.model.health import NODE, STRIKE, Ailment, Symptom, symptoms, worth_noting
from gangline.core.model.spec import Gang, Health, Preemption, Restart
from gangline.core.model.state import Job
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.model.xids import XIDS
from gangline.core.policy import blame, health
from gangline.leader import ingest

HOUR = 3600.0


def gpu(node: str, index: int) -> str:
    return f"{node}-{index}"


def report(cluster: Cluster, node: str, *reports: GpuReport, driver: DriverReport | None = None, **fields: Any) -> list[ev.LogEvent]:
    """What a leader makes of an observed document with these reports, and decides on it."""
    reg = cluster.state.nodes[node].registration
    doc = Observed(node, reg.identity, reg.boot_id, 1, cluster.state.index, 1, gpus=reports, driver=driver, **fields)
    found = [e for e in ingest.observed(cluster.state, doc, cluster.now) if isinstance(e, ev.HealthReported)]
    cluster.add(*found)
    return found + cluster.cycle()


def xids(uuid: str, *pairs: tuple[int, int], **more: Any) -> GpuReport:
    return GpuReport(uuid, xids=tuple(XidCount(n, count, 0) for n, count in pairs), **more)


def state_of(cluster: Cluster, node: str, device: str = NODE) -> str:
    return cluster.state.nodes[node].health.get(device, Ailment()).state


def reboot(cluster: Cluster, node: str, boot: str) -> None:
    reg = msgspec.structs.replace(as_reported(cluster.state.nodes[node]), boot_id=boot)
    cluster.add(*ingest.registered(cluster.state, reg))


def mended(c: Cluster, node: str, device: str) -> Job:
    """Somebody mends a GPU, and it is tested."""
    c.add(ev.HealthChanged(node=node, device=device, state="burn_in", cause="operator", message="reset", action="reset_gpu", by="ada"))
    c.cycle()
    (test,) = [j for j in c.state.jobs.values() if j.spec.burn_in]
    return test


def running(cluster: Cluster, job: str, **more: Any) -> None:
    cluster.submit(job, **more)
    cluster.cycle()
    cluster.run(job)


# ---------------------------------------------------------------- from reports to symptoms


def test_the_catalogue_has_an_action_for_every_row_and_names_hardware() -> None:
    assert len(XIDS) == 109
    assert {row.action for row in XIDS.values()} == {"ignore", "restart_app", "reset_gpu", "reboot_node", "rma"}
    assert XIDS[79].action == "reboot_node"
    assert XIDS[48].of_hardware
    assert not XIDS[31].of_hardware


@pytest.mark.parametrize(
    ("new", "code", "action", "fatal"),
    [
        (xids("g", (79, 1)), "xid-79", "reboot_node", True),  # row 64: fallen off the bus
        (xids("g", (48, 1)), "xid-48", "reset_gpu", True),  # row 65: double bit error
        (xids("g", (95, 1)), "xid-95", "reset_gpu", True),
        (xids("g", (94, 1)), "xid-94", "", False),  # contained: the job restarts, the GPU has a strike
        (xids("g", (74, 1)), "xid-74", "reset_gpu", False),  # NVLink
        (xids("g", (54, 1)), "xid-54", "rma", False),
        (GpuReport("g", "lost"), "lost", "reboot_node", True),
        (GpuReport("g", "missing"), "missing", "rma", True),
        (GpuReport("g", remap_failed=True), "remap_failed", "rma", False),
        (GpuReport("g", remap_pending=True), "remap_pending", "", False),
        (GpuReport("g", nvlinks_down=2), "nvlink_down", "reset_gpu", False),
        (GpuReport("g", slowed=("hw_thermal",)), "slowed", "", False),
        (GpuReport("g", ecc_uncorrected=1), "ecc", "", False),
        (GpuReport("g", needs="node_reboot"), "needs", "reboot_node", False),  # Xid 154 names its own action
        (GpuReport("g", needs="drain_and_reset"), "needs", "reset_gpu", False),
    ],
)
def test_row_64_and_65_each_fault_has_its_action(new: GpuReport, code: str, action: str, fatal: bool) -> None:
    (found,) = symptoms(None, new, (), 5)
    assert (found.code, found.action, found.fatal) == (code, action, fatal)


def test_xid_154_itself_says_nothing_but_what_it_names_counts() -> None:
    found = symptoms(None, xids("g", (154, 1), needs="gpu_reset"), (), 5)
    assert [(s.code, s.action) for s in found] == [("xid-154", ""), ("needs", "reset_gpu")]


def test_a_report_is_compared_with_the_one_before() -> None:
    old = xids("g", (79, 1), ecc_corrected=5)
    assert not worth_noting(old, old)
    assert not symptoms(old, old, (), 5)
    assert not worth_noting(old, msgspec.structs.replace(old, ecc_corrected=6))
    assert [s.code for s in symptoms(old, xids("g", (79, 2), ecc_corrected=5), (), 5)] == ["xid-79"]
    # After a boot counters begin again: one that has fallen counts from nothing.
    assert [s.code for s in symptoms(xids("g", (79, 4)), xids("g", (79, 1)), (), 5)] == ["xid-79"]
    assert "20,000 corrected" in symptoms(old, msgspec.structs.replace(old, ecc_corrected=20_005), (), 5)[0].message


def test_what_was_taken_in_is_not_taken_in_again() -> None:
    c = Cluster("a")
    lost = xids(gpu("a", 1), (79, 1), state="lost")
    assert of(report(c, "a", lost), ev.HealthReported)
    assert report(c, "a", lost) == []
    assert of(report(c, "a"), ev.HealthReported), "that it has nothing to report any more is news"
    assert report(c, "a") == []


# ---------------------------------------------------------------- the states


def test_row_64_a_gpu_off_the_bus_is_withdrawn_and_comes_back_only_rebooted_and_tested() -> None:
    c = Cluster("a", "b")
    report(c, "a", xids(gpu("a", 1), (79, 1), state="lost"))
    node = c.state.nodes["a"]
    assert state_of(c, "a", gpu("a", 1)) == "quarantined"
    assert node.free_gpus == (0, 2, 3, 4, 5, 6, 7)
    assert node.health[gpu("a", 1)].action == "reboot_node"
    assert not node.health[gpu("a", 1)].until_ms
    c.at(48 * HOUR)
    assert state_of(c, "a", gpu("a", 1)) == "quarantined", "it does not mend by waiting"
    reboot(c, "a", "b2")
    report(c, "a")
    assert state_of(c, "a", gpu("a", 1)) == "burn_in"
    (test,) = [j for j in c.state.jobs.values() if j.spec.burn_in]
    assert test.spec.priority == 0
    assert test.spec.preemptible
    assert test.parts["a"].ranks[0].gpus == (1,)
    c.run(test.id)
    c.end(test.id)
    c.cycle()
    assert state_of(c, "a", gpu("a", 1)) == "healthy"
    assert c.state.nodes["a"].free_gpus == tuple(range(8))
    c.at(HOUR)
    assert state_of(c, "a", gpu("a", 1)) == "healthy", "what it had before does not count again"


def test_a_failed_test_quarantines_for_good() -> None:
    c = Cluster("a")
    report(c, "a", xids(gpu("a", 1), (48, 1)))
    test = mended(c, "a", gpu("a", 1))
    c.run(test.id)
    c.end(test.id, 1)
    c.cycle()
    ailment = c.state.nodes["a"].health[gpu("a", 1)]
    assert (ailment.state, ailment.cause, ailment.action, ailment.until_ms) == ("quarantined", "burn_in", "rma", 0)
    assert not of(c.at(100 * HOUR), ev.HealthChanged)


def test_a_test_that_was_called_off_is_made_again() -> None:
    c = Cluster("a")
    report(c, "a", xids(gpu("a", 1), (48, 1)))
    test = mended(c, "a", gpu("a", 1))
    c.add(ev.JobStopRequested(job=test.id, by="ada"))
    c.cycle()
    assert test.outcome == "cancelled"
    assert state_of(c, "a", gpu("a", 1)) == "burn_in"
    c.release()
    c.at(61)
    assert len([j for j in c.state.jobs.values() if j.spec.burn_in and j.state != "finished"]) == 1


def test_a_test_that_is_in_the_way_goes_and_is_not_started_elsewhere() -> None:
    c = Cluster("a", "b")
    report(c, "a", xids(gpu("a", 1), (48, 1)))
    test = mended(c, "a", gpu("a", 1))
    c.add(ev.NodeAdministered(node="a", action="drain"))
    c.cycle()
    c.at(2)
    assert (test.state, test.outcome) == ("finished", "cancelled")


def test_strikes_make_a_suspect_then_withdraw_and_fade() -> None:
    c = Cluster("a")
    hot = GpuReport(gpu("a", 0), slowed=("hw_thermal",))
    for _ in range(2):
        report(c, "a", hot)
        report(c, "a", GpuReport(gpu("a", 0), slowed=("sw_power",)))
        c.at(60)
    assert state_of(c, "a", gpu("a", 0)) == "suspect"
    assert 0 in c.state.nodes["a"].free_gpus, "a suspect is still used"
    events = c.at(72 * HOUR)
    assert state_of(c, "a", gpu("a", 0)) == "healthy"
    assert of(events, ev.HealthChanged)
    for _ in range(7):
        report(c, "a", hot)
        report(c, "a", GpuReport(gpu("a", 0), slowed=("sw_power",)))
    assert state_of(c, "a", gpu("a", 0)) == "quarantined"
    assert 0 not in c.state.nodes["a"].free_gpus


def test_hold_down_doubles_with_each_withdrawal() -> None:
    ailment = Ailment(withdrawn_ms=[])
    rests = []
    for _ in range(12):
        rests.append(health._rest(ailment, "", 1_000) - 1_000)
        ailment.withdrawn_ms.append(500)
    assert rests[:3] == [health.REST_MS, 2 * health.REST_MS, 4 * health.REST_MS]
    assert rests[-1] == health.REST_MAX_MS


def test_row_66_an_application_error_is_the_jobs_own_until_it_follows_the_gpu() -> None:
    c = Cluster("a")
    for n, job in enumerate(("one", "one", "one", "one", "two", "three", "four")):
        if job not in c.state.jobs:
            for old in [j for j in c.state.jobs.values() if j.state != "finished"]:
                c.end(old.id)
                c.cycle()
            running(c, job, gpus=8)
        report(c, "a", xids(gpu("a", 2), (31, n + 1)))
        expected = {"one": "healthy", "two": "suspect", "three": "suspect"}
        assert state_of(c, "a", gpu("a", 2)) == expected.get(job, "unhealthy"), (n, job)


def test_row_67_a_silent_driver_holds_everything_and_moves_nobody() -> None:
    c = Cluster("a", "b")
    running(c, "train", ranks=1, gpus=8)
    (home,) = c.job("train").parts
    report(c, home, driver=DriverReport("silent", "no answer for 10 s"))
    assert state_of(c, home) == "unhealthy"
    assert not c.state.nodes[home].schedulable
    assert c.states("train") == ["running"]
    report(c, home)
    assert state_of(c, home) == "healthy"
    assert c.state.nodes[home].schedulable
    report(c, home, driver=DriverReport("failed", "crashed"))
    assert state_of(c, home) == "unhealthy", "and again"


def test_a_critical_check_of_the_site_holds_the_node_until_it_is_well() -> None:
    c = Cluster("a", "b")
    running(c, "train", ranks=1, gpus=8)
    (home,) = c.job("train").parts
    mount = CheckReport("mount", "critical", "/data is gone")
    report(c, home, checks=(mount, CheckReport("fan", "warning")))
    assert state_of(c, home) == "unhealthy"
    assert "mount is critical: /data is gone" in c.state.nodes[home].health[NODE].message
    assert c.states("train") == ["running"]
    assert report(c, home, checks=(mount, CheckReport("fan", "warning", "another word"))) == [], "other words of the same are no news"
    report(c, home, checks=(CheckReport("mount", "unknown"),))
    assert c.state.nodes[home].schedulable
    report(c, home)
    assert c.state.nodes[home].checks == ()


def test_row_45_a_flapping_node_gets_ranks_only_when_it_has_been_up_for_a_while() -> None:
    c = Cluster("a")

    def flap() -> None:
        c.add(ev.NodeLost(node="a", cause="lease_expired", message="gone"))
        c.at(20)
        c.join("a")
        c.cycle()

    flap()
    flap()
    assert c.state.nodes["a"].schedulable
    flap()
    assert state_of(c, "a") == "quarantined"
    c.submit("train")
    c.cycle()
    c.at(30)
    assert c.states("train") == ["queued"]
    flap()
    c.at(health.STABLE_MS / 1000 + 1)
    assert c.states("train") == ["queued"], "the hold-down has doubled"
    c.at(health.STABLE_MS / 1000 + 1)
    assert state_of(c, "a") == "healthy"
    assert c.states("train") == ["placed"]


def test_a_snapshot_keeps_what_is_known_of_health() -> None:
    c = Cluster("a", "b")
    running(c, "train", gpus=8)
    report(c, "a", xids(gpu("a", 1), (79, 1), state="lost"))
    c.end("train", 1)
    c.cycle()
    again = load_state(dump_state(c.state))
    assert dump_state(again) == dump_state(c.state)
    assert again.nodes["a"].health == c.state.nodes["a"].health


def test_what_the_agent_says_itself_is_kept_apart_from_what_is_withdrawn() -> None:
    c = Cluster("a")
    reg = c.state.nodes["a"].registration
    report(c, "a", xids(gpu("a", 1), (48, 1)))
    assert ingest.registered(c.state, reg) == [], "the agent says nothing new"
    broken = msgspec.structs.replace(reg, gpus=tuple(msgspec.structs.replace(g, healthy=g.index != 3) for g in reg.gpus))
    c.add(*ingest.registered(c.state, broken))
    assert c.state.nodes["a"].free_gpus == (0, 2, 4, 5, 6, 7)
    c.add(ev.HealthChanged(node="a", device=gpu("a", 1), state="healthy", cause="operator", message="", by="ada", clear=True))
    assert c.state.nodes["a"].free_gpus == (0, 1, 2, 4, 5, 6, 7)
    assert as_reported(c.state.nodes["a"]) == broken


# ---------------------------------------------------------------- what becomes of gangs


def test_a_gang_is_asked_to_checkpoint_and_moved_when_its_gpu_goes_bad() -> None:
    c = Cluster("a", "b", gpus=4)
    running(c, "train", gpus=4)
    (home,) = c.job("train").parts
    report(c, home, xids(gpu(home, 1), (74, 1)))
    notice = c.job("train").notice
    assert c.states("train") == ["preempting"]
    assert notice is not None
    assert notice.cause == "health"
    assert notice.grace_s == 30.0
    c.add(ev.StopAcknowledged(job="train", generation=1, node=home))
    c.cycle()
    assert list(c.job("train").parts) == ["b" if home == "a" else "a"]
    assert c.job("train").failures_ms == [], "the hardware is not charged to the job"


def test_a_gang_whose_work_is_lost_does_not_wait() -> None:
    c = Cluster("a", "b", gpus=4)
    running(c, "train", gpus=4)
    (home,) = c.job("train").parts
    report(c, home, xids(gpu(home, 1), (79, 1), state="lost"))
    assert list(c.job("train").parts) == ["b" if home == "a" else "a"]


def test_a_gang_gets_another_gpu_of_its_node_without_moving() -> None:
    c = Cluster("a", gpus=4)
    running(c, "train", ranks=2, gpus=1)
    report(c, "a", xids(gpu("a", 1), (48, 1)))
    job = c.job("train")
    assert [r.gpus for r in job.parts["a"].ranks.values()] == [(0,), (2,)]
    assert job.generation == 2
    assert job.restart is not None
    assert job.restart.cause == "health"


@pytest.mark.parametrize(("wish", "state"), [("warn", "running"), ("restart", "placed"), ("move", "preempting")])
def test_the_job_says_what_becomes_of_it(wish: str, state: str) -> None:
    c = Cluster("a", "b", gpus=2)
    running(c, "train", gpus=2, health=Health(on_unhealthy=wish))  # type: ignore[arg-type]
    (home,) = c.job("train").parts
    report(c, home, xids(gpu(home, 1), (74, 1)))
    assert c.states("train") == [state]
    if wish == "warn":
        c.end("train", 1)
        c.cycle()
        assert list(c.job("train").parts) == ["b" if home == "a" else "a"], "it restarts without what is bad"


def test_a_rank_that_died_with_its_gpu_is_not_charged() -> None:
    c = Cluster("a", "b", gpus=2)
    running(c, "train", gpus=2, restart=Restart(max_restarts=0))
    (home,) = c.job("train").parts
    c.add(ev.RanksExited(job="train", node=home, exits=(ev.RankExit(0, 1, 1),)))
    symptom = Symptom("ecc", STRIKE, c.now, "1 uncorrectable memory errors")
    c.add(ev.HealthReported(node=home, device=gpu(home, 0), symptoms=(symptom,)))
    c.cycle()
    assert c.job("train").state != "finished"
    assert c.job("train").restart is not None
    assert c.job("train").restart.failure_class == "infrastructure"
    assert "uncorrectable" in c.job("train").restart.message


def spares(*names: str, gpus: int = 4) -> Cluster:
    c = Cluster()
    for i, name in enumerate(("a", "b", *names)):
        c.join(name, gpus, rack=f"r{i % 2}", **({"gangline.io/spare": "true"} if name in names else {}))
    return c


def test_a_lost_node_is_replaced_by_a_spare_and_the_rest_of_the_gang_stays() -> None:
    c = spares("s0", "s1")
    running(c, "train", gang=Gang(2, 2, 1), gpus=4)
    assert list(c.job("train").parts) == ["a", "b"]
    c.submit("next", gpus=4)
    c.cycle()
    assert c.states("next") == ["queued"], "spares take no jobs of their own"
    c.add(ev.NodeLost(node="a", cause="lease_expired", message="gone"))
    c.cycle()
    job = c.job("train")
    assert list(job.parts) == ["s0", "b"], "the spare of the same rack"
    assert job.generation == 2
    assert job.restart is not None
    assert (job.restart.cause, job.restart.lost_nodes) == ("node_lost", ("a",))
    assert "s0 for a" in job.restart.message
    assert job.failures_ms == []


def test_a_spare_has_to_be_where_the_gang_must_be_and_of_the_same_model() -> None:
    c = Cluster()
    for i, (name, model) in enumerate((("a", "H100"), ("b", "H100"), ("s0", "A100"))):
        c.join(name, 4, model, **({"gangline.io/spare": "yes"} if i == 2 else {}))
    running(c, "train", gang=Gang(2, 2, 1), gpus=4)
    c.add(ev.NodeLost(node="a", cause="lease_expired", message="gone"))
    c.cycle()
    assert c.states("train") == ["queued"]


def test_an_unhealthy_node_is_replaced_after_a_checkpoint() -> None:
    c = spares("s0")
    running(c, "train", gang=Gang(2, 2, 1), gpus=4, preemption=Preemption(grace_s=20.0))
    report(c, "b", GpuReport(gpu("b", 0), needs="node_reboot"))
    job = c.job("train")
    assert job.state == "resizing"
    assert job.notice is not None
    assert job.notice.cause == "health"
    c.at(21)
    assert list(job.parts) == ["a", "s0"]
    assert job.generation == 2
    assert job.restart is not None
    assert job.restart.cause == "health"


# ---------------------------------------------------------------- whose fault it is


def die(c: Cluster, job: str, **more: Any) -> str:
    """A job runs and dies; return where."""
    running(c, job, restart=Restart(on_rank_failure="never"), **more)
    (home,) = c.job(job).parts
    c.end(job, 1)
    c.cycle()
    return home


def test_row_44_many_jobs_that_die_on_one_node_blame_the_node() -> None:
    c = Cluster(*(f"n{i}" for i in range(20)), gpus=1)
    for i in range(1, 20):
        c.add(ev.NodeAdministered(node=f"n{i}", action="cordon"))
    assert [die(c, f"j{i}") for i in range(2)] == ["n0", "n0"]
    assert c.state.nodes["n0"].schedulable
    die(c, "j2")
    assert c.state.nodes["n0"].withdrawn, "three of three jobs on one of twenty nodes"
    ailment = c.state.nodes["n0"].health[NODE]
    assert ailment.cause == "lemon"
    assert "j0, j1, j2" in ailment.message
    assert [d.job for d in blame.evidence(c.state, c.state.nodes["n0"])] == ["j2", "j1", "j0"]


def test_row_44_one_job_that_dies_everywhere_blames_itself() -> None:
    c = Cluster(*(f"n{i}" for i in range(6)), gpus=1)
    running(c, "bad", restart=Restart(max_restarts=1000, backoff_initial_s=0.0))
    for _ in range(12):
        c.end("bad", 1)
        c.cycle()
        c.at(400)
        c.run("bad")
    assert all(node.schedulable for node in c.state.nodes.values()), "many deaths of one job are one"


def test_a_job_with_deaths_on_many_nodes_does_not_count_against_them() -> None:
    deaths = [blame.Death("bad", f"n{i}", (), 1_000) for i in range(5)]
    assert blame.recent(deaths, 2_000) == []
    assert blame.blamed_jobs(deaths, 2_000) == {"bad": 5}
    assert blame.recent([*deaths, blame.Death("good", "n1", (), 1_500)], 2_000)[0].job == "good"
    assert blame.blamed_jobs(deaths, 2_000 + blame.WINDOW_MS) == {}


def test_one_gpu_is_blamed_where_only_it_was_under_the_jobs_that_died() -> None:
    c = Cluster("a", "b", "c")
    for i in range(5):
        who = f"j{i}"
        c.submit(who, gpus=1, restart=Restart(on_rank_failure="never"))
        c.add(ev.GangPlaced(job=who, generation=1, parts=(ev.PlacedPart("a", (ev.PlacedRank(0, (3,)),)),)))
        c.run(who)
        c.end(who, 1)
        c.cycle()
        if state_of(c, "a", gpu("a", 3)) != "healthy":
            break
    assert state_of(c, "a", gpu("a", 3)) == "quarantined"
    assert c.state.nodes["a"].health[gpu("a", 3)].cause == "lemon"
    assert not c.state.nodes["a"].withdrawn


def test_the_binomial_tail() -> None:
    assert blame.tail(0, 5, 0.3) == 1.0
    assert blame.tail(3, 3, 0.1) == pytest.approx(0.001)
    assert blame.tail(1, 4, 0.5) == pytest.approx(1 - 0.5**4)
    assert blame.tail(2, 10, 0.2) == pytest.approx(0.6242, abs=1e-4)


def test_what_is_kept_is_bounded() -> None:
    c = Cluster("a")
    for i in range(60):
        report(c, "a", xids(gpu("a", 0), (94, i + 1)))
    assert len(c.state.nodes["a"].health[gpu("a", 0)].symptoms) <= 16
