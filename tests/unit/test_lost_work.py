"""Victims by least lost work."""

from __future__ import annotations

import pytest
from policycluster import Cluster, of

from gangline.core.model import events as ev
from gangline.core.model.spec import Gang, Resources


def two(**more: object) -> Cluster:
    """Two gangs of eight GPUs that have run for ten minutes."""
    c = Cluster("n1", "n2")
    for job in ("a", "b"):
        c.submit(job, ranks=8, **more)
    c.cycle()
    c.run_all()
    c.at(600)
    return c


def victim(c: Cluster, **more: object) -> list[str]:
    c.submit("high", ranks=8, priority=90, **more)
    return [e.job for e in of(c.cycle(), ev.GangPreempting) if isinstance(e, ev.GangPreempting)]


def test_where_nobody_reports_the_youngest_goes() -> None:
    assert victim(two()) == ["b"]


@pytest.mark.parametrize(("reports", "goes"), [("a", "a"), ("b", "b")])
def test_who_has_saved_most_goes_first(reports: str, goes: str) -> None:
    c = two()
    c.add(ev.CheckpointReported(job=reports, generation=1, step=5, path="/c"))
    c.at(60)
    assert victim(c) == [goes]


def test_equal_losses_fall_back_to_age() -> None:
    c = two()
    for job in ("a", "b"):
        c.add(ev.CheckpointReported(job=job, generation=1, step=5, path="/c"))
    assert victim(c) == ["b"]


def test_priority_comes_before_lost_work() -> None:
    c = Cluster("n1", "n2")
    c.submit("a", ranks=8, priority=60)
    c.submit("b", ranks=8, priority=50)
    c.cycle()
    c.run_all()
    c.at(600)
    c.add(ev.CheckpointReported(job="a", generation=1, step=5, path="/c"))
    assert victim(c) == ["b"]


def test_a_small_gang_that_has_run_long_may_lose_less_than_a_large_one() -> None:
    c = Cluster("n1", "n2")
    c.submit("large", ranks=8)
    c.cycle()
    c.run_all()
    c.at(600)
    c.submit("small", gang=Gang(1, 1), resources=Resources(gpus=1, cpus_milli=64_000))
    c.cycle()
    c.run_all()
    c.add(ev.CheckpointReported(job="large", generation=1, step=5, path="/c"))
    c.at(60)
    c.submit("high", gang=Gang(1, 1), resources=Resources(gpus=1, cpus_milli=64_000), priority=90)
    left = [e.job for e in c.cycle() if isinstance(e, ev.GangPreempting)]
    assert left == ["small"]
