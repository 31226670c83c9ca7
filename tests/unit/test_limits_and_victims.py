"""Where a limit keeps a job waiting: who can help it, that nobody else is touched, and that this costs little however many queues wait."""

from __future__ import annotations

from typing import Any

import policycluster
import pytest

from gangline.core.model import events as ev
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import JobSpec, Resources
from gangline.core.policy import evicting, order, session, victims
from gangline.core.policy.decide import decide


class Cluster(policycluster.Cluster):
    """Cohorts a and b with a quota and limit of 8 GPUs each, and two queues of 4 below each; 32 GPUs, so that only limits are ever short."""

    def __init__(self, cohorts: str = "ab", leaves: str = "xy", quota: int = 4) -> None:
        super().__init__("n1", "n2", "n3", "n4")
        queues = []
        for cohort in cohorts:
            whole = Amounts(gpus_milli=quota * len(leaves) * 1000)
            queues.append(QueueSpec(cohort, quota=whole, limit=whole, reclaim_min_runtime_s=0.0))
            queues += [QueueSpec(f"{cohort}/{leaf}", quota=Amounts(gpus_milli=quota * 1000)) for leaf in leaves]
        self.add(ev.QueuesDeclared(queues=(*queues, QueueSpec("default"))))

    def ask(self, job: str, queue: str, gpus: int = 1, **more: Any) -> None:
        self.add(ev.JobSubmitted(job=job, spec=JobSpec(("x",), queue=queue, resources=Resources(gpus=gpus, cpus_milli=100), **more)))

    def fill(self, queue: str, count: int) -> list[str]:
        """Have one-GPU jobs of a queue run."""
        jobs = [f"{queue.replace('/', '')}{i}" for i in range(count)]
        for job in jobs:
            self.ask(job, queue)
        self.cycle()
        self.run_all()
        self.at(100)
        return jobs


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the sets of victims that were tried."""
    tried: list[int] = []
    real = victims.VictimSearch._simulate

    def counted(self: victims.VictimSearch, part: Any, slices: Any) -> bool:
        tried.append(len(slices))
        return real(self, part, slices)

    monkeypatch.setattr(victims.VictimSearch, "_simulate", counted)
    return tried


def test_only_work_below_the_full_limit_is_evicted(simulations: list[int]) -> None:
    c = Cluster()
    others = c.fill("b/x", 8)
    running = c.fill("a/x", 8)
    c.ask("late", "a/y", gpus=3)
    out = c.cycle()
    gone = [e.job for e in policycluster.of(out, ev.GangPreempting)]
    assert len(gone) == 3
    assert set(gone) <= set(running)
    assert c.states(*others) == ["running"] * 8
    assert simulations == [3], "the first set that the limit allows, wherever its jobs are"


def test_nobody_is_looked_at_when_nobody_below_the_limit_has_too_much(simulations: list[int]) -> None:
    c = Cluster()
    c.fill("b/x", 8)
    c.fill("a/x", 4)
    c.fill("a/y", 4)
    c.ask("late", "a/y", gpus=1)
    c.ask("more", "a/x", gpus=1)
    assert not policycluster.of(c.cycle(), ev.GangPreempting)
    assert simulations == []
    assert (c.code("late"), c.code("more")) == ("over_limit", "over_limit")


def test_a_job_for_which_there_is_room_has_nobody_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reclaimed for one may leave room for the next one; evicting more for that would be in vain."""
    c = Cluster()
    running = c.fill("a/x", 8)
    c.ask("large", "a/y", gpus=3)
    c.ask("small", "a/y", gpus=1)
    c.cycle()
    assert sum(state == "preempting" for state in c.states(*running)) == 4
    for job, state in zip(running, c.states(*running), strict=True):
        if state == "preempting":
            c.end(job, -15)
    c.cycle()
    assert c.states("large", "small") == ["placed", "placed"]
    assert sum(state == "running" for state in c.states(*running)) == 4
    real = evicting._evict_for

    def watched(world: Any, placer: Any, notes: Any, action: Any, offer: Any, job: Any, chunk: Any) -> bool:
        assert job.name != "fits", "nothing keeps it waiting"
        return real(world, placer, notes, action, offer, job, chunk)

    monkeypatch.setattr(evicting, "_evict_for", watched)
    c.ask("fits", "b/x")
    c.cycle()
    assert c.states("fits") == ["placed"]


def test_queues_whose_limit_is_full_are_not_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = "abcdefghijklmnop"
    c = Cluster("a", leaves, quota=1)
    for leaf in leaves:
        c.ask(f"runs-{leaf}", f"a/{leaf}")
    c.cycle()
    for leaf in leaves:
        c.ask(f"waits-{leaf}", f"a/{leaf}")
    c.cycle()
    keyed: list[str] = []
    real = order.queue_key

    def counted(world: Any, queue: Any, chunk: Any, *more: Any) -> Any:
        keyed.append(queue.name)
        return real(world, queue, chunk, *more)

    monkeypatch.setattr(order, "queue_key", counted)
    c.ask("another", "a/a")
    c.cycle()
    assert keyed == []
    assert c.code("another") == "over_limit"
    assert c.code("waits-p") == "over_limit"


def test_a_session_places_so_many_and_evicts_for_nobody_before_all_have_had_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PLACED_TOGETHER", 3)
    c = Cluster()
    c.fill("b/x", 4)
    for i in range(8):
        c.ask(f"j{i}", "a/x" if i % 2 else "a/y")
    c.ask("over", "a/x")
    first = decide(c.state, c.now)
    assert [type(e).__name__ for e in first] == ["GangPlaced"] * 3
    c.add(*first)
    out = c.cycle()
    assert len(policycluster.of(out, ev.GangPlaced)) == 5
    assert not policycluster.of(out, ev.GangPreempting)
    assert c.code("over") == "over_limit"
