"""Why a job is where it is: what the answer says is what the log says."""

from __future__ import annotations

import pytest

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.queues import Amounts, QueueSpec
from gangline.core.model.spec import Gang, JobSpec, Resources, TopologyRequest
from gangline.core.model.state import State
from gangline.core.policy.capacity import impossible
from gangline.core.policy.decide import decide, settle, wake
from gangline.leader.whyrows import RecordRow, WhyRow, why_row


class Cluster:
    """Folds events and decisions, one entry each."""

    def __init__(self, nodes: int = 2, gpus: int = 8, **labels: str) -> None:
        self.state, self.now = State(), 1_000
        self.add(ev.LeaderElected(scheduler="s"))
        for i in range(nodes):
            self.join(f"n{i}", gpus, **labels)

    def join(self, node: str, gpus: int = 8, **labels: str) -> None:
        devices = tuple(Gpu(i, f"{node}-{i}", "H100", 80_000) for i in range(gpus))
        self.add(ev.NodeJoined(registration=Registration(node, f"id-{node}", "b", node, "", devices, 64_000, 512_000, labels)))

    def add(self, *events: ev.LogEvent) -> None:
        for e in events:
            apply(self.state, e, self.state.index + 1, 1, self.now)
        seal(self.state, self.state.index + 1, bytes(32))

    def submit(self, job: str, ranks: int = 1, gpus: int = 1, **more: object) -> None:
        more = {"gang": Gang(ranks, ranks), "resources": Resources(gpus=gpus, cpus_milli=100), "name": job, **more}
        self.add(ev.JobSubmitted(job=job, spec=JobSpec(("x",), **more), user="ada"))  # type: ignore[arg-type]
        self.cycle()

    def cycle(self) -> None:
        wake(self.state, self.now)
        while decisions := decide(self.state, self.now):
            self.add(*decisions)
        settle(self.state, self.now)

    def run(self, job: str) -> None:
        held = self.state.jobs[job]
        for node, part in held.parts.items():
            self.add(ev.NodePrepared(job=job, generation=held.generation, node=node, address=node, port=1)) if len(held.parts) > 1 else None
            self.cycle()
            self.add(ev.RanksStarted(job=job, generation=held.generation, node=node, ranks=tuple(part.ranks)))

    def why(self, job: str, at_ms: int | None = None) -> WhyRow:
        return why_row(self.state, self.state.jobs[job], self.now, at_ms, [])


def test_a_waiting_job_shows_the_recorded_witness_and_who_holds_what_it_needs() -> None:
    c = Cluster()
    c.submit("big", ranks=10, time_limit_s=60.0)
    c.submit("small", ranks=2)
    c.run("small")
    c.submit("first", ranks=8)
    c.submit("second", ranks=6)
    c.now += 5_000
    row = c.why("second", 1_000)
    deferral = c.state.jobs["second"].deferral
    assert deferral is not None and row.witness is not None and row.order is not None and row.holders is not None  # noqa: PT018
    assert (row.witness.message, row.witness.index) == (deferral.message, deferral.index)
    assert (row.witness.need["gpus"], row.witness.have["gpus"], row.witness.at_ms) == (6, 4, 1_000)
    assert (row.order.position, row.order.waiting, row.order.gpus_ahead) == (2, 2, 8)
    assert [(h.job, h.user, h.gpus) for h in row.holders.largest] == [("big", "ada", 10), ("small", "ada", 2)]
    assert row.holders.largest[0].ends_at_ms == c.now + 60_000
    assert row.holders.largest[1].ends_at_ms is None
    assert [(q.queue, q.gpus) for q in row.holders.queues] == [("default", 12)]
    assert row.would_change[0] == "2 more GPUs"
    assert row.impossible is None


def test_the_numbers_stay_those_of_the_record() -> None:
    c = Cluster(nodes=1)
    c.submit("a", ranks=6)
    c.submit("b", ranks=8)
    before = c.why("b").witness
    c.submit("c", ranks=1)
    assert c.why("b").witness == before


def test_what_is_too_large_even_for_an_empty_cluster_is_said() -> None:
    c = Cluster()
    c.submit("a", ranks=17)
    row = c.why("a")
    assert row.impossible == "needs room for 17 ranks (17 GPUs); the 2 nodes that are up would have room for 16, all of them empty"
    assert "could not run" in row.would_change[0]


@pytest.mark.parametrize(
    ("spec", "possible"),
    [
        ({"gang": Gang(16, 16)}, True),
        ({"gang": Gang(32, 16)}, True),
        ({"gang": Gang(18, 18, 9)}, False),
        ({"gang": Gang(16, 16, 8)}, True),
        ({"gang": Gang(9, 9), "topology": TopologyRequest(required="rack")}, False),
        ({"gang": Gang(8, 8), "topology": TopologyRequest(required="rack")}, True),
        ({"resources": Resources(gpus=1, gpu_models=("B200",))}, False),
        ({"resources": Resources(cpus_milli=64_001)}, False),
    ],
)
def test_what_could_run_at_all(spec: dict[str, object], possible: bool) -> None:
    c = Cluster(nodes=0)
    c.join("n1", rack="r1")
    c.join("n2", rack="r2")
    full = JobSpec(("x",), **{"resources": Resources(gpus=1, cpus_milli=100), **spec})  # type: ignore[arg-type]
    assert (impossible(c.state, full) == "") is possible


def test_a_limit_of_the_queue_bounds_too() -> None:
    c = Cluster()
    c.add(ev.QueuesDeclared(queues=(QueueSpec("a"), QueueSpec("a/b", limit=Amounts(gpus_milli=4_000)), QueueSpec("c"))))
    c.submit("there", ranks=3, queue="a/b")
    c.submit("other", ranks=3, queue="c")
    c.submit("over", ranks=2, queue="a/b")
    row = c.why("over")
    assert row.witness is not None and row.holders is not None  # noqa: PT018
    assert row.witness.code == "over_limit"
    assert [h.job for h in row.holders.largest] == ["there"]
    assert row.would_change == ["1 more GPU within the limit of its queue"]
    c.submit("never", ranks=5, queue="a/b")
    assert c.why("never").impossible == "needs 5 GPUs; the limit of queue a/b is 4 GPUs"


def test_jobs_that_do_not_wait() -> None:
    c = Cluster(nodes=1)
    c.submit("a", ranks=2)
    assert c.why("a").message == "has its place and is being prepared there"
    c.run("a")
    assert c.why("a").message == "runs as generation 1"
    c.add(ev.RanksExited(job="a", node="n0", exits=(ev.RankExit(0, 1, 7), ev.RankExit(1, 1, -9))))
    c.cycle()
    row = c.why("a")
    assert row.last_restart is not None
    assert row.last_restart.message in row.message
    assert (row.witness, row.order, row.holders) == (None, None, None)
    c.add(ev.JobStopRequested(job="a", by="ada", reason="enough"))
    assert "stopped" in c.why("a").message
    c.add(ev.GangFinished(job="a", outcome="failed", cause="x", message="it broke"))
    row = why_row(c.state, c.state.jobs["a"], c.now, None, [RecordRow(1, 2, "gang_finished", "ended")])
    assert (row.message, row.outcome, row.cause, row.records[0].index) == ("failed: it broke", "failed", "x", 1)
