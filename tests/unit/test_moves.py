"""Gangs are moved for others where that costs less than it gains."""

from __future__ import annotations

from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.spec import Preemption
from gangline.core.policy.moves import COOL_DOWN_MS, WAITED_MS


def half_full() -> Cluster:
    c = Cluster("n1", "n2")
    c.submit("left", ranks=1, gpus=4, preemption=Preemption(grace_s=5))
    c.submit("blocks", ranks=1, gpus=4)
    c.submit("right", ranks=1, gpus=4, preemption=Preemption(grace_s=5))
    c.cycle()
    c.run_all()
    assert c.job("left").nodes() == ["n1"] and c.job("right").nodes() == ["n2"]  # noqa: PT018
    c.end("blocks")
    c.at(COOL_DOWN_MS / 1000)
    c.submit("wide", ranks=1, gpus=8)
    c.at(1)
    assert c.job("wide").state == "queued"
    return c


def checkpoint(c: Cluster, *jobs: str) -> None:
    c.add(*(ev.CheckpointReported(job=job, generation=c.job(job).generation, step=5, path="/c") for job in jobs))


def left(c: Cluster, seconds: float) -> list[tuple[str, str, str, bool]]:
    return [(e.job, e.cause, e.beneficiary, e.moved) for e in of(c.at(seconds), ev.GangPreempting) if isinstance(e, ev.GangPreempting)]


def test_who_reports_checkpoints_is_moved_and_has_its_new_place_kept() -> None:
    c = half_full()
    checkpoint(c, "right")
    assert left(c, WAITED_MS / 2000) == [], "it has not waited for long"
    checkpoint(c, "right")
    assert left(c, WAITED_MS / 1000) == [("right", "consolidated", "wide", True)]
    assert list(c.state.earmarks) == ["wide", "right"]
    c.submit("late", ranks=1, gpus=4)
    c.at(5)
    c.end("right", -15)
    c.release()
    c.at(1)
    assert (c.job("wide").nodes(), c.job("right").nodes()) == (["n2"], ["n1"])
    assert c.job("late").state == "queued"
    assert c.state.earmarks == {}
    c.run_all()
    checkpoint(c, "left", "right")
    c.submit("wide2", ranks=1, gpus=8)
    assert left(c, 2 * WAITED_MS / 1000) == [], "there is no room to move anybody to"


def test_nobody_is_moved_of_whom_the_loss_is_not_known() -> None:
    c = half_full()
    for _ in range(10):
        assert left(c, 60) == []


def test_nobody_is_moved_whose_loss_is_larger_than_the_gain() -> None:
    c = half_full()
    checkpoint(c, "right")
    c.job("right").checkpoint_at_ms -= 1_500_000
    assert left(c, WAITED_MS / 1000) == []
    # 4 GPUs have lost 26 minutes; 8 GPUs that wait gain as much when they have waited for half of that.
    assert left(c, 500) == []
    assert [job for job, *_ in left(c, 1_500)] == ["right"]


def test_nobody_is_moved_twice_in_a_row() -> None:
    c = half_full()
    checkpoint(c, "left", "right")
    c.job("left").evicted_at_ms = c.job("right").evicted_at_ms = c.now
    checkpoint(c, "left", "right")
    assert left(c, 300) == []
    assert len(left(c, COOL_DOWN_MS / 1000)) == 1
