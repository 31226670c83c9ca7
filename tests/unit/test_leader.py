"""A leader's term on the memory store, with a stand-in for the agents at the documents that they read and write."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from gangline.core.model.codec import unpack
from gangline.core.model.documents import Desired, Gpu, Observed, ObservedGang, ObservedRank, Registration
from gangline.core.model.spec import Gang, JobSpec, Preemption, Resources, Restart
from gangline.core.model.statecodec import dump_state
from gangline.core.store.keys import Keys
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.node import StoreNode
from gangline.core.store.recover import recover
from gangline.core.telemetry import setup, structured_logging
from gangline.leader.commands import Accepted, Administer, Refused, SetBrake, Stop, Submit
from gangline.leader.scheduler import Scheduler
from gangline.leader.service import NotLeader

KEYS = Keys("test")


class Node:
    """A node's agent reduced to its documents: does what is desired at once, and lets the test end ranks."""

    def __init__(self, cluster: MemoryCluster, name: str, gpus: int = 8, ttl_s: float = 5.0) -> None:
        self.name = name
        self.store = StoreNode(MemoryStore(cluster, name), "test", name)
        self.registration = Registration(
            node=name, identity=f"id-{name}", boot_id="boot", address=f"10.0.0.{name[1:]}", agent_url="", cpus_milli=64_000,
            memory_mib=512_000, gpus=tuple(Gpu(i, f"{name}-gpu{i}", "H100", 81_559) for i in range(gpus)), lease_ttl_s=ttl_s,
        )  # fmt: skip
        self.ttl_s = ttl_s
        self.ended: dict[tuple[str, int], tuple[int, str]] = {}
        self.desired: Desired | None = None
        self.can_prepare = True
        self.sequence = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.store.register(self.registration, ttl_s=self.ttl_s)
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._beat())]

    async def kill(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end_rank(self, rank: int, generation: int, code: int = 0, cause: str = "") -> None:
        self.ended[str(rank), generation] = (code, cause)
        await self.report()

    async def report(self) -> None:
        assert self.desired is not None
        self.sequence += 1
        gangs = []
        for g in self.desired.gangs:
            phase = "running" if g.phase == "run" else "prepared" if self.can_prepare else "prepare_failed"
            ranks = [self._rank(r.rank, r.generation) for r in g.ranks] if g.phase == "run" else []
            gangs.append(ObservedGang(g.job, g.generation, phase, tuple(ranks), address=self.registration.address, port=4242, message="no disk"))
        await self.store.write_observed(
            Observed(self.name, f"id-{self.name}", "boot", self.sequence, self.desired.index, self.desired.epoch, tuple(gangs))
        )

    def _rank(self, rank: int, generation: int) -> ObservedRank:
        if (str(rank), generation) in self.ended:
            code, cause = self.ended[str(rank), generation]
            return ObservedRank(rank, generation, "exited", 1, code, cause, exited_at_ms=1)
        return ObservedRank(rank, generation, "running", 1)

    async def _follow(self) -> None:
        async for desired in self.store.watch_desired():
            self.desired = desired
            await self.report()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.ttl_s / 4)
            await self.store.keepalive()


class World:
    def __init__(self, folder: Path) -> None:
        self.cluster = MemoryCluster()
        self.folder = folder
        self.journal = io.StringIO()
        self.schedulers: dict[str, tuple[Scheduler, asyncio.Task[None]]] = {}
        self.nodes: dict[str, Node] = {}

    async def scheduler(self, name: str) -> Scheduler:
        s = Scheduler(
            name=name, store=MemoryStore(self.cluster, name), keys=KEYS, url=f"http://{name}", state_dir=self.folder / name, ttl_s=2.0,
            telemetry=setup("test"), journal=structured_logging("debug", self.journal),
        )  # fmt: skip
        self.schedulers[name] = (s, asyncio.create_task(s.run()))
        return s

    async def node(self, name: str, **more: float) -> Node:
        node = self.nodes[name] = Node(self.cluster, name, **more)  # type: ignore[arg-type]
        await node.start()
        return node

    async def crash(self, name: str) -> None:
        """End a scheduler without letting it hand over."""
        _, task = self.schedulers.pop(name)
        self.cluster.faults.partitioned.add(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.kill()
        for s, task in self.schedulers.values():
            await s.stop()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(task, 5)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    w = World(tmp_path)
    try:
        yield w
    finally:
        await w.close()
        sys.stderr.write(w.journal.getvalue())


async def until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a condition; the condition is looked at whenever anything else has run."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.002)


async def submit(s: Scheduler, job: str, ranks: int = 1, gpus: int = 1, **more: object) -> Accepted:
    await until(lambda: s.role == "leader" and s.term is not None, "leading")
    spec = JobSpec(("train",), gang=Gang(ranks, ranks), resources=Resources(gpus=gpus, cpus_milli=100), **more)  # type: ignore[arg-type]
    (answer,) = await s.execute([Submit(job, spec)])
    assert isinstance(answer, Accepted), answer
    return answer


async def test_a_single_rank_runs_and_ends_and_its_device_is_free_again(world: World) -> None:
    s = await world.scheduler("a")
    n1 = await world.node("n1")
    await submit(s, "j1")
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    assert s.state.nodes["n1"].free_gpus == (1, 2, 3, 4, 5, 6, 7)
    await n1.end_rank(0, 1)
    await until(lambda: s.state.jobs["j1"].state == "finished", "finished")
    assert s.state.jobs["j1"].outcome == "succeeded"
    assert len(s.state.nodes["n1"].free_gpus) == 8
    await until(lambda: n1.desired is not None and not n1.desired.gangs, "withdrawn")
    assert (await MemoryStore(world.cluster).range(KEYS.jobs)).kvs == []


async def test_a_gang_of_two_nodes_starts_together_after_both_prepared(world: World) -> None:
    s = await world.scheduler("a")
    n1, n2 = await world.node("n1"), await world.node("n2")
    await submit(s, "j1", ranks=16)
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    job = s.state.jobs["j1"]
    assert (job.master_addr, job.master_port) == ("10.0.0.1", 4242)
    await s.view()  # the state may be ahead of the log for the time of an append
    events = [type(e).__name__ async for f in s.entries(1) for e in f.events]
    assert events.count("NodePrepared") == 2
    assert events.index("GangReleased") < events.index("RanksStarted")
    assert n1.desired is not None
    assert n2.desired is not None
    assert [r.rank for g in n1.desired.gangs + n2.desired.gangs for r in g.ranks] == list(range(16))


async def test_a_failed_rank_restarts_the_gang_in_place_at_once_and_then_with_backoff(world: World) -> None:
    s = await world.scheduler("a")
    n1, _ = await world.node("n1"), await world.node("n2")
    await submit(s, "j1", ranks=16, restart=Restart(backoff_initial_s=0.3))
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    nodes = s.state.jobs["j1"].nodes()
    await n1.end_rank(3, 1, code=-9)
    await until(lambda: s.state.jobs["j1"].generation == 2 and s.state.jobs["j1"].state == "running", "second generation")
    job = s.state.jobs["j1"]
    assert job.nodes() == nodes
    assert job.restart is not None
    assert (job.restart.cause, job.restart.failure_class, job.restart.lost_ranks) == ("rank_failed", "application", (3,))
    await n1.end_rank(3, 2, code=1)
    await until(lambda: s.state.jobs["j1"].state == "restarting", "waiting out the backoff")
    waits = s.state.jobs["j1"].not_before_ms - s.state.jobs["j1"].since_ms
    assert waits == 300
    await until(lambda: s.state.jobs["j1"].generation == 3 and s.state.jobs["j1"].state == "running", "third generation")


async def test_a_lost_node_moves_the_whole_gang(world: World) -> None:
    s = await world.scheduler("a")
    for n in ("n1", "n2", "n3"):
        await world.node(n, ttl_s=2.0)
    await submit(s, "j1", ranks=16)
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    assert s.state.jobs["j1"].nodes() == ["n1", "n2"]
    await world.nodes["n2"].kill()
    await until(lambda: s.state.jobs["j1"].generation == 2 and s.state.jobs["j1"].state == "running", "moved")
    job = s.state.jobs["j1"]
    assert job.nodes() == ["n1", "n3"]
    assert job.restart is not None
    assert (job.restart.cause, job.restart.lost_nodes, job.restart.new_nodes) == ("node_lost", ("n2",), ("n3",))
    assert job.failures_ms == []
    assert s.state.nodes["n2"].status == "lost"


async def test_a_standby_takes_over_with_the_same_state_and_ranks_do_not_notice(world: World) -> None:
    a = await world.scheduler("a")
    n1 = await world.node("n1")
    await submit(a, "j1")
    await until(lambda: a.state.jobs["j1"].state == "running", "running")
    b = await world.scheduler("b")
    await until(lambda: b.state.index == a.state.index, "following")
    assert dump_state(b.state) == dump_state(a.state)
    with pytest.raises(NotLeader):
        await b.execute([Stop("j1")])
    before = n1.desired
    await world.crash("a")
    await until(lambda: b.role == "leader" and b.term is not None, "taking over")
    await until(lambda: b.state.leader == "b", "its election is in the log")
    assert b.state.jobs["j1"].state == "running"
    assert n1.desired == before
    await n1.end_rank(0, 1)
    await until(lambda: b.state.jobs["j1"].state == "finished", "finished under the new leader")
    await b.view()
    found = await recover(MemoryStore(world.cluster), KEYS)
    assert dump_state(found.state) == dump_state(b.state)


async def test_a_stopped_leader_hands_over_at_once(world: World) -> None:
    a = await world.scheduler("a")
    await submit(a, "j1")
    b = await world.scheduler("b")
    await until(lambda: b.state.index == a.state.index, "following")
    await a.stop()
    await until(lambda: b.role == "leader", "taking over", timeout_s=1.0)
    assert b.state.jobs["j1"].deferral is not None
    assert b.state.jobs["j1"].deferral.code == "no_nodes"


async def test_ranks_that_end_while_nobody_leads_are_not_lost(world: World) -> None:
    a = await world.scheduler("a")
    n1 = await world.node("n1")
    await submit(a, "j1")
    await until(lambda: a.state.jobs["j1"].state == "running", "running")
    await world.crash("a")
    await n1.end_rank(0, 1, code=0)
    b = await world.scheduler("b")
    await until(lambda: "j1" in b.state.jobs and b.state.jobs["j1"].state == "finished", "told by the observed document")


async def test_a_node_that_cannot_prepare_is_avoided(world: World) -> None:
    s = await world.scheduler("a")
    bad = await world.node("n1")
    bad.can_prepare = False
    await world.node("n2")
    await world.node("n3")
    await submit(s, "j1", ranks=16)
    await until(lambda: s.state.jobs["j1"].state == "running", "running elsewhere")
    assert s.state.jobs["j1"].nodes() == ["n2", "n3"]
    assert s.state.jobs["j1"].generation == 2


async def test_stop_frees_devices_only_when_the_node_says_so(world: World) -> None:
    s = await world.scheduler("a")
    n1 = await world.node("n1")
    await submit(s, "j1")
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    await n1.kill()
    (answer,) = await s.execute([Stop("j1", by="ann", reason="enough")])
    assert isinstance(answer, Accepted)
    state = await s.view(answer.index, 5.0)
    assert (state.jobs["j1"].state, state.jobs["j1"].outcome) == ("finished", "cancelled")
    assert len(state.nodes["n1"].free_gpus) == 7
    await n1.start()
    await until(lambda: len(s.state.nodes["n1"].free_gpus) == 8, "released")
    (again,) = await s.execute([Stop("j1")])
    assert isinstance(again, Accepted)
    assert again.replayed


async def test_drain_asks_and_then_moves(world: World) -> None:
    s = await world.scheduler("a")
    await world.node("n1")
    await submit(s, "j1", preemption=Preemption(grace_s=0.2))
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    await world.node("n2")
    await until(lambda: "n2" in s.state.nodes, "second node")
    await s.execute([Administer("n1", "drain", reason="fan")])
    await until(lambda: s.state.jobs["j1"].nodes() == ["n2"] and s.state.jobs["j1"].state == "running", "moved")
    job = s.state.jobs["j1"]
    assert job.restart is not None
    assert job.restart.cause == "drain"


async def test_the_brake_holds_when_most_nodes_vanish_at_once(world: World) -> None:
    s = await world.scheduler("a")
    for n in ("n1", "n2", "n3", "n4"):
        await world.node(n, ttl_s=2.0)
    await submit(s, "j1", ranks=32)
    await until(lambda: s.state.jobs["j1"].state == "running", "running")
    for n in ("n1", "n2", "n3"):
        await world.nodes[n].kill()
    await until(lambda: s.state.brake.on, "brake")
    assert s.state.jobs["j1"].state == "running"
    await asyncio.gather(*(world.nodes[n].start() for n in ("n1", "n2", "n3")))
    (answer,) = await s.execute([SetBrake(False, by="ann")])
    assert isinstance(answer, Accepted)
    assert not s.state.brake.on
    assert s.state.jobs["j1"].generation == 1


async def test_idempotency_and_names(world: World) -> None:
    s = await world.scheduler("a")
    await until(lambda: s.term is not None, "leading")
    spec = JobSpec(("true",), name="one")
    one = Submit("j1", spec, idempotency_key="k", body_digest="d")
    first, second = await s.execute([one, msgspec.structs.replace(one, job="j2")])
    assert isinstance(first, Accepted)
    assert isinstance(second, Accepted)
    assert (second.subject, second.replayed) == ("j1", True)
    (other,) = await s.execute([msgspec.structs.replace(one, job="j3", body_digest="e")])
    assert isinstance(other, Refused)
    assert other.status == 422
    (name,) = await s.execute([Submit("j4", spec)])
    assert isinstance(name, Refused)
    assert name.status == 409
    raw = await MemoryStore(world.cluster).get(KEYS.leader)
    assert raw is not None
    assert unpack(raw.value, dict)["name"] == "a"
