"""Reservations of blocked gangs, and who runs around them."""

from __future__ import annotations

import random

import pytest
from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.spec import TopologyRequest
from gangline.core.model.state import Reserved
from gangline.core.model.statecodec import dump_state, load_state
from gangline.core.policy.decide import attend_to_all
from gangline.core.policy.reserve import PATIENCE_MS

HOUR = 3600.0


def reserved(c: Cluster, job: str) -> Reserved:
    found = c.job(job).reserved
    assert found is not None, f"{job} has no reservation"
    return found


def blocked() -> Cluster:
    """n1 is full for an hour, four GPUs of n2 for half an hour; `big` wants all of both."""
    c = Cluster("n1", "n2")
    c.submit("a", ranks=8, time_limit_s=HOUR)
    c.submit("b", ranks=4, time_limit_s=HOUR / 2)
    c.cycle()
    c.run_all()
    c.submit("big", ranks=16, time_limit_s=HOUR)
    c.at(1)
    return c


def test_a_blocked_gang_gets_a_reservation_and_others_run_around_it() -> None:
    c = blocked()
    found = reserved(c, "big")
    assert [(p.node, p.gpus) for p in found.parts] == [("n1", 8), ("n2", 8)]
    assert found.start_ms == c.now - 1_000 + 3_600_000
    c.submit("endless", ranks=4)
    c.submit("long", ranks=4, time_limit_s=HOUR)
    c.at(1)
    assert c.code("endless") == c.code("long") == "reserved_for"
    assert "big (from 1970-01-01 01:16 UTC)" in c.job("long").deferral.message  # type: ignore[union-attr]
    c.submit("short", ranks=4, time_limit_s=HOUR / 3)
    c.at(1)
    assert c.states("endless", "long", "short") == ["queued", "queued", "placed"]
    assert c.code("long") == "not_enough_gpus", "now there is nothing idle"


def test_the_gang_starts_when_its_time_comes_whoever_waits() -> None:
    c = blocked()
    for i in range(20):
        c.submit(f"s{i}", ranks=2, time_limit_s=HOUR / 2)
    for _ in range(130):
        c.at(30)
        c.run_all()
        c.release()
        if c.job("big").state == "running":
            break
    started = c.job("big").started_at_ms - c.job("big").submitted_at_ms
    assert 3_590_000 <= started <= 3_700_000
    assert c.job("s0").outcome == "failed", "small ones ran in the meantime, up to their limit"


def test_who_comes_before_the_gang_in_the_order_is_not_kept_from_anything() -> None:
    c = blocked()
    c.submit("important", ranks=4, priority=60, time_limit_s=2 * HOUR)
    c.at(1)
    assert c.job("important").state == "placed"
    c.at(16)
    assert reserved(c, "big").start_ms == c.now + 7_200_000


def test_what_ends_early_brings_the_start_forward() -> None:
    c = blocked()
    before = reserved(c, "big").start_ms
    c.at(120)
    c.end("a")
    c.at(61)
    assert reserved(c, "big").start_ms == c.job("b").running_since_ms + 1_800_000 < before
    c.end("b")
    c.cycle()
    assert c.job("big").state == "placed"
    assert c.job("big").reserved is None
    assert c.state.reserved == {}


def test_a_reservation_survives_a_change_of_leader() -> None:
    c = blocked()
    before = reserved(c, "big")
    c.state = load_state(dump_state(c.state))
    attend_to_all(c.state)
    c.submit("long", ranks=4, time_limit_s=HOUR)
    assert of(c.at(1), ev.GangReserved) == []
    assert reserved(c, "big") == before
    assert c.code("long") == "reserved_for"


def test_a_reservation_is_inside_of_one_domain() -> None:
    c = Cluster()
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b")):
        c.join(node, rack=rack)
    for i, limit in enumerate((3, 1, 2, 2)):
        c.submit(f"j{i}", ranks=8, time_limit_s=limit * HOUR)
    c.cycle()
    c.run_all()
    c.submit("big", ranks=16, topology=TopologyRequest(required="rack"))
    c.at(1)
    assert [p.node for p in reserved(c, "big").parts] == ["n3", "n4"]
    c.submit("other", ranks=8, time_limit_s=0)
    c.end("j1")
    c.at(1)
    assert c.job("other").nodes() == ["n2"], "what is not reserved is free for all"


def test_no_more_than_a_few_have_a_reservation_and_only_those_that_need_one() -> None:
    c = Cluster("n1", "n2")
    for job in ("a", "b"):
        c.submit(job, ranks=8, time_limit_s=HOUR)
    c.cycle()
    c.run_all()
    c.submit("one")
    for i in range(10):
        c.submit(f"big{i}", ranks=8)
    c.at(1)
    assert list(c.state.reserved) == ["big0", "big1"], "the third does not fit before somebody ends of whom nothing is known"
    assert reserved(c, "big0").parts[0].node != reserved(c, "big1").parts[0].node
    c.submit("bigger", ranks=8, priority=90)
    c.at(1)
    # It may evict others, and needs no reservation.
    assert c.code("bigger") == "reserved"


def test_a_reservation_is_given_up_when_the_job_ends_or_cannot_start() -> None:
    c = blocked()
    c.add(ev.JobStopRequested(job="big"))
    c.cycle()
    assert c.state.reserved == {}
    c = blocked()
    c.add(ev.NodeAdministered(node="n2", action="cordon"))
    given_up = of(c.at(10), ev.GangReserved)
    assert [(e.job, e.parts) for e in given_up if isinstance(e, ev.GangReserved)] == [("big", ())]


def test_without_known_ends_a_patient_gang_gets_what_comes_free() -> None:
    c = Cluster("n1", "n2")
    for i in range(16):
        c.submit(f"s{i}")
    c.cycle()
    c.run_all()
    c.submit("big", ranks=8)
    c.at(1)
    assert c.job("big").reserved is None
    c.at(PATIENCE_MS / 1000)
    found = reserved(c, "big")
    assert (found.start_ms, [(p.node, p.gpus) for p in found.parts]) == (0, [("n1", 8)])
    c.submit("new")
    c.end("s0")
    c.at(1)
    assert c.job("new").state == "queued"
    assert c.code("new") == "reserved_for"
    c.end("s15")
    c.at(1)
    assert c.job("new").nodes() == ["n2"]
    for i in range(1, 8):
        c.end(f"s{i}")
    c.at(1)
    assert c.job("big").nodes() == ["n1"]


def test_run_times_are_learned_from_jobs_that_were_alike() -> None:
    c = Cluster("n1")
    for job in ("x1", "x2"):
        c.submit(job, ranks=4, user="ann")
        c.cycle()
        c.run_all()
        c.at(600)
        c.end(job)
        c.cycle()
    c.submit("x3", ranks=4, user="ann")
    c.cycle()
    c.run_all()
    c.submit("big", ranks=8)
    c.at(1)
    assert reserved(c, "big").start_ms == c.now - 1_000 + 750_000, "a quarter more than the longest of the last"
    c.submit("x4", ranks=4, user="ben")
    c.submit("x5", ranks=2, user="ann")
    c.at(1)
    assert c.states("x4", "x5") == ["queued", "queued"], "nobody knows how long they run"
    c.end("x3")
    c.at(1)
    assert c.job("big").state == "placed"


@pytest.mark.parametrize("seed", range(12))
def test_a_large_gang_is_not_starved_by_small_ones(seed: int) -> None:
    """A stream of small jobs that never ends, with and without limits, some of them longer than they say."""
    rng = random.Random(seed)
    c = Cluster(*[f"n{i}" for i in range(4)], gpus=4)
    ends: dict[str, int] = {}
    count = 0

    def stream() -> None:
        nonlocal count
        while len(c.state.queue) < 8:
            count += 1
            limit = rng.choice([0, 0, 300, 900])
            c.submit(f"s{count}", ranks=rng.choice([1, 1, 2, 3]), user=rng.choice("ab"), time_limit_s=limit)

    stream()
    c.cycle()
    big_ranks = rng.choice([8, 12, 16])
    for step in range(600):
        if step == 20:
            c.submit("big", ranks=big_ranks)
        stream()
        c.at(15)
        c.run_all()
        for job in [c.job(j) for j in list(c.state.running)]:
            if job.id != "big" and job.running_since_ms:
                due = ends.setdefault(job.id, c.now + rng.choice([60, 120, 300, 600]) * 1000)
                if c.now >= due and job.state == "running":
                    c.end(job.id)
        c.cycle()
        c.release()
        if step > 20 and c.job("big").state != "queued":
            break
    assert c.job("big").state != "queued", f"after {count} small jobs"
