"""The modelled cluster's bad moments, and that its clients keep the contract through them as those of a real one do."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest

from gangline.core.store.api import (
    Ambiguous,
    Compacted,
    Compare,
    Corrupt,
    Delete,
    Event,
    Get,
    LeaseNotFound,
    OutOfSpace,
    Put,
    Store,
    StoreError,
    WentBack,
    prefix_end,
)
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.memory import Faults, MemoryCluster, MemoryStore
from gangline.core.store.watching import Timing

QUICK = Timing(quiet_s=0.05, behind_s=0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def faults(cluster: MemoryCluster) -> Faults:
    return cluster.faults


@pytest.fixture
def store(cluster: MemoryCluster) -> MemoryStore:
    return MemoryStore(cluster, "a", timeout_s=0.1, timing=QUICK)


@pytest.fixture
def other(cluster: MemoryCluster) -> MemoryStore:
    return MemoryStore(cluster, "b", timeout_s=0.1, timing=QUICK)


@pytest.fixture
async def follow() -> AsyncIterator[Callable[..., list[Event]]]:
    async with contextlib.AsyncExitStack() as stack:

        def start(store: MemoryStore, prefix: bytes, start_revision: int) -> list[Event]:
            events: list[Event] = []

            async def run() -> None:
                async for batch in store.watch(prefix, start_revision=start_revision):
                    events.extend(batch.events)

            stack.callback(asyncio.create_task(run()).cancel)
            return events

        yield start


async def test_the_fates_of_a_write(store, faults, eventually):
    faults.next_writes.extend(["answered", "lost", "applied", "late"])
    await store.put(b"answered", b"")
    for key in (b"lost", b"applied", b"late"):
        with pytest.raises(Ambiguous):
            await store.put(key, b"")
    assert await store.get(b"lost") is None
    assert await store.get(b"applied") is not None
    assert await store.get(b"late") is None

    async def arrived() -> bool:
        return await store.get(b"late") is not None

    await eventually(arrived)


async def test_a_late_write_that_is_refused_is_refused_quietly(store, faults, eventually):
    lease = await store.lease_grant(60)
    faults.next_writes.append("late")
    with pytest.raises(Ambiguous):
        await store.put(b"a", b"", lease=lease.id)
    await store.lease_revoke(lease.id)
    await asyncio.sleep(faults.late_write_s)
    assert await store.get(b"a") is None


async def test_writes_of_every_kind_can_be_ambiguous(store, faults):
    faults.ambiguous_write = 1.0
    for call in (store.put(b"a", b""), store.delete(b"a"), store.txn([], []), store.lease_grant(5), store.compact(1)):
        with pytest.raises(Ambiguous):
            await call


async def test_the_same_seed_gives_the_same_fates():
    def draw(seed: int) -> list[str]:
        faults = Faults(seed)
        faults.ambiguous_write = 0.5
        return [faults.fate_of_write() for _ in range(50)]

    assert draw(1) == draw(1) != draw(2)


async def test_a_client_that_is_cut_off_comes_back(store, other, faults, follow, eventually):
    events = follow(store, b"n", 1)
    await other.put(b"n", b"0")
    await eventually(lambda: len(events) == 1)
    faults.partitioned.add("a")
    for call in (store.get(b"n"), store.put(b"n", b""), store.lease_keepalive(1), store.status()):
        with pytest.raises(Ambiguous):
            await call
    for i in range(1, 5):
        await other.put(b"n", b"%d" % i)
    assert len(events) == 1
    faults.partitioned.clear()
    await eventually(lambda: [event.kv.value for event in events] == [b"%d" % i for i in range(5)])


async def test_reads_wait_for_a_quorum_that_comes_back(store, faults):
    faults.unavailable = True
    reading = asyncio.create_task(store.get(b"a"))
    await asyncio.sleep(0)
    assert not reading.done()
    faults.unavailable = False
    assert await reading is None


async def test_a_read_is_never_older_than_what_was_seen(cluster, faults):
    store = MemoryStore(cluster, timeout_s=1.0)
    faults.stale_read, faults.stale_revisions = 0.2, 3
    for i in range(50):
        await store.put(b"a", b"%d" % i)
        kv = await store.get(b"a")
        assert kv is not None
        assert kv.value == b"%d" % i


async def test_a_store_that_stays_behind_is_refused(store, cluster):
    for i in range(5):
        last = await store.put(b"a", b"%d" % i)
    watching = asyncio.create_task(anext(store.watch(b"a", start_revision=last + 1)))
    cluster.go_back(3)
    for call in (store.get(b"a"), store.put(b"a", b""), watching):
        with pytest.raises(WentBack):
            await call
    fresh = MemoryStore(cluster)
    kv = await fresh.get(b"a")
    assert kv is not None
    # The write that was refused by the client had been done.
    assert (kv.version, kv.mod_revision) == (3, 4)


async def test_a_full_and_a_corrupt_store(store, faults):
    lease = await store.lease_grant(60)
    await store.put(b"a", b"")
    faults.no_space = True
    for call in (store.put(b"a", b""), store.txn([], [Put(b"a", b"")]), store.lease_grant(5)):
        with pytest.raises(OutOfSpace):
            await call
    assert (await store.status()).alarms == ["NOSPACE"]
    await store.lease_keepalive(lease.id)
    await store.delete(b"a")
    await store.lease_revoke(lease.id)
    faults.corrupt = True
    with pytest.raises(Corrupt):
        await store.delete(b"a")


@pytest.mark.parametrize("switch", ["watch_repeat", "watch_older", "watch_split", "watch_cancel", "watch_silent", "all", "late"])
async def test_a_watch_hides_what_happens_to_its_streams(switch, store, other, faults, follow, eventually):
    if switch == "late":
        faults.watch_late_s = 0.002
    for name in ("watch_repeat", "watch_older", "watch_split", "watch_cancel", "watch_silent"):
        if switch in (name, "all"):
            setattr(faults, name, 0.4)
    events = follow(store, b"k", 1)
    for i in range(100):
        await other.txn([], [Put(b"k%d" % j, b"") for j in range(i % 3)] + [Delete(b"k%d" % (3 + i % 2))])
        if i % 5 == 0:
            await other.put(b"k%d" % (3 + i % 2), b"")
        await asyncio.sleep(0.001)
    honest = [event for _, events_of_revision in other.cluster.mvcc._log for event in events_of_revision]
    await eventually(lambda: len(events) >= len(honest))
    assert events == honest


async def test_streams_that_fall_silent_and_end_are_replaced(store, other, cluster, follow, eventually):
    events = follow(store, b"k", 1)
    for what in (cluster.silence_watches, cluster.cut_watches, cluster.silence_watches):
        before = len(events)
        await other.put(b"k", b"")
        await eventually(lambda before=before: len(events) > before)
        what()
    # A deletion leaves nothing behind that could be read: it is missed by the number of keys.
    await other.delete(b"k")
    await eventually(lambda: events[-1].kind == "delete")
    assert [event.kv.mod_revision for event in events] == [2, 3, 4, 5]


async def test_compaction_does_not_overtake_a_watch_that_had_nothing_to_deliver(cluster, other):
    patient = MemoryStore(cluster, timing=Timing(quiet_s=60))
    watch = patient.watch(b"k", start_revision=1)
    await other.put(b"k", b"0")
    assert (await anext(watch)).events
    # Nobody reads the stream meanwhile.
    for i in range(5):
        last = await other.put(b"elsewhere", b"%d" % i)
    await other.compact(last)
    await other.put(b"k", b"1")
    assert (await anext(watch)).events[0].kv.value == b"1"
    await watch.aclose()


async def test_closing_a_watch_gives_its_stream_up_at_once(store, cluster):
    watch = store.watch(b"k", start_revision=1)
    await store.put(b"k", b"")
    await anext(watch)
    assert len(cluster._streams) == 1
    await watch.aclose()
    assert cluster._streams == []


async def watch_to_its_end(watch):
    async for _ in watch:
        pass


async def test_a_silent_watch_is_told_that_compaction_overtook_it(store, other, cluster):
    watch = store.watch(b"k", start_revision=1)
    await other.put(b"k", b"0")
    assert (await anext(watch)).events
    cluster.silence_watches()
    for i in range(5):
        last = await other.put(b"k", b"%d" % i)
    await other.compact(last)
    with pytest.raises(Compacted) as caught:
        await watch_to_its_end(watch)
    assert caught.value.revision == last


async def test_leases_run_on_the_clock_that_is_given(eventually, follow):
    clock = Clock()
    cluster = MemoryCluster(clock=clock)
    store = MemoryStore(cluster, timing=QUICK)
    lease = await store.lease_grant(10)
    await store.put(b"a", b"", lease=lease.id)
    events = follow(store, b"a", 1)
    clock.now = 9.9
    assert await store.lease_keepalive(lease.id) == 10
    clock.now = 19.8
    cluster.elect()
    clock.now = 29.7
    assert await store.get(b"a") is not None
    clock.now = 29.8
    cluster.tick()
    await eventually(lambda: [event.kind for event in events] == ["put", "delete"])
    with pytest.raises(LeaseNotFound):
        await store.lease_keepalive(lease.id)


async def test_requests_take_the_time_that_is_asked_of_them():
    loop = asyncio.get_running_loop()
    store = MemoryStore(MemoryCluster(latency=lambda: 0.01))
    began = loop.time()
    await store.put(b"a", b"")
    assert loop.time() - began >= 0.02


async def outcome(call):
    """What a call returns or raises, without what differs between clusters."""
    try:
        return await call
    except StoreError as error:
        return type(error)


@pytest.mark.etcd
@pytest.mark.parametrize("seed", range(6))
async def test_the_model_does_what_etcd_does(seed, start_etcd, etcd_endpoint):
    """Random requests, one after the other, to both: same answers, same errors, same events; revisions relative to the first."""
    rng = random.Random(seed)
    root = b"/model/%d/" % seed
    keys = [root + name for name in (b"a", b"a/1", b"a/2", b"b", b"b\xff")]
    real = await EtcdStore.connect([etcd_endpoint])
    stores: list[Store] = [MemoryStore(MemoryCluster()), real]
    starts = [(await store.status()).revision for store in stores]
    leases = [[(await store.lease_grant(60)).id for _ in range(2)] for store in stores]

    def operation():
        key, end = rng.choice(keys), rng.choice([b"", b"", rng.choice(keys), prefix_end(root)])
        kind, lease, value = rng.randrange(3), rng.choice([None, -1, rng.randrange(len(leases[0]))]), b"%d" % rng.randrange(3)

        def on(i: int) -> Put | Delete | Get:
            if kind == 0:
                return Put(key, value, 0 if lease is None else leases[i][lease])
            return Delete(key, end) if kind == 1 else Get(key)

        return on

    def comparison():
        key, op = rng.choice(keys), rng.choice(["==", "!=", "<", ">"])
        target = rng.choice(["version", "value", "create_revision", "mod_revision"])
        number = rng.randrange(4) if target == "version" else rng.randrange(40)

        def on(i: int) -> Compare:
            if target == "value":
                return Compare(key, target, op, b"%d" % (number % 3))
            return Compare(key, target, op, number + (starts[i] if target != "version" and number else 0))

        return on

    def relative(answer, i: int):
        """Make every revision relative to the first and every lease its number, so that answers can be compared."""

        def kv(found):
            if found is None:
                return None
            shift = starts[i]
            lease = leases[i].index(found.lease) if found.lease else None
            return found.key, found.value, max(0, found.create_revision - shift), found.mod_revision - shift, found.version, lease

        if hasattr(answer, "gets"):
            return answer.succeeded, answer.revision - starts[i], [kv(found) for found in answer.gets]
        if hasattr(answer, "kvs"):
            return answer.revision - starts[i], [kv(found) for found in answer.kvs]
        return answer

    for _ in range(150):
        compares = [comparison() for _ in range(rng.randrange(3))]
        success, failure = ([operation() for _ in range(rng.randrange(4))] for _ in range(2))
        back = rng.randrange(20)
        answers = []
        for i, store in enumerate(stores):
            result = await outcome(store.txn([c(i) for c in compares], [op(i) for op in success], [op(i) for op in failure]))
            now = await store.range(root)
            then = await outcome(store.range(root, revision=max(starts[i], now.revision - back)))
            answers.append([relative(answer, i) for answer in (result, now, then)])
        assert answers[0] == answers[1]
        if rng.random() < 0.02:
            for i, store in enumerate(stores):
                await store.lease_revoke(leases[i][-1])
                leases[i].append((await store.lease_grant(60)).id)
    streams = []
    for i, store in enumerate(stores):
        end = await store.put(root + b"end", b"")
        events: list[Event] = []
        async with contextlib.aclosing(store.watch(root, start_revision=starts[i] + 1)) as watch:  # type: ignore[type-var]
            while not events or events[-1].kv.mod_revision < end:
                events.extend((await anext(watch)).events)
        streams.append([(event.kind, event.kv.key, event.kv.value, event.kv.mod_revision - starts[i]) for event in events])
    assert streams[0] == streams[1]
    await real.close()
