"""The election on the modelled cluster. Leases run on real time of a second or two, deadlines on a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import msgspec
import pytest

from gangline.core.model.codec import unpack
from gangline.core.store import candidate
from gangline.core.store.api import LeaseNotFound
from gangline.core.store.candidate import Candidate
from gangline.core.store.election import Election, Leadership, Seen, announce
from gangline.core.store.fencing import Fenced
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log
from gangline.core.store.memory import MemoryCluster, MemoryStore
from gangline.core.store.node import SchedulerAddress
from gangline.core.store.watching import Timing

KEYS = Keys("test")
QUICK = Timing(quiet_s=0.1, behind_s=0.2)
TTL_S = 1.0

Eventually = Callable[..., Awaitable[None]]
Campaign = Callable[..., Awaitable[Leadership]]


class Clock:
    """Monotonic seconds plus what the test adds, as after a pause of the process."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster(min_lease_ttl_s=1.0)


@pytest.fixture
def store(cluster: MemoryCluster) -> MemoryStore:
    return store_of(cluster, "a")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def store_of(cluster: MemoryCluster, name: str) -> MemoryStore:
    return MemoryStore(cluster, name, timeout_s=0.2, timing=QUICK)


@pytest.fixture
async def campaign(cluster: MemoryCluster) -> AsyncIterator[Campaign]:
    """`await campaign("a")` waits until candidate a leads, and ends its term after the test."""
    terms: list[Leadership] = []

    async def run(name: str, value: bytes | None = None, *, clock: Callable[[], float] = time.monotonic, ttl_s: float = TTL_S) -> Leadership:
        election = Election(store_of(cluster, name), KEYS, name, value or name.encode(), ttl_s, clock=clock)
        terms.append(await asyncio.wait_for(election.campaign(), 10))
        return terms[-1]

    yield run
    cluster.faults.unavailable = False
    cluster.faults.partitioned.clear()
    for term in terms:
        await term.resign()


async def is_lost(term: Leadership, within_s: float = 5.0) -> str:
    await asyncio.wait_for(term.lost.wait(), within_s)
    return term.reason


# ---------------------------------------------------------------- winning


async def test_the_token_is_the_create_revision_of_the_key(campaign: Campaign, store: MemoryStore) -> None:
    term = await campaign("a")
    key = await store.get(KEYS.leader)
    assert key is not None
    assert (key.value, key.create_revision, key.lease) == (b"a", term.token, term.lease)
    assert term.valid()
    assert not term.lost.is_set()


async def test_of_many_candidates_at_once_one_wins(cluster: MemoryCluster, campaign: Campaign) -> None:
    tasks = [asyncio.create_task(campaign(f"c{i}")) for i in range(5)]  # row 6
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.1)
    assert len(done) == 1
    tokens = [done.pop().result().token]
    while waiting:
        await max((t.result() for t in tasks if t.done()), key=lambda term: term.token).resign()
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        tokens += [t.result().token for t in done]
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 5


@pytest.mark.parametrize("fates", [["answered", "lost"], ["answered", "applied"], ["answered", "late", "lost"], ["lost"], ["late"]])
async def test_an_ambiguous_election_is_settled(fates: list[str], cluster: MemoryCluster, campaign: Campaign, store: MemoryStore) -> None:
    cluster.faults.next_writes.extend(fates)  # type: ignore[arg-type]
    term = await campaign("a")
    await asyncio.sleep(2 * cluster.faults.late_write_s)
    key = await store.get(KEYS.leader)
    assert key is not None
    assert (key.create_revision, key.lease) == (term.token, term.lease)
    assert term.valid()


async def test_a_candidate_waits_through_an_outage(cluster: MemoryCluster, campaign: Campaign, eventually: Eventually) -> None:
    cluster.faults.unavailable = True
    task = asyncio.create_task(campaign("a"))
    await asyncio.sleep(0.6)
    assert not task.done()
    cluster.faults.unavailable = False
    assert (await task).valid()


async def test_a_cancelled_campaign_leaves_no_key(cluster: MemoryCluster, store: MemoryStore) -> None:
    cluster.faults.next_writes.extend(["answered", "applied", "lost", "lost", "lost"])
    task = asyncio.create_task(Election(store, KEYS, "a", b"a", TTL_S).campaign())
    async with asyncio.timeout(5):
        while not any(cluster.mvcc.read(KEYS.leader, b"")):  # noqa: ASYNC110 - the model has no event for it
            await asyncio.sleep(0)
    cluster.faults.next_writes.clear()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await store.get(KEYS.leader) is None


# ---------------------------------------------------------------- taking over


async def test_a_standby_takes_over_at_once_when_the_leader_resigns(campaign: Campaign) -> None:
    first = await campaign("a", ttl_s=30)
    second = asyncio.create_task(campaign("b", ttl_s=30))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await first.resign()
    assert (await second).token > first.token
    assert time.monotonic() - started < 2
    assert (first.valid(), first.lost.is_set(), first.reason) == (False, True, "resigned")


async def test_a_standby_takes_over_when_the_lease_of_a_silent_leader_ends(cluster: MemoryCluster, campaign: Campaign) -> None:
    first = await campaign("a")
    second = asyncio.create_task(campaign("b"))
    await asyncio.sleep(0.05)
    cluster.faults.partitioned.add("a")
    token = (await second).token
    assert not first.valid()  # it stopped deciding before the other could begin
    assert "was not renewed" in await is_lost(first)
    cluster.faults.partitioned.clear()
    log = Log(store_of(cluster, "a"), KEYS)
    with pytest.raises(Fenced) as e:
        await log.append(b"frame nonce-123", index=1, nonce=b"nonce-123", token=first.token)
    assert e.value.seen == token


async def test_a_standby_whose_watch_lost_the_delete_looks_again(cluster: MemoryCluster, campaign: Campaign) -> None:
    first = await campaign("a")
    second = asyncio.create_task(campaign("b"))
    await asyncio.sleep(0.1)
    cluster.silence_watches()  # row 24
    await first.resign()
    assert (await second).valid()


async def test_resigning_twice_and_after_the_loss_is_harmless(campaign: Campaign, store: MemoryStore) -> None:
    first = await campaign("a")
    await first.resign()
    second = await campaign("b")
    await first.resign()
    key = await store.get(KEYS.leader)
    assert key is not None
    assert key.create_revision == second.token


async def test_resigning_without_a_store_returns_soon(cluster: MemoryCluster, campaign: Campaign) -> None:
    term = await campaign("a")
    cluster.faults.unavailable = True
    await asyncio.wait_for(term.resign(), 2)
    assert not term.valid()


# ---------------------------------------------------------------- staying


async def test_a_living_leader_stays_over_many_times_to_live(campaign: Campaign, store: MemoryStore) -> None:
    term = await campaign("a")
    deadline = term.deadline
    for _ in range(50):
        await asyncio.sleep(0.05)
        assert term.valid()
    assert term.deadline > deadline + 2 * TTL_S
    key = await store.get(KEYS.leader)
    assert key is not None
    assert key.create_revision == term.token


async def test_the_deadline_counts_from_when_the_keepalive_was_sent(cluster: MemoryCluster, clock: Clock, campaign: Campaign) -> None:
    before = clock()
    term = await campaign("a", clock=clock, ttl_s=3.0)
    assert before < term.deadline <= clock() + 2.0


async def test_a_leader_that_was_held_up_is_not_valid_at_once(clock: Clock, campaign: Campaign) -> None:
    term = await campaign("a", clock=clock, ttl_s=15.0)
    assert term.valid()
    clock.ahead_s = 9.9  # rows 1, 3 and 4: nothing in this process has run since
    assert term.valid()
    clock.ahead_s = 10.1
    assert not term.valid()
    assert not term.lost.is_set()


async def test_a_leader_that_was_held_up_briefly_goes_on(clock: Clock, campaign: Campaign, eventually: Eventually) -> None:
    term = await campaign("a", clock=clock)
    clock.ahead_s = 0.8
    assert not term.valid()
    await eventually(term.valid)
    assert not term.lost.is_set()


async def test_a_short_outage_is_survived(cluster: MemoryCluster, campaign: Campaign, eventually: Eventually) -> None:
    term = await campaign("a", ttl_s=3.0)
    cluster.faults.unavailable = True
    await asyncio.sleep(0.9)
    cluster.faults.unavailable = False
    deadline = term.deadline
    await eventually(lambda: term.deadline > deadline)
    assert term.valid()


async def test_a_key_that_was_deleted_by_hand_is_not_put_again(campaign: Campaign, store: MemoryStore) -> None:
    term = await campaign("a")
    await store.delete(KEYS.leader)  # row 7
    assert "the leader key is gone" in await is_lost(term)
    assert not term.valid()
    assert await store.get(KEYS.leader) is None


async def test_a_key_that_was_taken_is_noticed_although_the_lease_lives(campaign: Campaign, store: MemoryStore) -> None:
    term = await campaign("a")
    await store.delete(KEYS.leader)
    revision = await store.put(KEYS.leader, b"b")
    assert f"the leader key has create revision {revision}" in await is_lost(term)
    await term.resign()
    assert await store.get(KEYS.leader) is not None


async def test_a_key_that_was_unbound_from_the_lease_does_not_stay_for_ever(campaign: Campaign, store: MemoryStore) -> None:
    term = await campaign("a")
    await store.put(KEYS.leader, b"by hand")  # keeps the create revision, loses the lease
    assert "and lease 0" in await is_lost(term)
    await term.resign()
    assert await store.get(KEYS.leader) is None


async def test_a_revoked_lease_is_the_end(campaign: Campaign, store: MemoryStore) -> None:
    term = await campaign("a")
    await store.lease_revoke(term.lease)
    assert "is gone" in await is_lost(term)


async def test_a_keepalive_that_says_ok_for_a_revoked_lease_is_not_believed(campaign: Campaign, cluster: MemoryCluster) -> None:
    term = await campaign("a")
    real = cluster.mvcc.keepalive

    def says_ok(lease: int) -> float:
        try:
            return real(lease)
        except LeaseNotFound:
            return TTL_S  # as etcd up to 3.4.37 does

    cluster.mvcc.keepalive = says_ok  # type: ignore[method-assign]
    cluster.mvcc.revoke(term.lease)
    assert "the leader key is gone" in await is_lost(term)


async def test_a_leader_without_an_answer_for_a_whole_time_to_live_has_lost(cluster: MemoryCluster, campaign: Campaign) -> None:
    term = await campaign("a")
    cluster.faults.unavailable = True
    assert "was not renewed in 1.0 s" in await is_lost(term)


# ---------------------------------------------------------------- a quick restart


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def me(name: str = "a", **changes: object) -> Candidate:
    return msgspec.structs.replace(candidate.this_process(name), **changes)


def of_process(pid: int, name: str = "a") -> Candidate:
    return me(name, pid=pid, started=candidate._start_of(pid))


def test_this_process_is_not_gone() -> None:
    assert not candidate.is_gone(me(), me())
    assert me().pid == os.getpid()
    assert me().started > 0
    assert candidate.decode(candidate.encode(me())) == me()
    assert candidate.decode(b"somebody") is None


def test_a_living_or_stopped_process_is_not_gone_and_an_ended_one_is(other_process: subprocess.Popen[bytes]) -> None:
    other = of_process(other_process.pid)
    assert not candidate.is_gone(other, me())
    other_process.send_signal(19)
    assert not candidate.is_gone(other, me())
    other_process.kill()
    other_process.wait()
    assert candidate.is_gone(other, me())


def test_another_process_with_the_same_pid_is_another() -> None:
    assert candidate.is_gone(me(started=me().started - 1), me())


@pytest.mark.parametrize("changes", [{"boot_id": "another"}, {"pid_namespace": 1}])
def test_a_process_elsewhere_is_never_provably_gone(changes: dict[str, object]) -> None:
    assert not candidate.is_gone(me(started=1, **changes), me())


def test_without_proc_nothing_is_proven() -> None:
    blind = me(boot_id="", pid_namespace=0, started=0)
    assert not candidate.is_gone(blind, blind)
    assert not candidate.is_gone(me(pid=10**9), blind)


@pytest.mark.parametrize("pid", [-1, 0, 2**70])
def test_strange_pids_prove_nothing_and_harm_nobody(pid: int) -> None:
    assert not candidate.is_gone(me(pid=pid), me())


async def test_a_restarted_scheduler_does_not_wait_for_its_own_lease(store: MemoryStore, campaign: Campaign) -> None:
    lease = await store.lease_grant(600)
    await store.put(KEYS.leader, candidate.encode(me(started=me().started - 1)), lease=lease.id)
    started = time.monotonic()
    await campaign("a", candidate.encode(me()))
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("dead", "mine"),
    [
        (me("b", started=1), me("a")),  # another's lease is its own affair
        (me("a"), me("a")),  # alive
        (me("a", started=1, boot_id="another"), me("a")),
    ],
)
async def test_a_lease_of_another_or_of_a_living_process_is_waited_out(
    dead: Candidate, mine: Candidate, store: MemoryStore, campaign: Campaign
) -> None:
    lease = await store.lease_grant(1)
    await store.put(KEYS.leader, candidate.encode(dead), lease=lease.id)
    started = time.monotonic()
    await campaign("a", candidate.encode(mine))
    assert time.monotonic() - started > 0.7


async def test_a_successor_elected_meanwhile_is_not_deleted(store: MemoryStore, cluster: MemoryCluster) -> None:
    lease = await store.lease_grant(600)
    await store.put(KEYS.leader, candidate.encode(me(started=1)), lease=lease.id)
    stale = await store.get(KEYS.leader)
    assert stale is not None
    await store.delete(KEYS.leader)
    await store.put(KEYS.leader, b"successor")
    await Election(store, KEYS, "a", candidate.encode(me()), TTL_S)._take_from_dead_self(stale)
    key = await store.get(KEYS.leader)
    assert key is not None
    assert key.value == b"successor"


# ---------------------------------------------------------------- watching and announcing


async def test_observe_yields_each_leader(cluster: MemoryCluster, campaign: Campaign, eventually: Eventually) -> None:
    seen: list[Seen] = []

    async def observe() -> None:
        async for who in Election(store_of(cluster, "x"), KEYS, "x", b"", TTL_S).observe():
            seen.append(who)

    task = asyncio.create_task(observe())
    await eventually(lambda: seen == [(b"", 0)])
    first = await campaign("a")
    await eventually(lambda: seen[-1] == (b"a", first.token))
    cluster.silence_watches()
    await first.resign()
    await eventually(lambda: seen[-1] == (b"", 0))
    second = await campaign("b")
    await eventually(lambda: seen[-1] == (b"b", second.token))
    assert len(seen) == 4
    cluster.faults.unavailable = True
    await asyncio.sleep(0.7)
    assert not task.done()
    task.cancel()


async def announced(store: MemoryStore) -> list[SchedulerAddress]:
    return [unpack(kv.value, SchedulerAddress) for kv in (await store.range(KEYS.schedulers)).kvs]


async def test_an_announcement_lives_as_long_as_its_task(cluster: MemoryCluster, store: MemoryStore, eventually: Eventually) -> None:
    address = SchedulerAddress("a", "http://a:7000")
    task = asyncio.create_task(announce(store, KEYS, address, ttl_s=TTL_S))

    async def is_announced() -> bool:
        return await announced(store) == [address]

    await eventually(is_announced)
    await asyncio.sleep(1.5 * TTL_S)
    assert await is_announced()
    await store.delete(KEYS.scheduler("a"))
    await eventually(is_announced)
    cluster.faults.partitioned.add("a")
    other = store_of(cluster, "b")
    await asyncio.sleep(1.5 * TTL_S)
    assert await announced(other) == []
    cluster.faults.partitioned.clear()
    await eventually(is_announced)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await announced(store) == []
