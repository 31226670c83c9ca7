"""The log on the modelled cluster, with every bad moment that the model can play."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gangline.core.store.api import Ambiguous, Delete, OutOfSpace, Put, TooLarge, Unauthenticated
from gangline.core.store.fencing import Fenced, Unsettled
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log, LogGap, Truncated
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.watching import Timing

KEYS = Keys("test")
QUICK = Timing(quiet_s=0.05, behind_s=0.2)

Entries = list[tuple[int, bytes]]


def store_of(cluster: MemoryCluster, name: str = "a") -> MemoryStore:
    return MemoryStore(cluster, name, timeout_s=0.3, timing=QUICK)


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


@pytest.fixture
def store(cluster: MemoryCluster) -> MemoryStore:
    return store_of(cluster)


@pytest.fixture
def log(store: MemoryStore) -> Log:
    return Log(store, KEYS, settle_s=1.0)


async def elect(store: MemoryStore) -> int:
    """Be the leader and return the token; whoever was it before is deposed."""
    await store.delete(KEYS.leader)
    return await store.put(KEYS.leader, b"x")


def frame(index: int, by: str = "a", size: int = 0) -> tuple[bytes, bytes]:
    """Return (data, nonce). The log does not read frames, it only stores them."""
    nonce = f"nonce-{by}-{index:06d}".encode()
    return b"frame " + nonce + b"." * size, nonce


async def append(log: Log, index: int, token: int, by: str = "a", size: int = 0) -> int:
    data, nonce = frame(index, by, size)
    return await log.append(data, index=index, nonce=nonce, token=token)


async def is_written(store: MemoryStore, index: int) -> None:
    async with asyncio.timeout(5):
        while await store.get(KEYS.frame(index)) is None:  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0)


async def fill(log: Log, token: int, first: int, last: int) -> None:
    for index in range(first, last + 1):
        await append(log, index, token)


async def entries(log: Log, first: int = 1, last: int | None = None) -> Entries:
    return [(index, data) async for index, data, _ in log.read(first, last)]


def expected(first: int, last: int, by: str = "a") -> Entries:
    return [(i, frame(i, by)[0]) for i in range(first, last + 1)]


# ---------------------------------------------------------------- append


async def test_an_append_is_read_back_with_its_revision(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    revision = await append(log, 1, token)
    assert [e async for e in log.read(1)] == [(1, frame(1)[0], revision)]


async def test_a_deposed_leader_appends_nothing_and_is_told_by_whom(log: Log, store: MemoryStore, cluster: MemoryCluster) -> None:
    old = await elect(store)
    await append(log, 1, old)
    new = await elect(store_of(cluster, "b"))  # row 2: deposed between read and append
    with pytest.raises(Fenced, match=f"append at index 2 refused: leader key now has create revision {new}, ours is {old}; stepping down") as e:
        await append(log, 2, old)
    assert (e.value.held, e.value.seen) == (old, new)
    assert await entries(log) == expected(1, 1)


async def test_without_a_leader_key_nobody_appends(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await store.delete(KEYS.leader)  # row 7: by hand
    with pytest.raises(Fenced, match="the leader key is gone") as e:
        await append(log, 1, token)
    assert e.value.seen == 0


async def test_an_index_that_is_anothers_is_refused(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await append(log, 1, token, by="b")
    with pytest.raises(Fenced, match="another's frame is there"):
        await append(log, 1, token)
    assert await entries(log) == expected(1, 1, by="b")


async def test_two_leaders_race_and_exactly_one_frame_is_written_at_each_index(cluster: MemoryCluster) -> None:
    store = store_of(cluster)
    token = await elect(store)
    logs = [Log(store_of(cluster, by), KEYS) for by in "ab"]
    for index in range(1, 30):
        got = await asyncio.gather(*(append(log, index, token, by) for log, by in zip(logs, "ab", strict=True)), return_exceptions=True)
        assert sorted(type(g).__name__ for g in got) == ["Fenced", "int"]
    assert [i for i, _ in await entries(logs[0])] == list(range(1, 30))


@pytest.mark.parametrize(
    "fates", [["lost"], ["applied"], ["late"], ["lost", "lost", "applied"], ["late", "lost", "late", "applied"], ["applied", "lost", "lost"]]
)
async def test_an_ambiguous_append_is_settled_by_the_same_frame(fates: list[Any], log: Log, store: MemoryStore, cluster: MemoryCluster) -> None:
    token = await elect(store)
    cluster.faults.next_writes.extend(fates)  # row 10
    revision = await append(log, 1, token)
    await append(log, 2, token)
    await asyncio.sleep(2 * cluster.faults.late_write_s)  # what is late has come by now
    assert await entries(log) == expected(1, 2)
    stored = await store.get(KEYS.frame(1))
    assert stored is not None
    assert (stored.version, stored.mod_revision) == (1, revision)


async def test_random_ambiguity_never_repeats_skips_or_overwrites(cluster: MemoryCluster, store: MemoryStore, log: Log) -> None:
    token = await elect(store)
    cluster.faults.rng.seed(5)
    cluster.faults.ambiguous_write = 0.3
    cluster.faults.late_write_s = 0.01
    await fill(log, token, 1, 60)
    cluster.faults.ambiguous_write = 0
    await asyncio.sleep(0.03)
    assert await entries(log) == expected(1, 60)
    assert all(kv.version == 1 for kv in (await store.range(KEYS.log)).kvs)


async def test_a_late_append_of_a_deposed_leader_is_fenced_when_it_arrives(cluster: MemoryCluster, store: MemoryStore, log: Log) -> None:
    old = await elect(store)
    cluster.faults.next_writes.append("late")
    cluster.faults.late_write_s = 0.1
    doomed = asyncio.create_task(append(log, 1, old))
    await asyncio.sleep(0)
    successor = Log(store_of(cluster, "b"), KEYS)
    new = await elect(store_of(cluster, "b"))
    await append(successor, 1, new, by="b")
    with pytest.raises(Fenced):
        await doomed
    await asyncio.sleep(0.15)
    assert await entries(log) == expected(1, 1, by="b")


async def test_an_outcome_that_nobody_can_tell_is_unsettled(cluster: MemoryCluster, store: MemoryStore) -> None:
    log = Log(store, KEYS, settle_s=0.2)
    token = await elect(store)
    cluster.faults.unavailable = True
    with pytest.raises(Unsettled, match="append at index 1: not known to be written or not"):
        await append(log, 1, token)
    cluster.faults.unavailable = False
    await append(log, 1, token)  # nothing else may come to index 1 before it is settled, and the same frame settles it


async def test_a_definite_error_after_an_ambiguous_one_settles_nothing(store: MemoryStore, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    token = await elect(store)
    answers: list[Exception] = [Ambiguous("cut"), Unauthenticated("token expired")]

    async def txn(*_: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(store, "txn", txn)
    with pytest.raises(Unsettled, match="token expired"):
        await append(log, 1, token)


async def test_a_resend_after_the_successor_truncated_the_log_is_unsettled(cluster: MemoryCluster, store: MemoryStore) -> None:
    old = await elect(store)
    cluster.faults.next_writes.append("applied")
    pending = asyncio.create_task(append(Log(store, KEYS, settle_s=20.0), 1, old))
    other = store_of(cluster, "b")
    await is_written(other, 1)
    # Its second try does not get through before the successor has done all of this, however long that takes.
    cluster.faults.partitioned.add(store.name)
    new = await elect(other)
    await append(Log(other, KEYS), 2, new, by="b")
    await Log(other, KEYS).truncate(2, new)
    cluster.faults.partitioned.discard(store.name)
    with pytest.raises(Unsettled, match="the log begins at 2"):
        await pending


async def test_too_large_passes(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    with pytest.raises(TooLarge):
        await append(log, 1, token, size=2_000_000)  # row 38
    await append(log, 1, token)


async def test_out_of_space_is_said_and_the_same_frame_succeeds_later(cluster: MemoryCluster, store: MemoryStore) -> None:
    log = Log(store, KEYS, settle_s=0.2)
    token = await elect(store)
    cluster.faults.no_space = True  # row 19
    with pytest.raises(OutOfSpace):
        await append(log, 1, token)
    cluster.faults.no_space = False
    await append(log, 1, token)
    assert await entries(log) == expected(1, 1)


async def test_out_of_space_after_the_frame_was_written_is_a_success(cluster: MemoryCluster, store: MemoryStore) -> None:
    log = Log(store, KEYS, settle_s=0.2)
    token = await elect(store)
    cluster.faults.next_writes.append("applied")
    pending = asyncio.create_task(append(log, 1, token))
    await is_written(store, 1)
    cluster.faults.no_space = True
    stored = await store.get(KEYS.frame(1))
    assert stored is not None
    assert await pending == stored.mod_revision


@pytest.mark.parametrize("nonce", [b"", b"short", b"not in the frame"])
async def test_a_frame_must_contain_its_nonce(log: Log, nonce: bytes) -> None:
    with pytest.raises(ValueError, match="nonce"):
        await log.append(b"frame short", index=1, nonce=nonce, token=5)


# ---------------------------------------------------------------- read


async def test_read_a_range_in_pages(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 450)
    assert await entries(log) == expected(1, 450)
    assert await entries(log, 100, 410) == expected(100, 410)
    assert await entries(log, 449, 449) == expected(449, 449)
    assert await entries(log, 451) == []
    assert await entries(log, 5, 4) == []
    assert [(len(p.entries), p.more) async for p in log.pages(1)] == [(200, True), (250, False)]


async def test_the_pages_of_a_read_are_of_one_revision(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 300)
    got: list[int] = []
    async for page in log.pages(1):
        got += [index for index, _, _ in page.entries]
        await append(log, 301 if page.more else 302, token)
    assert got == list(range(1, 301))


async def test_a_read_goes_on_at_a_newer_revision_after_compaction(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 300)
    got: list[int] = []
    async for page in log.pages(1):
        got += [index for index, _, _ in page.entries]
        if len(got) == 200:
            await store.compact(await append(log, 301, token))
    assert got == list(range(1, 302))


async def test_big_frames_make_short_pages(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    for index in range(1, 231):
        await append(log, index, token, size=200_000 if index > 190 else 0)
    sizes = [sum(len(data) for _, data, _ in p.entries) async for p in log.pages(1)]
    assert len(sizes) >= 2
    assert max(sizes) < 12_000_000


@pytest.mark.parametrize("missing", [3, 200, 201])
async def test_a_gap_stops_with_its_index(missing: int, log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 300)
    await store.delete(KEYS.frame(missing))  # row 39
    got: list[int] = []

    async def read() -> None:
        async for index, _, _ in log.read(1):
            got.append(index)

    with pytest.raises(LogGap, match=f"log frame {missing}: is missing, the next one in the store is {missing + 1}") as e:
        await read()
    assert e.value.index == missing
    assert got == (list(range(1, 201)) if missing > 200 else [])


async def test_a_foreign_key_among_the_frames_stops_the_reader(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 3)
    await store.put(KEYS.log + b"notes", b"")
    with pytest.raises(LogGap, match=r"there is a key .*notes"):
        await entries(log)


# ---------------------------------------------------------------- truncate, compact


async def test_truncation_deletes_the_oldest_and_says_so_to_readers(log: Log, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 20)
    await log.truncate(11, token)
    assert await entries(log, 11) == expected(11, 20)
    assert await log.first_index() == 11
    with pytest.raises(Truncated) as e:
        await entries(log)
    assert (e.value.wanted, e.value.first_available) == (1, 11)
    await log.truncate(11, token)
    await log.truncate(5, token)
    assert await log.first_index() == 11
    await log.truncate(21, token)
    assert await log.first_index() is None
    await log.truncate(30, token)


async def test_a_long_truncation_is_many_transactions_each_fenced(log: Log, cluster: MemoryCluster, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 2_500)
    cluster.faults.next_writes.extend(["answered", "applied", "lost"])
    await log.truncate(2_400, token)
    assert await log.first_index() == 2_400
    await elect(store)
    with pytest.raises(Fenced, match="truncation of log 2400 to 2449 refused"):
        await log.truncate(2_450, token)
    assert await log.first_index() == 2_400


async def test_compaction_is_at_the_revision_of_a_frame_never_of_a_delete(log: Log, cluster: MemoryCluster, store: MemoryStore) -> None:
    token = await elect(store)
    await fill(log, token, 1, 10)
    await log.truncate(6, token)
    revision = await append(log, 11, token)
    await log.compact(11)
    assert cluster.mvcc.compacted == revision
    with pytest.raises(Truncated):
        await log.compact(3)
    with pytest.raises(LogGap, match="does not exist"):
        await log.compact(12)


# ---------------------------------------------------------------- follow


class Follower:
    """Collects what a follow yields, in a task."""

    def __init__(self, log: Log, first: int, revision: int) -> None:
        self.got: Entries = []
        self.signs = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.task = asyncio.create_task(self._run(log.follow(first, revision)))

    async def _run(self, batches: AsyncIterator[list[tuple[int, bytes, int]]]) -> None:
        async for batch in batches:
            self.got += [(index, data) for index, data, _ in batch]
            self.signs += not batch
            await self.gate.wait()


@pytest.fixture
async def follow(eventually: Callable[..., Awaitable[None]]) -> AsyncIterator[Callable[..., Follower]]:
    followers: list[Follower] = []

    def start(log: Log, first: int = 1, revision: int = 1) -> Follower:
        followers.append(Follower(log, first, revision))
        return followers[-1]

    yield start
    for follower in followers:
        follower.task.cancel()
    await asyncio.gather(*(f.task for f in followers), return_exceptions=True)


Follow = Callable[..., Follower]
Eventually = Callable[..., Awaitable[None]]


async def test_follow_yields_what_is_appended_and_signs_of_life(log: Log, store: MemoryStore, follow: Follow, eventually: Eventually) -> None:
    token = await elect(store)
    await fill(log, token, 1, 3)
    follower = follow(log)
    await eventually(lambda: follower.signs)
    await fill(log, token, 4, 6)
    await eventually(lambda: follower.got == expected(1, 6))


async def test_follow_begins_where_it_is_told(log: Log, store: MemoryStore, follow: Follow, eventually: Eventually) -> None:
    token = await elect(store)
    await fill(log, token, 1, 5)
    late = follow(log, 4, 1)  # from the beginning of the history: older entries are ignored
    await eventually(lambda: late.got == expected(4, 5))


async def test_follow_through_cut_silent_repeating_and_reordered_watches(
    log: Log, cluster: MemoryCluster, store: MemoryStore, follow: Follow, eventually: Eventually
) -> None:
    token = await elect(store)
    follower = follow(Log(store_of(cluster, "b"), KEYS))
    faults = cluster.faults
    faults.rng.seed(3)
    faults.watch_repeat = faults.watch_older = faults.watch_split = faults.watch_cancel = 0.2  # rows 25 and 26
    for index in range(1, 200):
        await append(log, index, token)
        if index % 50 == 0:
            cluster.cut_watches()
        if index == 120:
            cluster.silence_watches()  # row 27
    await eventually(lambda: len(follower.got) == 199)
    assert follower.got == expected(1, 199)


async def test_follow_lists_again_after_compaction(
    log: Log, cluster: MemoryCluster, store: MemoryStore, follow: Follow, eventually: Eventually
) -> None:
    token = await elect(store)
    follower = follow(Log(store_of(cluster, "b"), KEYS))
    await fill(log, token, 1, 5)
    await eventually(lambda: len(follower.got) == 5)
    cluster.faults.partitioned.add("b")  # row 23
    await fill(log, token, 6, 300)
    await log.truncate(4, token)
    await log.compact(290)
    cluster.faults.partitioned.clear()
    cluster.cut_watches()
    await fill(log, token, 301, 305)
    await eventually(lambda: len(follower.got) == 305)
    assert follower.got == expected(1, 305)


async def test_follow_stops_when_what_it_needs_is_truncated(log: Log, cluster: MemoryCluster, store: MemoryStore, follow: Follow) -> None:
    token = await elect(store)
    await fill(log, token, 1, 50)
    await log.truncate(40, token)
    await append(log, 51, token)
    await log.compact(51)
    follower = follow(log, 10)
    with pytest.raises(Truncated) as e:
        await asyncio.wait_for(follower.task, 5)
    assert e.value.first_available == 40


async def test_truncation_does_not_disturb_a_follower(log: Log, store: MemoryStore, follow: Follow, eventually: Eventually) -> None:
    token = await elect(store)
    await fill(log, token, 1, 20)
    follower = follow(log)
    await log.truncate(15, token)
    await append(log, 21, token)
    await eventually(lambda: len(follower.got) == 21)
    assert follower.got == expected(1, 21)


async def test_follow_stops_at_a_gap(log: Log, store: MemoryStore, follow: Follow) -> None:
    token = await elect(store)
    await fill(log, token, 1, 3)
    await store.put(KEYS.frame(5), b"")
    follower = follow(log)
    with pytest.raises(LogGap) as e:
        await asyncio.wait_for(follower.task, 5)
    assert e.value.index == 4
    assert follower.got == expected(1, 3)


async def test_a_frame_that_the_watch_lost_is_found_in_the_store(log: Log, store: MemoryStore, follow: Follow, eventually: Eventually) -> None:
    token = await elect(store)
    await fill(log, token, 1, 9)
    sixth = await store.get(KEYS.frame(6))
    assert sixth is not None
    # The watch begins behind frames 4 and 5, as if the server had lost them (etcd-io/etcd#17529).
    follower = follow(log, 4, sixth.mod_revision)
    await eventually(lambda: follower.got == expected(4, 9))


async def test_an_overwritten_frame_stops_a_live_follower(log: Log, store: MemoryStore, follow: Follow, eventually: Eventually) -> None:
    token = await elect(store)
    await fill(log, token, 1, 3)
    follower = follow(log)
    await eventually(lambda: len(follower.got) == 3)
    await store.put(KEYS.frame(2), b"forged")
    with pytest.raises(LogGap, match="log frame 2: was overwritten"):
        await asyncio.wait_for(follower.task, 5)


async def test_transactions_of_others_do_not_reach_the_log(store: MemoryStore, log: Log) -> None:
    token = await elect(store)
    await append(log, 1, token)
    await store.txn([], [Put(KEYS.job("j"), b""), Delete(KEYS.desired("n"))])
    assert await entries(log) == expected(1, 1)
