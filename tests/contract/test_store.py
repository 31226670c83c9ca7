"""What every Store does, on the modelled cluster and on a real one."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gangline.core.store.api import (
    Compacted,
    Compare,
    Definite,
    Delete,
    Event,
    Get,
    KeyValue,
    LeaseNotFound,
    Put,
    Store,
    TooLarge,
    WatchBatch,
    prefix_end,
)
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.watching import Timing

MakeStore = Callable[[], Awaitable[Store]]

QUICK = Timing(quiet_s=0.2, behind_s=0.5)


@pytest.fixture(params=["memory", pytest.param("etcd", marks=pytest.mark.etcd)])
async def make_store(request: pytest.FixtureRequest) -> AsyncIterator[MakeStore]:
    """Factory of clients of one cluster, which other tests write to as well."""
    if request.param == "memory":
        cluster = MemoryCluster()

        async def make() -> Store:
            return MemoryStore(cluster, timing=QUICK)
    else:
        from gangline.core.store.etcd import EtcdStore

        endpoint = request.getfixturevalue("etcd_endpoint")

        async def make() -> Store:
            return await EtcdStore.connect([endpoint], timing=QUICK)

    async with contextlib.AsyncExitStack() as stack:

        async def factory() -> Store:
            store = await make()
            stack.push_async_callback(store.close)
            return store

        yield factory


@pytest.fixture
async def store(make_store: MakeStore) -> Store:
    return await make_store()


@pytest.fixture
def p() -> bytes:
    """A prefix that nobody else uses."""
    return f"/test/{uuid.uuid4()}/".encode()


async def collect(store: Store, prefix: bytes, start: int, until: Callable[[list[Event]], bool], **kw: bool) -> list[WatchBatch]:
    """Return the batches of a watch up to the one with which `until(all events)` holds."""
    batches: list[WatchBatch] = []
    async with asyncio.timeout(20), contextlib.aclosing(store.watch(prefix, start_revision=start, **kw)) as watch:  # type: ignore[type-var]
        async for batch in watch:
            batches.append(batch)
            if until(events_of(batches)):
                break
    return batches


def events_of(batches: list[WatchBatch]) -> list[Event]:
    return [event for batch in batches for event in batch.events]


def puts(*keys: bytes, value: bytes = b"v") -> list[Put]:
    return [Put(key, value) for key in keys]


# Keys


async def test_a_key_that_does_not_exist_is_none(store: Store, p: bytes) -> None:
    assert await store.get(p + b"a") is None


async def test_put_then_get_with_revisions_and_versions(store: Store, p: bytes) -> None:
    first = await store.put(p + b"a", b"1")
    second = await store.put(p + b"a", b"2")
    assert second > first
    assert await store.get(p + b"a") == KeyValue(p + b"a", b"2", first, second, 2)


async def test_a_deleted_key_begins_anew(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"1")
    deleted = await store.delete(p + b"a")
    assert await store.get(p + b"a") is None
    again = await store.put(p + b"a", b"")
    assert again > deleted
    assert await store.get(p + b"a") == KeyValue(p + b"a", b"", again, again, 1)


async def test_deleting_nothing_makes_no_revision(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"")
    assert await store.delete(p + b"b") == revision


async def test_the_past_can_be_read(store: Store, p: bytes) -> None:
    first = await store.put(p + b"a", b"1")
    second = await store.put(p + b"a", b"2")
    third = await store.delete(p + b"a")
    past = [await store.get(p + b"a", revision=revision) for revision in (first, second, third)]
    assert [kv and kv.value for kv in past] == [b"1", b"2", None]


async def test_the_future_cannot_be_read(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"")
    with pytest.raises(Definite, match="future"):
        await store.get(p + b"a", revision=revision + 1_000)


async def test_a_key_must_not_be_empty(store: Store) -> None:
    with pytest.raises(Definite):
        await store.put(b"", b"")


async def test_any_bytes_are_a_key_and_a_value(store: Store, p: bytes) -> None:
    key = p + bytes(range(256))
    await store.put(key, key[::-1])
    kv = await store.get(key)
    assert kv is not None
    assert (kv.key, kv.value) == (key, key[::-1])


# Ranges


async def test_range_is_in_key_order_and_keeps_to_the_prefix(store: Store, p: bytes) -> None:
    for name in (b"b/2", b"b/1", b"b", b"b/\xff\xff", b"b0", b"c"):
        await store.put(p + name, name)
    revision = await store.put(p + b"a", b"")
    result = await store.range(p + b"b/")
    assert [kv.value for kv in result.kvs] == [b"b/1", b"b/2", b"b/\xff\xff"]
    assert result.revision >= revision


async def test_range_with_start_limit_and_keys_only(store: Store, p: bytes) -> None:
    for i in range(10):
        await store.put(p + b"%d" % i, b"value")
    result = await store.range(p, start=p + b"3", limit=4, keys_only=True)
    assert [(kv.key, kv.value) for kv in result.kvs] == [(p + b"%d" % i, b"") for i in range(3, 7)]
    assert all(kv.mod_revision for kv in result.kvs)


async def test_range_from_a_start_before_and_behind_the_prefix(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"")
    assert len((await store.range(p, start=b"/")).kvs) == 1
    assert (await store.range(p, start=p + b"b")).kvs == []
    assert (await store.range(p, start=b"\xff")).kvs == []


async def test_the_empty_prefix_is_the_whole_store(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"")
    assert p + b"a" in {kv.key for kv in (await store.range(b"", keys_only=True)).kvs}


async def test_five_thousand_keys_are_read_at_one_revision_while_they_are_written(make_store: MakeStore, p: bytes) -> None:
    reader, writer = await make_store(), await make_store()
    keys = [p + b"%05d" % i for i in range(5_000)]
    for batch in (keys[i : i + 100] for i in range(0, len(keys), 100)):
        await writer.txn([], puts(*batch, value=b"x" * 100))
    done = asyncio.Event()
    writes = 0

    async def keep_writing() -> None:
        nonlocal writes
        # Always the first and the last key together: they differ only for a reader that mixes two moments.
        while not done.is_set():
            await writer.txn([], puts(keys[0], keys[-1], value=b"%d" % writes))
            writes += 1

    writing = asyncio.create_task(keep_writing())
    for _ in range(5):
        result = await reader.range(p)
        assert [kv.key for kv in result.kvs] == keys
        assert result.kvs[0].value == result.kvs[-1].value
        assert max(kv.mod_revision for kv in result.kvs) <= result.revision
    done.set()
    await writing
    assert writes > 1


async def test_a_range_of_the_past(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"1")
    revision = await store.put(p + b"b", b"1")
    await store.delete(p + b"a")
    await store.put(p + b"b", b"2")
    result = await store.range(p, revision=revision)
    assert [(kv.key, kv.value) for kv in result.kvs] == [(p + b"a", b"1"), (p + b"b", b"1")]
    assert result.revision == revision


async def test_a_deleted_range(store: Store, p: bytes) -> None:
    await store.txn([], puts(p + b"a/1", p + b"a/2", p + b"b"))
    await store.delete(p + b"a/", range_end=prefix_end(p + b"a/"))
    assert [kv.key for kv in (await store.range(p)).kvs] == [p + b"b"]


# Transactions


@pytest.mark.parametrize(
    ("target", "op", "offset", "holds"),
    [
        (target, op, offset, holds)
        for target in ("version", "create_revision", "mod_revision")
        for op, offsets in {"==": {0: True, 1: False}, "!=": {1: True, 0: False}, ">": {-1: True, 0: False}, "<": {1: True, 0: False}}.items()
        for offset, holds in offsets.items()
    ],
)
async def test_comparisons_of_numbers(store: Store, p: bytes, target: str, op: str, offset: int, holds: bool) -> None:
    await store.put(p + b"a", b"")
    await store.put(p + b"a", b"")
    kv = await store.get(p + b"a")
    result = await store.txn([Compare(p + b"a", target, op, getattr(kv, target) + offset)], [])  # type: ignore[arg-type]
    assert result.succeeded is holds


async def test_comparisons_of_values_and_of_missing_keys(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"m")
    for op, value, holds in [("==", b"m", True), ("!=", b"m", False), (">", b"a", True), ("<", b"a", False), ("<", b"z", True)]:
        assert (await store.txn([Compare(p + b"a", "value", op, value)], [])).succeeded is holds  # type: ignore[arg-type]
    assert (await store.txn([Compare(p + b"none", "version", "==", 0)], [])).succeeded
    assert (await store.txn([Compare(p + b"none", "create_revision", "==", 0)], [])).succeeded
    assert not (await store.txn([Compare(p + b"none", "value", "!=", b"x")], [])).succeeded


async def test_a_transaction_is_one_revision_and_all_or_nothing(store: Store, p: bytes) -> None:
    result = await store.txn([Compare(p + b"a", "version", "==", 0)], puts(p + b"a", p + b"b"), puts(p + b"c"))
    kvs = (await store.range(p)).kvs
    assert result.succeeded
    assert [(kv.key, kv.mod_revision) for kv in kvs] == [(p + b"a", result.revision), (p + b"b", result.revision)]
    again = await store.txn([Compare(p + b"a", "version", "==", 0)], puts(p + b"a", p + b"b"), puts(p + b"c"))
    assert not again.succeeded
    assert [(kv.key, kv.version) for kv in (await store.range(p)).kvs] == [(p + b"a", 1), (p + b"b", 1), (p + b"c", 1)]


async def test_a_transaction_that_writes_nothing_makes_no_revision(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"")
    assert (await store.txn([Compare(p + b"a", "version", "==", 9)], puts(p + b"b"))).revision == revision


async def test_gets_in_a_transaction_see_what_stands_before_them(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"1")
    result = await store.txn([], [Get(p + b"a"), Put(p + b"a", b"2"), Get(p + b"a"), Delete(p + b"b"), Get(p + b"b")])
    assert [kv and kv.value for kv in result.gets] == [b"1", b"2", None]


async def test_gets_of_the_failure_list(store: Store, p: bytes) -> None:
    await store.put(p + b"a", b"1")
    result = await store.txn([Compare(p + b"a", "version", ">", 5)], puts(p + b"a"), [Get(p + b"a")])
    assert not result.succeeded
    assert [kv and kv.value for kv in result.gets] == [b"1"]


async def test_concurrent_compare_and_swap_loses_no_update(make_store: MakeStore, p: bytes) -> None:
    clients = [await make_store() for _ in range(4)]
    await clients[0].put(p + b"n", b"0")

    async def add(store: Store) -> None:
        for _ in range(10):
            while True:
                kv = await store.get(p + b"n")
                assert kv is not None
                value = b"%d" % (int(kv.value) + 1)
                if (await store.txn([Compare(p + b"n", "mod_revision", "==", kv.mod_revision)], [Put(p + b"n", value)])).succeeded:
                    break

    await asyncio.gather(*map(add, clients))
    kv = await clients[0].get(p + b"n")
    assert kv is not None
    assert (kv.value, kv.version) == (b"40", 41)


# Limits


async def test_128_operations_a_list_are_allowed(store: Store, p: bytes) -> None:
    keys = [p + b"%d" % i for i in range(128)]
    result = await store.txn([Compare(key, "version", "==", 0) for key in keys], puts(*keys), [Get(key) for key in keys])
    assert result.succeeded


async def test_129_operations_are_refused(store: Store, p: bytes) -> None:
    keys = [p + b"%d" % i for i in range(129)]
    for lists in (([Compare(key, "version", "==", 0) for key in keys], []), ([], puts(*keys)), ([], [], puts(*keys))):
        with pytest.raises(TooLarge):
            await store.txn(*lists)
    assert (await store.range(p)).kvs == []


async def test_a_key_may_be_written_once_a_transaction(store: Store, p: bytes) -> None:
    for ops in (puts(p + b"a", p + b"a"), [Put(p + b"a", b""), Delete(p, prefix_end(p))], [Put(p + b"a", b""), Delete(p + b"a")]):
        with pytest.raises(Definite, match="duplicate key"):
            await store.txn([], ops)
    assert await store.get(p + b"a") is None
    await store.txn([], [*puts(p + b"a"), Delete(p + b"b")], [])


@pytest.mark.parametrize("size", [(3 << 19) + 1, 5 << 19])
async def test_a_request_that_is_too_large_is_refused(store: Store, p: bytes, size: int) -> None:
    # etcd answers the two sizes with two different codes.
    with pytest.raises(TooLarge):
        await store.put(p + b"a", b"x" * size)
    with pytest.raises(TooLarge):
        await store.txn([], [Put(p + b"a", b"x" * (size // 2)), Put(p + b"b", b"x" * (size // 2))])
    assert await store.get(p + b"a") is None


async def test_nearly_the_largest_request_works(store: Store, p: bytes) -> None:
    value = b"x" * ((3 << 19) - 1_000)
    await store.put(p + b"a", value)
    kv = await store.get(p + b"a")
    assert kv is not None
    assert kv.value == value


async def test_a_range_larger_than_one_message_comes_whole(store: Store, p: bytes) -> None:
    for i in range(80):
        await store.put(p + b"%03d" % i, b"%d" % i * 400_000)
    result = await store.range(p)
    assert [kv.value[:2] for kv in result.kvs] == [b"%d" % i * 2 if i < 10 else b"%d" % i for i in range(80)]
    await store.delete(p, range_end=prefix_end(p))


# Watches


async def test_a_watch_begins_in_the_past_and_goes_on(make_store: MakeStore, p: bytes) -> None:
    store, other = await make_store(), await make_store()
    first = await store.put(p + b"a", b"1")
    await store.put(p + b"a", b"2")
    watching = asyncio.create_task(collect(other, p, first + 1, lambda events: len(events) == 4))
    await store.put(p + b"b", b"3")
    await store.put(p[:-1] + b"0", b"not under the prefix")
    await store.delete(p + b"a")
    last = await store.put(p + b"a", b"4")
    batches = await watching
    assert [(event.kind, event.kv.key[-1:], event.kv.value) for event in events_of(batches)] == [
        ("put", b"a", b"2"),
        ("put", b"b", b"3"),
        ("delete", b"a", b""),
        ("put", b"a", b"4"),
    ]
    assert batches[-1].next_revision == last + 1 == events_of(batches)[-1].kv.mod_revision + 1


async def test_an_exact_watch_sees_one_key(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a/b", b"")
    await store.put(p + b"a", b"")
    await store.put(p + b"a0", b"")
    await store.delete(p + b"a")
    batches = await collect(store, p + b"a", revision, lambda events: len(events) == 2, exact=True)
    assert [(event.kind, event.kv.key) for event in events_of(batches)] == [("put", p + b"a"), ("delete", p + b"a")]


async def test_a_transaction_comes_in_one_batch(store: Store, p: bytes) -> None:
    keys = [p + b"%03d" % i for i in range(128)]
    result = await store.txn([], puts(*keys, value=b"x" * 10_000))
    batches = [batch for batch in await collect(store, p, result.revision, lambda events: len(events) >= 128) if batch.events]
    assert [len(batch.events) for batch in batches] == [128]
    assert {event.kv.mod_revision for event in batches[0].events} == {result.revision}


async def test_three_thousand_revisions_are_caught_up_without_a_gap(store: Store, p: bytes) -> None:
    first = await store.put(p + b"n", b"0")
    await asyncio.gather(*(store.put(p + b"n", b"%d" % i) for i in range(1, 3_000)))
    batches = await collect(store, p, first, lambda events: len(events) >= 3_000)
    events = events_of(batches)
    assert [event.kv.version for event in events] == list(range(1, 3_001))
    assert len(batches) >= 3
    for batch in batches:
        assert not batch.events or batch.next_revision == batch.events[-1].kv.mod_revision + 1


async def test_ten_megabytes_are_caught_up_with_every_revision_whole(store: Store, p: bytes) -> None:
    # etcd cuts such a message into pieces of 2 MiB, in the middle of a revision.
    keys = [p + b"%03d" % i for i in range(120)]
    revisions = [(await store.txn([], puts(*keys, value=b"x" * 10_000))).revision for _ in range(9)]
    batches = await collect(store, p, revisions[0], lambda events: len(events) >= 9 * 120)
    assert [event.kv.mod_revision for event in events_of(batches)] == [revision for revision in revisions for _ in keys]
    assert all(len(batch.events) % 120 == 0 for batch in batches)
    await store.delete(p, range_end=prefix_end(p))


async def test_a_quiet_watch_gives_signs_of_life_that_move_with_the_store(make_store: MakeStore, p: bytes) -> None:
    store, other = await make_store(), await make_store()
    revision = await store.put(p + b"a", b"")
    async with asyncio.timeout(10), contextlib.aclosing(store.watch(p, start_revision=revision + 1)) as watch:  # type: ignore[type-var]
        batch = await anext(watch)
        assert batch == WatchBatch([], batch.next_revision)
        elsewhere = await other.put(p[:-1] + b"0", b"")
        while batch.next_revision <= elsewhere:
            assert batch.events == []
            batch = await anext(watch)
        changed = await other.put(p + b"a", b"new")
        while not batch.events:
            batch = await anext(watch)
        assert [event.kv.mod_revision for event in batch.events] == [changed]


async def test_a_watch_of_a_future_revision_leaves_out_what_is_before(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"0")
    watching = asyncio.create_task(collect(store, p, revision + 3, bool))
    await asyncio.sleep(0)
    for i in range(1, 5):
        await store.put(p + b"a", b"%d" % i)
    assert events_of(await watching)[0].kv.mod_revision >= revision + 3


async def test_a_watch_begins_at_revision_one_or_later(store: Store, p: bytes) -> None:
    with pytest.raises(Definite, match="from revision 0"):
        await anext(store.watch(p, start_revision=0))


async def test_closing_the_store_ends_its_watches(make_store: MakeStore, p: bytes) -> None:
    store = await make_store()
    revision = await store.put(p + b"a", b"")
    started = asyncio.Event()
    watching = asyncio.create_task(collect(store, p, revision, lambda events: started.set() or False))
    await started.wait()
    await store.close()
    async with asyncio.timeout(5):
        await watching


async def test_cancelling_the_task_of_a_watch_leaves_the_store_usable(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"")
    started = asyncio.Event()
    watching = asyncio.create_task(collect(store, p, revision, lambda events: started.set() or False))
    await started.wait()
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert await store.get(p + b"a") is not None


# Leases


async def test_a_lease_is_granted_for_at_least_the_time_asked_for(store: Store) -> None:
    lease = await store.lease_grant(3.5)
    assert lease.ttl_s >= 3.5
    assert await store.lease_keepalive(lease.id) == lease.ttl_s


async def test_keys_go_with_their_lease(make_store: MakeStore, p: bytes) -> None:
    store, other = await make_store(), await make_store()
    lease = await store.lease_grant(60)
    revision = await store.put(p + b"a", b"", lease=lease.id)
    await store.put(p + b"b", b"", lease=lease.id)
    kv = await other.get(p + b"a")
    assert kv is not None
    assert kv.lease == lease.id
    await other.lease_revoke(lease.id)
    assert (await store.range(p)).kvs == []
    events = events_of(await collect(store, p, revision, lambda events: len(events) == 4))
    deletes = [event for event in events if event.kind == "delete"]
    assert {event.kv.key for event in deletes} == {p + b"a", p + b"b"}
    assert len({event.kv.mod_revision for event in deletes}) == 1


async def test_a_lease_that_is_not_kept_alive_expires(store: Store, p: bytes) -> None:
    lease = await store.lease_grant(1)
    revision = await store.put(p + b"a", b"", lease=lease.id)
    events = events_of(await collect(store, p, revision, lambda events: len(events) == 2))
    assert events[1].kind == "delete"
    with pytest.raises(LeaseNotFound):
        await store.lease_keepalive(lease.id)


async def test_a_revoked_lease_is_gone_and_stays_gone(store: Store, p: bytes) -> None:
    lease = await store.lease_grant(60)
    await store.lease_keepalive(lease.id)
    await store.lease_revoke(lease.id)
    await store.lease_revoke(lease.id)
    for _ in range(2):
        with pytest.raises(LeaseNotFound):
            await store.lease_keepalive(lease.id)
    with pytest.raises(LeaseNotFound):
        await store.put(p + b"a", b"", lease=lease.id)
    with pytest.raises(LeaseNotFound):
        await store.txn([], [Put(p + b"a", b"", lease.id), Put(p + b"b", b"")])
    assert (await store.range(p)).kvs == []


async def test_a_key_leaves_its_lease_when_it_is_written_without(store: Store, p: bytes) -> None:
    one, two = await store.lease_grant(60), await store.lease_grant(60)
    await store.put(p + b"a", b"", lease=one.id)
    await store.put(p + b"b", b"", lease=one.id)
    await store.put(p + b"a", b"")
    await store.put(p + b"b", b"", lease=two.id)
    await store.lease_revoke(one.id)
    assert [(kv.key, kv.lease) for kv in (await store.range(p)).kvs] == [(p + b"a", 0), (p + b"b", two.id)]


async def test_renewals_side_by_side_get_their_own_answers(store: Store) -> None:
    leases = [await store.lease_grant(10 + i) for i in range(5)]
    gone = await store.lease_grant(10)
    await store.lease_revoke(gone.id)
    asked = [*leases, gone] * 10
    answers = await asyncio.gather(*(store.lease_keepalive(lease.id) for lease in asked), return_exceptions=True)
    for lease, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, LeaseNotFound) if lease is gone else answer == lease.ttl_s


async def test_a_renewal_that_nobody_waits_for_does_not_disturb_the_next(store: Store) -> None:
    one, two = await store.lease_grant(10), await store.lease_grant(20)
    await store.lease_keepalive(one.id)
    given_up = [asyncio.create_task(store.lease_keepalive(lease.id)) for lease in (one, two)]
    await asyncio.sleep(0)
    for task in given_up:
        task.cancel()
    assert await store.lease_keepalive(two.id) == two.ttl_s
    assert await store.lease_keepalive(one.id) == one.ttl_s


# The rest


async def test_status(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"x")
    status = await store.status()
    assert status.version
    assert status.db_size_bytes > 0
    assert status.cluster_id
    assert status.revision >= revision
    assert status.raft_term > 0
    assert status.alarms == []


async def test_a_closed_store_refuses_everything(make_store: MakeStore, p: bytes) -> None:
    store = await make_store()
    await store.close()
    await store.close()
    for call in (store.get(p), store.range(p), store.put(p, b""), store.lease_keepalive(1), store.status()):
        with pytest.raises(Definite, match="closed"):
            await call


async def test_compacting_the_future_is_refused(store: Store, p: bytes) -> None:
    revision = await store.put(p + b"a", b"")
    with pytest.raises(Definite) as caught:
        await store.compact(revision + 1_000)
    assert not isinstance(caught.value, Compacted)
