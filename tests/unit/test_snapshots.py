"""Snapshots: a snapshot counts only when it is whole, and what is damaged is passed over and named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import msgspec
import pytest

from gangline.core.model.codec import pack, unpack
from gangline.core.store.api import Op, TxnResult
from gangline.core.store.fencing import Fenced
from gangline.core.store.keys import Keys
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.snapshots import CHUNK_BYTES, BadSave, Manifest, Snapshots

KEYS = Keys("test")


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def store(cluster: MemoryCluster) -> MemoryStore:
    return MemoryStore(cluster, timeout_s=0.3)


@pytest.fixture
def snapshots(store: MemoryStore) -> Snapshots:
    return Snapshots(store, KEYS)


@pytest.fixture
async def token(store: MemoryStore) -> int:
    return await store.put(KEYS.leader, b"a")


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that do not become smaller by compression."""
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [0, 1, 1_000, CHUNK_BYTES - 1_000, CHUNK_BYTES + 1, 3_000_000])
async def test_a_saved_state_is_found_again(size: int, snapshots: Snapshots, token: int) -> None:
    state = noise(size)
    await snapshots.save(state, 17, token)
    assert await snapshots.latest() == (17, state)
    assert snapshots.skipped == []


async def test_chunks_are_small_and_compressed(snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    await snapshots.save(noise(1_200_000), 5, token)
    sizes = [len(kv.value) for kv in (await store.range(KEYS.snapshot(5))).kvs]
    assert max(sizes) <= CHUNK_BYTES
    assert len(sizes) == 4
    await snapshots.save(b"all the same " * 100_000, 6, token)
    assert sum(len(kv.value) for kv in (await store.range(KEYS.snapshot(6))).kvs) < 50_000


async def test_without_a_snapshot_there_is_none(snapshots: Snapshots) -> None:
    assert await snapshots.latest() is None


async def test_the_newest_wins_and_older_ones_can_be_asked_for(snapshots: Snapshots, token: int) -> None:
    for index in (9, 100, 20):
        await snapshots.save(b"state %d" % index, index, token)
    assert await snapshots.latest() == (100, b"state 100")
    assert await snapshots.latest(before=100) == (20, b"state 20")
    assert await snapshots.latest(before=9) is None


async def test_saving_the_same_again_writes_nothing(snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    await snapshots.save(b"state", 5, token)
    before = (await store.status()).revision
    await snapshots.save(b"state", 5, token)
    assert (await store.status()).revision == before


async def test_another_state_of_the_same_index_replaces_the_first_whole(snapshots: Snapshots, token: int) -> None:
    await snapshots.save(noise(2_000_000), 5, token)
    await snapshots.save(b"short", 5, token)
    assert await snapshots.latest() == (5, b"short")


@pytest.mark.parametrize("writes_before", range(5))
async def test_a_deposed_leader_leaves_no_valid_snapshot(writes_before: int, snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    real, count = store.txn, 0

    async def deposed_on_the_way(*args: object) -> TxnResult:
        nonlocal count
        if count == writes_before:
            await store.delete(KEYS.leader)
        count += 1
        return await real(*args)  # type: ignore[arg-type]

    store.txn = deposed_on_the_way  # type: ignore[method-assign, assignment]
    with pytest.raises(Fenced, match="snapshot 5"):
        await snapshots.save(noise(1_200_000), 5, token)
    assert await snapshots.latest() is None


async def test_ambiguous_writes_are_settled(snapshots: Snapshots, cluster: MemoryCluster, token: int) -> None:
    cluster.faults.ambiguous_write = 0.4
    cluster.faults.late_write_s = 0.01
    await snapshots.save(noise(3_000_000), 5, token)
    await asyncio.sleep(0.02)
    assert await snapshots.latest() == (5, noise(3_000_000))


async def test_a_store_that_gives_back_other_bytes_is_noticed(snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    real = store.txn

    async def flips_a_bit(compares: object, ops: list[Op], *rest: object) -> TxnResult:
        bad = [msgspec.structs.replace(op, value=op.value[:-1] + b"?") if hasattr(op, "value") else op for op in ops]
        return await real(compares, bad, *rest)  # type: ignore[arg-type]

    store.txn = flips_a_bit  # type: ignore[method-assign, assignment]
    with pytest.raises(BadSave, match="do not truncate the log"):
        await snapshots.save(b"state", 5, token)
    assert await snapshots.latest() is None


# ---------------------------------------------------------------- damage (row 85)

Damage = Callable[[MemoryStore], object]


async def _truncate_chunk(store: MemoryStore) -> None:
    kv = (await store.range(KEYS.snapshot(20))).kvs[1]
    await store.put(kv.key, kv.value[:-7])


async def _flip_a_byte(store: MemoryStore) -> None:
    kv = (await store.range(KEYS.snapshot(20))).kvs[0]
    await store.put(kv.key, kv.value[:400] + bytes([kv.value[400] ^ 1]) + kv.value[401:])


async def _swap_chunks(store: MemoryStore) -> None:
    first, second = (await store.range(KEYS.snapshot(20))).kvs[:2]
    await store.put(first.key, second.value)
    await store.put(second.key, first.value)


async def _delete_chunk(store: MemoryStore) -> None:
    await store.delete(KEYS.snapshot_chunk(20, 1))


async def _add_chunk(store: MemoryStore) -> None:
    await store.put(KEYS.snapshot_chunk(20, 9), b"more")


async def _delete_manifest(store: MemoryStore) -> None:
    await store.delete(KEYS.snapshot_chunk(20, "manifest"))


async def _garble_manifest(store: MemoryStore) -> None:
    await store.put(KEYS.snapshot_chunk(20, "manifest"), b"\xc1")


async def _manifest(store: MemoryStore, **changes: object) -> None:
    key = KEYS.snapshot_chunk(20, "manifest")
    kv = await store.get(key)
    assert kv is not None
    await store.put(key, pack(msgspec.structs.replace(unpack(kv.value, Manifest), **changes)))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate_chunk, "one is truncated"),
        (_flip_a_byte, "damaged"),
        (_swap_chunks, "damaged"),
        (_delete_chunk, "not exactly the 3 chunks"),
        (_add_chunk, "not exactly the 3 chunks"),
        (_delete_manifest, "has no manifest"),
        (_garble_manifest, "not a Manifest"),
        (lambda s: _manifest(s, format=2), "format 2, this process reads 1"),
        (lambda s: _manifest(s, index=19), "says that it is of index 19"),
        (lambda s: _manifest(s, digest=bytes(32)), "its digest is not that of its manifest"),
        (lambda s: _manifest(s, state_bytes=10), "its digest is not that of its manifest"),
    ],
)
async def test_a_damaged_snapshot_is_named_and_the_one_before_used(
    damage: Callable[[MemoryStore], object], reason: str, snapshots: Snapshots, store: MemoryStore, token: int
) -> None:
    await snapshots.save(b"older", 10, token)
    await snapshots.save(noise(1_200_000), 20, token)
    await damage(store)  # type: ignore[misc]
    assert await snapshots.latest() == (10, b"older")
    (sentence,) = snapshots.skipped
    assert sentence.startswith("snapshot 20: ")
    assert reason in sentence


async def test_a_manifest_cannot_ask_for_more_memory_than_it_says(snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    await snapshots.save(b"\0" * 50_000_000, 20, token)
    await _manifest(store, state_bytes=1_000)
    assert await snapshots.latest() is None


# ---------------------------------------------------------------- prune


async def test_prune_keeps_the_newest_whole_ones_and_says_where_the_log_may_begin(snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    for index in (10, 20, 30, 40):
        await snapshots.save(b"state %d" % index, index, token)
    await store.delete(KEYS.snapshot_chunk(30, "manifest"))
    await store.put(KEYS.snapshot_chunk(50, 0), b"cut short")
    assert await snapshots.prune(2, token=token) == 20
    assert {kv.key[len(KEYS.snapshots) :][:16] for kv in (await store.range(KEYS.snapshots)).kvs} == {b"%016d" % 20, b"%016d" % 40}
    assert await snapshots.prune(2, token=token) == 20


async def test_prune_without_snapshots(snapshots: Snapshots, token: int) -> None:
    assert await snapshots.prune(token=token) == 0


async def test_prune_is_fenced(snapshots: Snapshots, store: MemoryStore, token: int) -> None:
    for index in (10, 20, 30):
        await snapshots.save(b"x", index, token)
    await store.delete(KEYS.leader)
    with pytest.raises(Fenced):
        await snapshots.prune(1, token=token)
    assert await snapshots.latest(before=20) == (10, b"x")
