"""Who gets the room that evictions make, and what that cost whom."""

from __future__ import annotations

from policycluster import Cluster

from gangline.core.model import events as ev
from gangline.core.model.spec import Preemption
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state, load_state


def cluster() -> Cluster:
    """Two nodes with a gang each; `high` waits for the younger of the two to leave."""
    c = Cluster("n1", "n2")
    for job in ("old", "young"):
        c.submit(job, ranks=8, preemption=Preemption(grace_s=5))
    c.cycle()
    c.run("old")
    c.run("young")
    c.submit("high", ranks=8, priority=90)
    c.cycle()
    assert c.job("young").state == "preempting"
    assert c.job("young").beneficiary == "high"
    return c


def kept(state: State) -> list[str]:
    return list(state.earmarks)


def test_what_a_victim_leaves_goes_to_whom_it_was_evicted_for() -> None:
    c = cluster()
    c.submit("higher", ranks=8, priority=95)
    c.now += 1_000
    c.cycle()
    c.end("young", -15)
    c.cycle()
    assert c.job("high").nodes() == ["n2"]
    assert c.job("higher").state == "queued"
    assert kept(c.state) == ["higher"], "it has evicted the other one"
    assert c.job("old").state == "preempting"


def test_an_earmark_survives_a_change_of_leader() -> None:
    c = cluster()
    c.submit("higher", ranks=8, priority=95)
    c.state = load_state(dump_state(c.state))
    assert kept(c.state) == ["high"]
    c.end("young", -15)
    c.cycle()
    assert c.job("high").nodes() == ["n2"]


def test_an_earmark_ends_with_its_job_and_with_time() -> None:
    c = cluster()
    c.add(ev.JobStopRequested(job="high", reason="no longer wanted"))
    c.cycle()
    assert kept(c.state) == []

    c = cluster()
    # The ranks of the victim hang: the job is not preferred for ever.
    c.now += 5_000
    c.cycle()
    assert c.job("young").state == "queued"
    c.now += 5_000 + 60_000
    c.submit("higher", ranks=8, priority=95)
    c.add(ev.PartReleased(job="young", node="n2"))
    c.cycle()
    assert c.job("higher").nodes() == ["n2"]


def test_lost_work_is_accounted_to_whom_it_was_lost_for() -> None:
    c = cluster()
    c.now += 5_000
    c.cycle()
    assert c.job("young").lost_gpu_ms == 8 * 5_000
    assert c.job("high").cost_gpu_ms == 8 * 5_000
    assert c.state.lost_gpu_ms == {"default": 8 * 5_000}
    assert load_state(dump_state(c.state)).lost_gpu_ms == c.state.lost_gpu_ms


def test_work_is_lost_since_the_last_checkpoint_and_not_after_an_acknowledgement() -> None:
    c = cluster()
    c.now += 3_000
    c.add(ev.CheckpointReported(job="young", generation=1, step=7, path="/c"))
    c.now += 2_000
    c.cycle()
    assert c.job("young").lost_gpu_ms == 8 * 2_000

    c = cluster()
    c.now += 3_000
    c.add(ev.StopAcknowledged(job="young", generation=1, node="n2"))
    c.cycle()
    assert (c.job("young").state, c.job("young").lost_gpu_ms, c.job("high").cost_gpu_ms) == ("queued", 0, 0)


def test_a_restart_costs_nobody_but_the_job() -> None:
    c = Cluster("n1")
    c.submit("a", ranks=4)
    c.cycle()
    c.run("a")
    c.now += 10_000
    c.end("a", 1)
    c.cycle()
    assert c.job("a").lost_gpu_ms == 40_000
    assert c.state.lost_gpu_ms == {}
