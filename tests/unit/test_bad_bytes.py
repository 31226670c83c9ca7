"""Bytes that no scheduler and no agent has written, in the places where they read: what may go on does, what may not stops and says where."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.core.model.codec import BadFrame, encode_frame
from gangline.core.model.documents import Gpu, Registration
from gangline.core.model.spec import JobSpec
from gangline.core.store.keys import Keys
from gangline.core.store.log import LogGap
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.node import StoreNode
from gangline.core.telemetry import setup, structured_logging
from gangline.leader.commands import Accepted, Submit
from gangline.leader.scheduler import Scheduler

KEYS = Keys("test")


class World:
    def __init__(self, folder: Path) -> None:
        self.cluster = MemoryCluster()
        self.store = MemoryStore(self.cluster, "vandal")
        self.folder = folder
        self.journal = io.StringIO()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, keys: Keys = KEYS) -> Scheduler:
        s = Scheduler(
            name=name, store=MemoryStore(self.cluster, name), keys=keys, url=f"http://{name}", state_dir=self.folder / name, ttl_s=2.0,
            telemetry=setup("test"), journal=structured_logging("debug", self.journal),
        )  # fmt: skip
        self.tasks[name] = asyncio.create_task(s.run())
        return s

    async def ended(self, name: str) -> BaseException | None:
        await asyncio.wait([self.tasks[name]], timeout=30)
        return self.tasks[name].exception()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    w = World(tmp_path)
    yield w
    for task in w.tasks.values():
        task.cancel()
    await asyncio.gather(*w.tasks.values(), return_exceptions=True)


async def pair(world: World, eventually: Callable[..., Awaitable[None]]) -> tuple[Scheduler, Scheduler]:
    """A leader and a standby with one waiting job."""
    a = world.start("a")
    await eventually(lambda: a.term is not None and a.state.leader == "a")
    b = world.start("b")
    (answer,) = await a.execute([Submit("j1", JobSpec(("x",)))])
    assert isinstance(answer, Accepted)
    await eventually(lambda: b.role == "standby" and b.state.index == a.state.index)
    return a, b


def unknown_event(state: Any) -> bytes:
    return encode_frame(state.index + 1, state.epoch, state.at_ms, state.digest, b"n" * 12, [b"\x93\xa7unheard\x01\x80"])


@pytest.mark.parametrize("what", ["rubbish", "unknown", "fork"])
async def test_a_frame_that_no_leader_wrote_stops_everybody_at_its_index(
    world: World, eventually: Callable[..., Awaitable[None]], what: str
) -> None:
    a, _ = await pair(world, eventually)
    index = a.state.index + 1
    data = {
        "rubbish": b"\xc1\x00rubbish", "unknown": unknown_event(a.state),
        "fork": encode_frame(index, a.state.epoch, a.state.at_ms, bytes(32), b"n" * 12, []),
    }[what]  # fmt: skip
    await world.store.put(KEYS.frame(index), data)
    for name in ("b", "a"):
        asking = asyncio.create_task(a.execute([Submit("j2", JobSpec(("x",)))])) if name == "a" else None
        error = await world.ended(name)
        assert isinstance(error, BadFrame), error
        assert str(index) in str(error)
        if asking is not None:
            (answer,) = await asking
            assert isinstance(answer, Exception), "it was never acknowledged"
    kvs = (await world.store.range(KEYS.log)).kvs
    assert (kvs[-1].key, kvs[-1].value) == (KEYS.frame(index), data), "nobody has put anything over it or behind it"
    assert isinstance(await world.ended("b"), BadFrame)


async def test_a_gap_and_a_stranger_among_the_frames_stop_whoever_reads_there(world: World, eventually: Callable[..., Awaitable[None]]) -> None:
    a, _ = await pair(world, eventually)
    await a.execute([Submit("j2", JobSpec(("x",)))])
    await world.store.delete(KEYS.frame(2))
    c = world.start("c")
    error = await world.ended("c")
    assert isinstance(error, LogGap), (error, c.role)
    assert "2" in str(error)
    assert a.role == "leader", "who has folded it already needs it no more"
    await world.store.put(KEYS.log + b"zzz", b"?")
    assert isinstance(await world.ended("b"), LogGap)


async def test_rubbish_from_a_node_harms_only_that_node(world: World, eventually: Callable[..., Awaitable[None]]) -> None:
    a, _ = await pair(world, eventually)
    for key in (KEYS.observed("n1"), KEYS.alive("n1"), KEYS.desired("n1"), KEYS.nodes + b"x/y/z", KEYS.nodes + b"\xff\xfe", KEYS.job("j9")):
        await world.store.put(key, b"\xc1rubbish")
    registration = Registration("n2", "id", "b", "n2", "", (Gpu(0, "g", "H100"),), 64_000, 512_000, lease_ttl_s=5.0)
    await StoreNode(world.store, "test", "n2").register(registration, ttl_s=5.0)
    await eventually(lambda: a.state.jobs["j1"].state == "placed")
    assert a.state.jobs["j1"].nodes() == ["n2"]
    assert "unreadable_document" in world.journal.getvalue()


async def test_a_scheduler_of_another_cluster_is_none_of_ours(world: World, eventually: Callable[..., Awaitable[None]]) -> None:
    a, b = await pair(world, eventually)
    other = world.start("other", Keys("test-2"))
    await eventually(lambda: other.role == "leader" and other.term is not None)
    assert other.state.jobs == {}
    assert (a.role, b.role) == ("leader", "standby")


async def test_a_store_that_was_restored_from_an_older_backup_gets_no_hole(world: World, eventually: Callable[..., Awaitable[None]]) -> None:
    a, _ = await pair(world, eventually)
    revision, term = world.cluster.mvcc.revision, a.term
    await a.execute([Submit("j2", JobSpec(("x",)))])
    world.cluster.go_back(revision)
    (answer,) = await a.execute([Submit("j3", JobSpec(("x",)))])
    assert isinstance(answer, Exception), "what is lost is not built upon"
    await eventually(lambda: a.term is not term)
    kvs = (await MemoryStore(world.cluster, "reader").range(KEYS.log)).kvs
    assert [kv.key for kv in kvs] == [KEYS.frame(i) for i in range(1, len(kvs) + 1)]
