"""What the leader makes of documents, leases and time: pure functions, and the inbox over a store with rubbish in it."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from gangline.core.model import events as ev
from gangline.core.model.documents import Gpu, Observed, ObservedGang, ObservedRank, Registration
from gangline.core.model.fold import apply, seal
from gangline.core.model.spec import Gang, JobSpec, Resources, Restart
from gangline.core.model.state import State
from gangline.core.store.keys import Keys
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.node import NameTaken, StoreNode
from gangline.leader import ingest
from gangline.leader.clock import LogClock
from gangline.leader.watchers import NodeInbox

KEYS = Keys("test")


def registration(node: str, **more: object) -> Registration:
    gpus = tuple(Gpu(i, f"{node}-{i}", "H100", 80_000) for i in range(8))
    return Registration(node, f"id-{node}", "b", node, "", gpus, 64_000, 512_000, lease_ttl_s=5.0, **more)  # type: ignore[arg-type]


def fold(state: State, *events: ev.LogEvent) -> None:
    for e in events:
        apply(state, e, state.index + 1, 1, 1_000)
    seal(state, state.index + 1, bytes(32))


@pytest.fixture
def state() -> State:
    s = State()
    fold(s, ev.LeaderElected(scheduler="s"), *(ev.NodeJoined(registration=registration(n)) for n in ("n1", "n2", "n3", "n4")))
    return s


def place(state: State, *nodes: str, restart: Restart = Restart()) -> None:  # noqa: B008 - immutable
    spec = JobSpec(("x",), gang=Gang(len(nodes), len(nodes)), resources=Resources(gpus=1), restart=restart)
    parts = tuple(ev.PlacedPart(n, (ev.PlacedRank(i, (0,)),)) for i, n in enumerate(nodes))
    fold(state, ev.JobSubmitted(job="j", spec=spec), ev.GangPlaced(job="j", generation=1, parts=parts))
    if len(nodes) > 1:
        fold(state, *(ev.NodePrepared(job="j", generation=1, node=n) for n in nodes))
        fold(state, ev.GangReleased(job="j", generation=1, master_addr="a", master_port=1))


def document(state: State, *gangs: ObservedGang, node: str = "n1") -> Observed:
    return Observed(node, f"id-{node}", "b", 1, state.index, state.epoch, gangs)


def test_a_gang_that_its_node_no_longer_names_has_ended_there(state: State) -> None:
    place(state, "n1", "n2")
    assert ingest.observed(state, document(state), 1_000) == [], "its start may wait for devices"
    fold(state, ev.RanksStarted(job="j", generation=1, node="n1", ranks=(0,)))
    (exited,) = ingest.observed(state, document(state), 1_000)
    assert isinstance(exited, ev.RanksExited)
    assert [(x.rank, x.cause) for x in exited.exits] == [(0, "lost")]
    fold(state, exited)
    assert ingest.observed(state, document(state), 1_000) == []


def test_failing_to_start_is_heard_after_the_barrier_too(state: State) -> None:
    place(state, "n1", "n2", restart=Restart(on_rank_failure="rank"))
    failed = ObservedGang("j", 1, "prepare_failed", message="device 0 is not healthy")
    (event,) = ingest.observed(state, document(state, failed), 1_000)
    assert isinstance(event, ev.PrepareFailed)
    fold(state, *(ev.RanksStarted(job="j", generation=1, node=f"n{r + 1}", ranks=(r,)) for r in (0, 1)))
    assert state.jobs["j"].state == "running"
    running = ObservedRank(0, 1, "running", 1)
    assert ingest.observed(state, document(state, ObservedGang("j", 1, "prepare_failed", (running,))), 1_000) == [], "what runs, runs"
    fold(state, ev.RanksExited(job="j", node="n1", exits=(ev.RankExit(0, 1, 1),)))
    fold(state, ev.RankRestarting(job="j", generation=1, ranks=(0,), cause="rank_failed", failure_class="application", message=""))
    (event,) = ingest.observed(state, document(state, ObservedGang("j", 2, "prepare_failed", message="gone")), 1_000)
    assert isinstance(event, ev.PrepareFailed)
    fold(state, event)


def test_one_node_that_comes_and_goes_is_no_reason_for_the_brake(state: State) -> None:
    for _ in range(6):
        (lost,) = ingest.vanished(state, ["n1"], ["n1"], 1_000)
        assert isinstance(lost, ev.NodeLost)
        fold(state, lost, ev.NodeJoined(registration=registration("n1")))


def test_what_the_brake_held_back_goes_with_it(state: State) -> None:
    missing = ["n1", "n2", "n3"]
    (brake,) = ingest.vanished(state, missing, missing, 1_000)
    fold(state, brake)
    assert ingest.vanished(state, missing, missing, 1_000 + ingest.BRAKE_MS - 1) == []
    off, *lost = ingest.vanished(state, missing, missing, 1_000 + ingest.BRAKE_MS)
    assert isinstance(off, ev.BrakeSet)
    assert [e.node for e in lost if isinstance(e, ev.NodeLost)] == missing
    fold(state, off, *lost)


def test_a_leader_that_saw_old_entries_arrive_begins_at_the_end_of_the_log() -> None:
    now = 100.0
    clock = LogClock(lambda: now, lambda: 0)
    clock.saw(5_000)
    clock.start_from(65_000)
    assert clock.now_ms() == 65_000
    now += 1.0
    assert clock.now_ms() == 66_000, "time goes on from there, it does not stand still until it has caught up"


async def test_rubbish_in_the_place_of_a_registration_neither_keeps_a_dead_node_nor_takes_a_name() -> None:
    cluster, now = MemoryCluster(), 0.0
    store = MemoryStore(cluster)
    inbox = NodeInbox(store, KEYS, lambda: None, lambda: now)
    node = StoreNode(MemoryStore(cluster, "n1"), "test", "n1")
    await node.register(registration("n1"), ttl_s=5.0)
    await inbox.start()
    run = asyncio.create_task(inbox.run())
    await store.put(KEYS.alive("n1"), b"\xc1rubbish")
    await store.put(KEYS.observed("n1"), b"\xc1rubbish")
    while len(inbox.unreadable) < 1 or "n1" not in inbox.missing:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert inbox.due()[0] == []
    now = 5.0
    assert inbox.due()[0] == ["n1"]
    await node.register(registration("n1"), ttl_s=5.0)
    while inbox.missing:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    other = Registration("n1", "another", "b", "n1", "", (), 1, 1)
    with pytest.raises(NameTaken):
        await StoreNode(store, "test", "n1").register(other, ttl_s=5.0)
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await run


@pytest.mark.parametrize("clock_ms", [0, 1_800_000_000_000, -5_000])
def test_when_a_rank_ended_is_told_in_log_time_whatever_the_clock_of_its_node_says(state: State, clock_ms: int) -> None:
    place(state, "n1", "n2")
    fold(state, *(ev.RanksStarted(job="j", generation=1, node=f"n{r + 1}", ranks=(r,)) for r in (0, 1)))
    ended = ObservedRank(0, 1, "exited", 1, exit_code=1, exited_at_ms=10_000_000 + clock_ms)
    doc = msgspec.structs.replace(document(state, ObservedGang("j", 1, "running", (ended,))), at_ms=10_000_300 + clock_ms)
    (event,) = ingest.observed(state, doc, 77_000)
    assert isinstance(event, ev.RanksExited)
    assert event.exits[0].at_ms == 76_700
