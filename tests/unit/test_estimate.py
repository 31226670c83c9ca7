"""When jobs start, as far as time limits tell."""

from __future__ import annotations

import pytest

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.model.state import State
from gangline.core.policy import estimate
from gangline.core.policy.decide import decide, settle, wake
from gangline.core.policy.estimate import Estimate, end_of, start_of

NOW = 1_000_000


class Cluster:
    """A state at one time, changed by events and decisions."""

    def __init__(self, nodes: int, gpus: int = 8) -> None:
        self.state = State()
        self.add(ev.LeaderElected(scheduler="s"))
        for i in range(nodes):
            devices = tuple(Gpu(g, f"n{i}-{g}", "H100", 80_000) for g in range(gpus))
            self.add(ev.NodeJoined(registration=Registration(f"n{i}", f"n{i}", "b", f"n{i}", "", devices, 64_000, 512_000)))

    def add(self, *events: ev.LogEvent) -> None:
        for e in events:
            apply(self.state, e, self.state.index + 1, 1, NOW)
        seal(self.state, self.state.index + 1, bytes(32))

    def submit(self, job: str, ranks: int, limit_s: float = 0.0, per_node: int = 0, **more: object) -> None:
        spec = JobSpec(("x",), gang=Gang(ranks, ranks, per_node), resources=Resources(gpus=1, cpus_milli=100), time_limit_s=limit_s, **more)  # type: ignore[arg-type]
        self.add(ev.JobSubmitted(job=job, spec=spec))
        wake(self.state, NOW)
        while decisions := decide(self.state, NOW):
            self.add(*decisions)
        settle(self.state, NOW)

    def start(self, job: str) -> Estimate:
        return start_of(self.state, self.state.jobs[job], NOW)


def test_a_job_starts_when_limits_have_freed_enough() -> None:
    c = Cluster(2)
    c.submit("a", 8, limit_s=60)
    c.submit("b", 8, limit_s=600)
    c.submit("small", 4)
    c.submit("large", 12)
    found = c.start("small")
    assert (found.at_ms, found.ahead, found.gpus_without_limit) == (NOW + 60_000, 0, 0)
    assert "time limit" in found.basis
    # Whoever is before it takes its part first, and without a limit keeps it.
    assert (c.start("large").at_ms, c.start("large").ahead) == (NOW + 600_000, 1)


def test_what_is_before_it_ends_by_its_own_limit() -> None:
    c = Cluster(1)
    c.submit("a", 8, limit_s=60)
    c.submit("first", 8, limit_s=30)
    c.submit("second", 8)
    assert c.start("second").at_ms == NOW + 90_000


def test_a_small_job_passes_a_large_one_that_does_not_fit() -> None:
    c = Cluster(2)
    c.submit("a", 8, limit_s=60)
    c.submit("b", 8)
    c.submit("large", 16)
    c.submit("small", 2)
    assert c.start("small").at_ms == NOW + 60_000
    assert c.start("large").at_ms is None


def test_jobs_without_a_limit_make_it_unknown_and_are_counted() -> None:
    c = Cluster(1)
    c.submit("a", 6)
    c.submit("b", 4)
    found = c.start("b")
    assert (found.at_ms, found.gpus_without_limit) == (None, 6)
    assert found.basis.startswith("unknown: 6 GPUs are held by jobs without a time limit")


def test_room_has_to_be_on_the_right_nodes() -> None:
    c = Cluster(2)
    c.submit("a", 5, limit_s=60)
    c.submit("b", 5, limit_s=600, per_node=5)
    c.submit("whole", 8, per_node=8)
    assert c.start("whole").at_ms == NOW + 60_000
    c.submit("both", 16, per_node=8)
    assert c.start("both").at_ms is None  # by then "whole" has its place, without a limit


def test_never_and_for_other_reasons_and_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Cluster(1)
    c.submit("huge", 9)
    assert c.start("huge").basis.startswith("never on the nodes that are up: needs room for 9 ranks")
    c.submit("a", 8, limit_s=60)
    c.submit("b", 8)
    c.state.jobs["b"].reserved = None
    monkeypatch.setattr(estimate, "MAX_STEPS", 2)
    assert "too much" in c.start("b").basis


def test_the_end_of_a_running_job() -> None:
    c = Cluster(1)
    c.submit("a", 1, limit_s=60)
    c.submit("b", 1)
    job = c.state.jobs["a"]
    assert end_of(job, NOW).at_ms == NOW + 60_000
    assert "does not run yet" in end_of(job, NOW).basis
    c.add(ev.RanksStarted(job="a", generation=1, node="n0", ranks=(0,)))
    assert end_of(job, NOW + 30_000).at_ms == NOW + 60_000
    assert end_of(c.state.jobs["b"], NOW) == Estimate(None, "unknown: it has no time limit")
    c.add(ev.GangPreempting(job="a", generation=1, cause="drain", message="m", deadline_ms=NOW + 5_000, grace_s=5))
    assert end_of(job, NOW).at_ms == NOW + 5_000
