"""What would be decided is what is decided, and asking changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Gang, JobSpec, Resources
from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state
from gangline.core.policy import plan as planning
from gangline.core.policy.decide import decide, settle, wake
from gangline.core.policy.plan import PLANNED, Plan, plan


class Cluster:
    """Two nodes of eight GPUs and two queues with half of them each."""

    def __init__(self) -> None:
        self.state, self.now = State(), 1_000
        self.add(ev.LeaderElected(scheduler="s"))
        for n in ("n0", "n1"):
            devices = tuple(Gpu(g, f"{n}-{g}", "H100", 80_000) for g in range(8))
            self.add(ev.NodeJoined(registration=Registration(n, n, "b", n, "", devices, 64_000, 512_000)))
        half = Amounts(gpus_milli=8_000)
        self.add(
            ev.QueuesDeclared(queues=(QueueSpec("a", quota=half), QueueSpec("b", quota=half), QueueSpec("c", limit=Amounts(gpus_milli=2_000))))
        )

    def add(self, *events: ev.LogEvent) -> list[ev.LogEvent]:
        for e in events:
            apply(self.state, e, self.state.index + 1, 1, self.now)
        seal(self.state, self.state.index + 1, bytes(32))
        return list(events)

    def submit(self, job: str, spec: JobSpec) -> list[ev.LogEvent]:
        self.add(ev.JobSubmitted(job=job, spec=spec))
        return self.cycle()

    def cycle(self) -> list[ev.LogEvent]:
        wake(self.state, self.now)
        out: list[ev.LogEvent] = []
        while decisions := decide(self.state, self.now):
            out += self.add(*decisions)
        settle(self.state, self.now)
        return out

    def old(self, *jobs: str) -> None:
        """Have gangs of one node run, for so long that they may be reclaimed."""
        for job in jobs:
            [(node, part)] = self.state.jobs[job].parts.items()
            self.add(ev.RanksStarted(job=job, generation=1, node=node, ranks=tuple(part.ranks)))
        self.now += 3_600_000
        self.cycle()


def spec(ranks: int, queue: str = "a", **more: Any) -> JobSpec:
    return JobSpec(("x",), gang=Gang(ranks, ranks), resources=Resources(gpus=1, cpus_milli=100), queue=queue, **more)


def ask(c: Cluster, wanted: JobSpec) -> Plan:
    """The answer by the kept world and by one that is built, and nothing has changed by it."""
    before = dump_state(c.state)
    kept = plan(c.state, wanted, c.now)
    assert c.state.scratch.mirror is not None
    mirror, c.state.scratch.mirror = c.state.scratch.mirror, None
    built = plan(c.state, wanted, c.now)
    assert c.state.scratch.mirror is None
    c.state.scratch.mirror = mirror
    assert built == kept == plan(c.state, wanted, c.now)
    assert dump_state(c.state) == before
    assert PLANNED not in c.state.jobs
    return kept


def test_a_job_that_would_start_starts_where_it_was_said() -> None:
    c = Cluster()
    c.submit("first", spec(5))
    found = ask(c, spec(6))
    assert (found.outcome, found.reason, found.displaced) == ("starts", None, ())
    [placed] = [e for e in c.submit("second", spec(6)) if isinstance(e, ev.GangPlaced)]
    assert placed.parts == found.parts


def test_a_job_that_would_wait_waits_for_the_reason_that_was_said() -> None:
    c = Cluster()
    c.submit("first", spec(14))
    found = ask(c, spec(6))
    assert found.outcome == "waits"
    assert found.reason is not None
    [deferred] = [e for e in c.submit("second", spec(6)) if isinstance(e, ev.GangsDeferred)]
    assert (found.reason.code, found.reason.message, found.reason.need, found.reason.have) == (
        deferred.code, deferred.message, deferred.need, deferred.have,
    )  # fmt: skip
    limited = ask(c, spec(3, "c"))
    assert limited.reason is not None
    assert limited.reason.code == "over_limit"


def test_whoever_would_have_to_leave_is_named() -> None:
    c = Cluster()
    c.submit("low", spec(8))
    c.submit("other", spec(8))
    c.old("low", "other")
    found = ask(c, spec(4, "b"))
    assert found.outcome == "evicts"
    assert {d.action for d in found.displaced} == {"reclaim"}
    leaving = [e.job for e in c.submit("mine", spec(4, "b")) if isinstance(e, ev.GangPreempting)]
    assert [d.job for d in found.displaced] == leaving


def test_asking_does_not_change_what_is_decided_next() -> None:
    asked, unasked = Cluster(), Cluster()
    for number, ranks in enumerate((5, 6, 9, 3, 2)):
        ask_first = asked.state.scratch.mirror is not None
        if ask_first:
            plan(asked.state, spec(7, "b", priority=90), asked.now)
            plan(asked.state, spec(1, "c"), asked.now)
        assert asked.submit(f"j{number}", spec(ranks)) == unasked.submit(f"j{number}", spec(ranks))
    assert dump_state(asked.state) == dump_state(unasked.state)


def test_a_fault_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    c = Cluster()
    c.submit("first", spec(5))

    def fails(*_: object) -> None:
        raise ValueError("no")

    with monkeypatch.context() as patched:
        patched.setattr(planning, "run_session", fails)
        with pytest.raises(ValueError, match="no"):
            plan(c.state, spec(6), c.now)
    assert c.state.scratch.everything_moved
    assert [e.NAME for e in c.submit("second", spec(6))] == ["gang_placed"]
