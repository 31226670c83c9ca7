"""Log, snapshots, recovery and election on a real cluster: what the model could get wrong."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gangline.core.store.api import OutOfSpace, TooLarge
from gangline.core.store.candidate import encode, this_process
from gangline.core.store.election import Election
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.fencing import Fenced
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log, LogGap, Truncated
from gangline.core.store.snapshots import Snapshots
from gangline.core.store.watching import Timing

pytestmark = pytest.mark.etcd

QUICK = Timing(quiet_s=0.2, behind_s=0.5)

Connect = Callable[..., Awaitable[EtcdStore]]
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
async def connect(etcd_endpoint: str) -> AsyncIterator[Connect]:
    """Factory of clients: of the shared server, or of the endpoint given."""
    stores: list[EtcdStore] = []

    async def factory(endpoint: str = "", timeout_s: float = 5.0) -> EtcdStore:
        stores.append(await EtcdStore.connect([endpoint or etcd_endpoint], timeout_s=timeout_s, timing=QUICK))
        return stores[-1]

    yield factory
    for store in stores:
        await store.close()


@pytest.fixture
async def store(connect: Connect) -> EtcdStore:
    return await connect()


@pytest.fixture
def keys() -> Keys:
    """Keys of a cluster that nobody else uses."""
    return Keys(f"t-{uuid.uuid4()}")


def frame(index: int, size: int = 0) -> tuple[bytes, bytes]:
    nonce = f"nonce-{index:08d}".encode()
    return b"frame " + nonce + b"." * size, nonce


async def append(log: Log, index: int, token: int, size: int = 0) -> int:
    data, nonce = frame(index, size)
    return await log.append(data, index=index, nonce=nonce, token=token)


async def fill(log: Log, token: int, first: int, last: int) -> None:
    for index in range(first, last + 1):
        await append(log, index, token)


async def indexes(log: Log, first: int = 1, last: int | None = None) -> list[int]:
    return [index async for index, _, _ in log.read(first, last)]


async def test_append_read_fence(store: EtcdStore, keys: Keys) -> None:
    log = Log(store, keys)
    token = await store.put(keys.leader, b"a")
    revision = await append(log, 1, token)
    assert [e async for e in log.read(1)] == [(1, frame(1)[0], revision)]
    assert await append(log, 1, token) == revision  # the same frame again is the same append
    await store.delete(keys.leader)
    newer = await store.put(keys.leader, b"b")
    with pytest.raises(Fenced) as e:
        await append(log, 2, token)
    assert (e.value.held, e.value.seen) == (token, newer)
    assert await indexes(log) == [1]


async def test_an_answer_that_is_lost_is_settled(connect: Connect, etcd_endpoint: str, keys: Keys, tcp_proxy: Callable[..., Any]) -> None:
    direct = await connect()
    proxy = await tcp_proxy(etcd_endpoint)
    log = Log(await connect(proxy.endpoint, timeout_s=1.0), keys)
    token = await direct.put(keys.leader, b"a")
    await append(log, 1, token)
    for index in range(2, 6):
        proxy.black_hole()  # requests arrive, answers do not
        pending = asyncio.create_task(append(log, index, token))
        async with asyncio.timeout(10):
            while await direct.get(keys.frame(index)) is None:  # noqa: ASYNC110 - waits for another client's write
                await asyncio.sleep(0.01)
        proxy.cut()
        await pending
    assert await indexes(log) == [1, 2, 3, 4, 5]
    assert all(kv.version == 1 for kv in (await direct.range(keys.log)).kvs)


async def test_pages_of_many_and_of_big_frames(store: EtcdStore, keys: Keys) -> None:
    log = Log(store, keys)
    token = await store.put(keys.leader, b"a")
    for index in range(1, 1_501):
        await append(log, index, token)
    for index in range(1_501, 1_511):
        await append(log, index, token, size=1_000_000)
    assert await indexes(log) == list(range(1, 1_511))
    assert await indexes(log, 700, 1_502) == list(range(700, 1_503))
    with pytest.raises(TooLarge):
        await append(log, 1_511, token, size=3_000_000)
    await log.truncate(1_400, token)
    with pytest.raises(Truncated) as e:
        await indexes(log)
    assert e.value.first_available == 1_400
    await store.delete(keys.frame(1_450))
    with pytest.raises(LogGap, match="log frame 1450: is missing"):
        await indexes(log, 1_400)


async def test_follow_through_truncation_and_compaction(
    connect: Connect, keys: Keys, start_etcd: Callable[..., Any], tcp_proxy: Callable[..., Any], eventually: Eventually
) -> None:
    endpoint = start_etcd().endpoint
    store, proxy = await connect(endpoint), await tcp_proxy(endpoint)
    log, followed = Log(store, keys), Log(await connect(proxy.endpoint, timeout_s=1.0), keys)
    token = await store.put(keys.leader, b"a")
    got: list[int] = []

    async def follow() -> None:
        async for batch in followed.follow(1, 1):
            got.extend(index for index, _, _ in batch)

    task = asyncio.create_task(follow())
    await fill(log, token, 1, 50)
    await eventually(lambda: len(got) == 50)
    proxy.refuse = True
    proxy.cut()
    for index in range(51, 1_500):
        await append(log, index, token)
    await log.truncate(40, token)
    await append(log, 1_500, token)
    await log.compact(1_500)
    proxy.refuse = False
    await append(log, 1_501, token)
    await eventually(lambda: len(got) == 1_501, timeout_s=20)
    assert got == list(range(1, 1_502))
    task.cancel()
    late = followed.follow(10, 1)
    with pytest.raises(Truncated):
        await anext(aiter(late))


async def test_snapshots_of_many_chunks(store: EtcdStore, keys: Keys) -> None:
    snapshots = Snapshots(store, keys)
    token = await store.put(keys.leader, b"a")
    state = b"".join(uuid.uuid4().bytes for _ in range(300_000))
    await snapshots.save(state, 100, token)
    await snapshots.save(b"small", 200, token)
    await snapshots.save(b"smaller", 300, token)
    assert await snapshots.latest() == (300, b"smaller")
    await store.put(keys.snapshot_chunk(300, 0), b"damaged")
    await store.put(keys.snapshot_chunk(200, 0), b"damaged")
    assert await snapshots.latest() == (100, state)
    assert await snapshots.prune(2, token=token) == 200


async def test_no_space_is_said_and_ends(connect: Connect, keys: Keys, start_etcd: Callable[..., Any]) -> None:
    etcd = start_etcd("--quota-backend-bytes", str(16 << 20))
    store = await connect(etcd.endpoint)
    log = Log(store, keys, settle_s=1.0)
    token = await store.put(keys.leader, b"a")
    index = 0

    async def fill_up() -> None:
        nonlocal index
        for index in range(1, 100):
            await append(log, index, token, size=1_000_000)

    with pytest.raises(OutOfSpace):
        await fill_up()
    reached = await indexes(log)
    await log.truncate(index - 2, token)
    await store.compact((await store.range(keys.log)).revision)
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")
    await append(log, index, token, size=1_000_000)
    assert reached[-1] in (index - 1, index)
    assert (await indexes(log, index - 2)) == [index - 2, index - 1, index]


async def test_election_handover_and_expiry(connect: Connect, keys: Keys) -> None:
    stores = [await connect() for _ in range(3)]
    elections = [Election(s, keys, f"s{i}", f"s{i}".encode(), 2.0) for i, s in enumerate(stores)]
    first = await elections[0].campaign()
    second_task = asyncio.create_task(elections[1].campaign())
    await asyncio.sleep(2.5)  # longer than the lease: it is kept alive
    assert first.valid()
    assert not second_task.done()
    await first.resign()
    second = await asyncio.wait_for(second_task, 2)
    third_task = asyncio.create_task(elections[2].campaign())
    second._task.cancel()  # as a process that was killed: nobody renews
    third = await asyncio.wait_for(third_task, 10)
    assert not second.valid()
    assert first.token < second.token < third.token
    await third.resign()


async def test_a_restart_of_the_same_scheduler_is_quick(connect: Connect, keys: Keys) -> None:
    store = await connect()
    lease = await store.lease_grant(600)
    mine = this_process("s")
    dead = type(mine)(mine.name, mine.boot_id, mine.pid_namespace, mine.pid, mine.started - 1)
    await store.put(keys.leader, encode(dead), lease=lease.id)
    term = await asyncio.wait_for(Election(store, keys, "s", encode(mine), 5.0).campaign(), 3)
    assert term.valid()
    await term.resign()
