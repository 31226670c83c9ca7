import pytest

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.events import PlacedPart, PlacedRank, RankExit
from gangline.core.model.health import Symptom
from gangline.core.model.narrate import JobStory, concerns, duration, exit_words, numbers, sentence
from gangline.core.model.queues import QueueSpec
from gangline.core.model.reservations import KeptNode, Reservation
from gangline.core.model.spec import ArraySpec, Dependency, Gang, JobSpec, Resources


def part(node: str, first: int, count: int) -> PlacedPart:
    return PlacedPart(node, tuple(PlacedRank(r, (r - first,)) for r in range(first, first + count)))


SPEC = JobSpec(command=("train",), name="llama", queue="research", gang=Gang(ranks=16, min_ranks=8), resources=Resources(gpus=1))
NODE = Registration(
    node="n1", identity="i", boot_id="b", address="10.0.0.1", agent_url="", cpus_milli=64_000, memory_mib=512 * 1024,
    gpus=tuple(Gpu(i, f"u{i}", "H100", healthy=i != 3) for i in range(8)),
)  # fmt: skip

#: one of every event, and what is said of it to somebody who looks at job j1
EXAMPLES: list[tuple[ev.LogEvent, str]] = [
    (ev.LeaderElected(scheduler="s1"), "s1 leads now"),
    (ev.LeaderResigned(scheduler="s1"), "s1 hands the lead over"),
    (ev.BrakeSet(on=True, message="9 of 10 nodes vanished."), "brake on: no node is declared lost and no gang is moved: 9 of 10 nodes vanished"),
    (ev.BrakeSet(on=False, message="set by an operator", by="ann"), "brake off: set by an operator (by ann)"),
    (
        ev.JobSubmitted(job="j1", spec=SPEC, user="ann"),
        "submitted as llama to queue research: 16 ranks (at least 8) of 1 GPU, priority 50 (by ann)",
    ),
    (
        ev.JobSubmitted(
            job="j1",
            spec=JobSpec(("x",), array=ArraySpec(((0, 9, 1),), 2), depends_on=(Dependency("j0"), Dependency("j2", "after_any")), hold=True),
        ),
        "submitted to queue default as array 0-9%2, each: 1 rank, priority 50, after_ok of j0 and after_any of j2, on hold",
    ),
    (ev.JobHeld(job="j1", by="ann", reason="wait for data"), "held: it is not started before it is released: wait for data (by ann)"),
    (ev.JobHeld(job="j1", requeue=True), "held, and asked to leave where it runs"),
    (ev.JobReleased(job="j1", by="ann"), "released: it may be started (by ann)"),
    (ev.ElementsQueued(job="j1", indices=(3,)), "element 3 of the array queued"),
    (ev.ElementsQueued(job="j1", indices=(0, 1, 2, 7)), "elements 0-2, 7 of the array queued"),
    (ev.JobStopRequested(job="j1", by="ann", reason="wrong data"), "stop requested: wrong data (by ann)"),
    (
        ev.GangPlaced(job="j1", generation=2, parts=(part("n1", 0, 8), part("n2", 8, 8))),
        "placed on n1 (ranks 0-7) and n2 (ranks 8-15) as generation 2",
    ),
    (ev.GangsDeferred(jobs=("j1", "j2"), code="gpus", message="needs 16 GPUs, 8 are free"), "waits: needs 16 GPUs, 8 are free"),
    (
        ev.GangReleased(job="j1", generation=1, master_addr="fe80::1", master_port=29500),
        "every node is ready: the ranks of generation 1 start and meet at [fe80::1]:29500",
    ),
    (
        ev.GangRestarting(job="j1", generation=1, cause="rank_failed", failure_class="application", message="rank 3 ended by SIGKILL"),
        "restarting in place: rank 3 ended by SIGKILL",
    ),
    (
        ev.RankRestarting(job="j1", generation=1, ranks=(3,), cause="rank_failed", failure_class="application", message="rank 3 exited with 1"),
        "restarting rank 3 alone: rank 3 exited with 1",
    ),
    (
        ev.GangReserved(
            job="j1", start_ms=9, parts=(ev.ReservedPart("n1", 8, 0, 0), ev.ReservedPart("n2", 0, 1000, 0)), message="until j2 has ended"
        ),
        "room is kept for it on n1 (8 GPUs) and n2: until j2 has ended",
    ),
    (ev.GangReserved(job="j1", message="others are before it"), "no room is kept for it any more: others are before it"),
    (
        ev.GangPreempting(job="j1", generation=1, cause="drain", message="node n1 is drained", deadline_ms=9, grace_s=30.0),
        "asked to checkpoint and leave within 30 s: node n1 is drained",
    ),
    (
        ev.GangResizing(
            job="j1", generation=1, parts=(part("n1", 0, 8),), cause="shrink", message="makes room for j9", deadline_ms=9, grace_s=30.0
        ),
        "asked to checkpoint within 30 s, to go on with 8 ranks on n1: makes room for j9",
    ),
    (
        ev.GangResizing(
            job="j1", generation=1, parts=(part("n1", 0, 8),), cause="prepare_failed", message="n2 could not prepare", deadline_ms=9,
            grace_s=0.0, avoid=(("n2", 5),),
        ),
        "goes on with 8 ranks on n1: n2 could not prepare (not on n2 for now)",
    ),
    (
        ev.GangRequeued(
            job="j1", generation=1, cause="node_lost", failure_class="infrastructure", message="node n2 lost", lost_nodes=("n2",),
            avoid=(("n2", 5),),
        ),
        "back in the queue: node n2 lost (not on n2 for now)",
    ),
    (ev.GangFinished(job="j1", outcome="succeeded", cause="completed", message=""), "succeeded"),
    (
        ev.GangFinished(job="j1", outcome="failed", cause="rank_failed", message="rank 0 exited with 2", exit_code=2),
        "failed with exit code 2: rank 0 exited with 2",
    ),
    (ev.NodeJoined(registration=NODE), "node n1 joined with 8 GPUs (H100), 1 of them unhealthy, 64 CPUs, 512 GiB"),
    (ev.NodeLost(node="n2", cause="lease_expired", message="lease expired"), "node n2 lost: lease expired"),
    (ev.NodePrepared(job="j1", generation=1, node="n1"), "n1 is ready for generation 1"),
    (ev.PrepareFailed(job="j1", generation=1, node="n1", message="no such workdir"), "n1 cannot start its ranks: no such workdir"),
    (ev.RanksStarted(job="j1", generation=1, node="n1", ranks=(0, 1, 2, 5)), "ranks 0-2, 5 started on n1"),
    (
        ev.RanksExited(job="j1", node="n1", exits=(RankExit(0, 1, 0), RankExit(1, 1, 0), RankExit(2, 1, -9), RankExit(3, 1, 1, "oom", "8 GiB"))),
        "ranks 0-1 exited with 0, rank 2 ended by SIGKILL and rank 3 ran out of memory on n1: 8 GiB",
    ),
    (ev.PartReleased(job="j1", node="n1"), "nothing is left on n1"),
    (ev.ProgressReported(job="j1", generation=1, step=40), "reached step 40"),
    (ev.CheckpointReported(job="j1", generation=1, step=40, path="/ckpt/40"), "wrote a checkpoint at step 40 to /ckpt/40"),
    (
        ev.HealthReported(node="n1", device="GPU-7", symptoms=(Symptom("xid-79", 1000, 5, "Xid 79 (fell off the bus)"),)),
        "GPU-7 of n1: Xid 79 (fell off the bus)",
    ),
    (ev.HealthReported(node="n1", device="GPU-7"), "GPU-7 of n1 has nothing more to report"),
    (
        ev.HealthChanged(node="n1", device="GPU-7", state="quarantined", cause="xid-79", message="Xid 79", action="reboot_node"),
        "GPU-7 of n1 is quarantined: Xid 79; it needs a reboot of its node",
    ),
    (ev.HealthChanged(node="n1", state="healthy", cause="operator", message="new fan", by="ann"), "node n1 is healthy again: new fan (by ann)"),
    (
        ev.RankSlow(job="j1", generation=1, rank=3, node="n1", pace_ms=900, median_ms=300, score_tenths=62),
        "rank 3 on n1 is slow: 900 ms for a step, 300 ms are usual in its gang, 6.2 times the spread",
    ),
    (ev.StopAcknowledged(job="j1", generation=1, node="n1"), "its ranks on n1 have saved and may be stopped"),
    *(
        (ev.NodeAdministered(node="n1", action=action, by="ann", reason="fan", deadline_s=7200.0), said)  # type: ignore[arg-type]
        for action, said in (
            ("cordon", "node n1 cordoned: no new ranks: fan (by ann)"),
            ("uncordon", "node n1 takes new ranks again: fan (by ann)"),
            ("drain", "node n1 draining: its gangs are moved, all of them after 2 h: fan (by ann)"),
            ("undrain", "node n1 is no longer drained: fan (by ann)"),
            ("confirm_dead", "node n1 is confirmed to be off: fan (by ann)"),
        )
    ),
    (
        ev.ReservationDeclared(
            reservation=Reservation("fans", (KeptNode("n1"), KeptNode("n2", 3)), 0, 7_200_000, maintenance=True, by="ann", reason="new fans")
        ),
        "reservation fans: n1 and 3 GPUs of n2 for maintenance, for 2 h: new fans (by ann)",
    ),
    (
        ev.ReservationDeclared(reservation=Reservation("r", (KeptNode("n1"),), 0, 60_000, queues=("nlp",), users=("ann",))),
        "reservation r: n1 for queue nlp and user ann, for 60 s",
    ),
    (ev.ReservationBegun(name="fans"), "reservation fans begins"),
    (ev.ReservationRemoved(name="fans", by="ann", reason="done"), "reservation fans ends: done (by ann)"),
    (
        ev.QueuesDeclared(queues=(QueueSpec("research"), QueueSpec("research/nlp"), QueueSpec("batch")), by="ann", reason="new team"),
        "3 queues declared (research, research/nlp and batch): new team (by ann)",
    ),
]


@pytest.mark.parametrize(("event", "said"), EXAMPLES, ids=lambda x: x.NAME if isinstance(x, ev.LogEvent) else "")
def test_sentences(event: ev.LogEvent, said: str) -> None:
    assert sentence(event, "j1") == said


def test_every_event_has_a_sentence_here() -> None:
    assert {type(e) for e, _ in EXAMPLES} == set(ev.REGISTRY.values())


def test_the_job_is_named_to_a_reader_of_everything() -> None:
    assert sentence(ev.PartReleased(job="j1", node="n1")) == "j1: nothing is left on n1"
    assert sentence(ev.GangsDeferred(jobs=("j1", "j2"), code="c", message="m")) == "j1 and j2: waits: m"
    assert sentence(ev.NodeLost(node="n2", cause="c", message="")) == "node n2 lost: c"


def test_long_lists_are_counted() -> None:
    placed = ev.GangPlaced(job="j1", generation=1, parts=tuple(part(f"n{i}", i, 1) for i in range(1000)))
    assert sentence(placed, "j1").endswith("n5 (rank 5) and 994 more as generation 1")
    assert numbers(range(0, 40, 2)).endswith("10 and 14 more ranges")


def test_whom_events_concern() -> None:
    placed = ev.GangPlaced(job="j1", generation=1, parts=(part("n1", 0, 1), part("n2", 1, 1)))
    assert concerns(placed) == (("j1",), ("n1", "n2"))
    assert concerns(ev.NodeLost(node="n1", cause="c", message="m")) == ((), ("n1",))
    assert concerns(ev.NodeJoined(registration=NODE)) == ((), ("n1",))
    assert concerns(ev.LeaderElected(scheduler="s")) == ((), ())
    assert concerns(ev.GangsDeferred(jobs=("a", "b"), code="c", message="m")) == (("a", "b"), ())
    assert concerns(ev.RanksStarted(job="j1", generation=1, node="n1", ranks=(0,))) == (("j1",), ("n1",))


def test_a_story_has_what_befell_its_nodes_while_it_was_on_them() -> None:
    story = JobStory("j1")
    lost = ev.NodeLost(node="n1", cause="c", message="m")
    placed = ev.GangPlaced(job="j1", generation=1, parts=(part("n1", 0, 1),))
    requeued = ev.GangRequeued(job="j1", generation=1, cause="node_lost", failure_class="infrastructure", message="m", lost_nodes=("n1",))
    other = ev.PartReleased(job="j2", node="n1")
    assert [story.tells(e) for e in (lost, placed, other, lost, requeued, lost)] == [False, True, False, True, True, False]


def test_words() -> None:
    assert [duration(s) for s in (0.5, 45, 600, 3600, 5400)] == ["0.5 s", "45 s", "10 min", "1 h", "1 h 30 min"]
    assert exit_words(-64) == "ended by signal 64"
    assert exit_words(0, "strange") == "ended (strange)"
