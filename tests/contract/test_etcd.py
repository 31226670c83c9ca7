"""What only a real etcd can show: TLS, restarts, cut and dead connections, frozen members, lost quorum, full and restored stores."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gangline.core.store.api import (
    Ambiguous,
    Compacted,
    Compare,
    Definite,
    Event,
    OutOfSpace,
    Put,
    StoreError,
    WentBack,
)
from gangline.core.store.endpoints import TlsFiles
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.watching import Timing

pytestmark = pytest.mark.etcd

Connect = Callable[..., Awaitable[EtcdStore]]

#: a server that is back soon after a restart
NIMBLE = ("--heartbeat-interval", "20", "--election-timeout", "200")

QUICK = Timing(quiet_s=0.3, behind_s=0.5)


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    async with contextlib.AsyncExitStack() as stack:

        async def factory(*endpoints: str, **options: Any) -> EtcdStore:
            store = await EtcdStore.connect(endpoints, **{"timing": QUICK, **options})
            stack.push_async_callback(store.close)
            return store

        yield factory


@pytest.fixture
async def follow() -> AsyncIterator[Callable[..., list[Event]]]:
    """`follow(store, prefix, start_revision)` gives a list that grows with the events of a watch."""
    async with contextlib.AsyncExitStack() as stack:

        def start(store: EtcdStore, prefix: bytes, start_revision: int) -> list[Event]:
            events: list[Event] = []

            async def run() -> None:
                async for batch in store.watch(prefix, start_revision=start_revision):
                    events.extend(batch.events)

            task = asyncio.create_task(run())
            stack.callback(task.cancel)
            return events

        yield start


async def insist(write: Callable[[], Awaitable[Any]], timeout_s: float = 15) -> Any:
    """Repeat a write that may be repeated until it is answered."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await write()
        except Ambiguous:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


def values(events: list[Event]) -> list[int]:
    return [int(event.kv.value) for event in events]


# Connecting


async def test_endpoints_by_name_and_in_several_notations(etcd_endpoint, connect):
    port = etcd_endpoint.rpartition(":")[2]
    for endpoints in ([f"localhost:{port}"], [f"http://localhost:{port}/", etcd_endpoint], [f"no.such.host.invalid:{port}", etcd_endpoint]):
        store = await connect(*endpoints)
        assert await store.get(b"/none") is None


@pytest.mark.parametrize("endpoint", ["", "localhost", "localhost:0", "localhost:99999", "ftp://a:1", "https://a:1", "a:1/path", "a b:1"])
async def test_endpoints_that_cannot_be_understood(endpoint):
    with pytest.raises(ValueError, match="etcd endpoint"):
        await EtcdStore.connect([endpoint])


async def test_nobody_there(connect):
    started = time.monotonic()
    with pytest.raises(Ambiguous, match=r"connect to etcd at 127\.0\.0\.1:1: "):
        await connect("127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(Ambiguous, match="none of the etcd endpoints"):
        await connect("no.such.host.invalid:2379", timeout_s=0.5)
    assert time.monotonic() - started < 5


# TLS


def files(tls: Any, name: str = "client") -> TlsFiles:
    cert, key = tls.issue(name)
    return TlsFiles(tls.ca, cert, key)


async def test_tls_with_client_certificates(make_tls, start_etcd, connect, eventually):
    tls = make_tls()
    member = start_etcd(tls=tls)
    store = await connect(member.endpoint, tls=files(tls))
    lease = await store.lease_grant(10)
    revision = await store.put(b"/a", b"1", lease=lease.id)
    assert await store.lease_keepalive(lease.id) == lease.ttl_s
    batch = await anext(store.watch(b"/", start_revision=revision))
    assert batch.events[0].kv.value == b"1"


async def test_tls_refuses_the_wrong_people(make_tls, start_etcd, connect):
    tls, stranger = make_tls(), make_tls()
    member = start_etcd(tls=tls)
    good, bad = files(tls), files(stranger)
    wrong = {
        "no certificate": TlsFiles(good.ca),
        "certificate of another authority": TlsFiles(good.ca, bad.cert, bad.key),
        "server of another authority": TlsFiles(bad.ca, good.cert, good.key),
        "server of another name": TlsFiles(good.ca, good.cert, good.key, "etcd.example.com"),
    }
    for what, tls_files in wrong.items():
        with pytest.raises(Ambiguous):
            pytest.fail(f"{what}: {await connect(member.endpoint, tls=tls_files, timeout_s=0.5)}")
    with pytest.raises(Ambiguous):
        await connect(member.endpoint, timeout_s=0.5)


async def test_replaced_certificates_are_used_for_new_connections(make_tls, start_etcd, connect, follow, eventually):
    tls, new = make_tls(), make_tls()
    member = start_etcd(*NIMBLE, tls=tls)
    store = await connect(member.endpoint, tls=files(tls))
    events = follow(store, b"/a", await store.put(b"/a", b"1"))
    lease = await store.lease_grant(60)
    await store.lease_keepalive(lease.id)
    member.stop()
    new.issue("server")
    new.issue("client")
    for name in ("ca.pem", "server.pem", "server.key", "client.pem", "client.key"):
        shutil.copy(new.folder / name, tls.folder / name)
    await asyncio.to_thread(member.start)
    await insist(lambda: store.put(b"/a", b"2"))
    await eventually(lambda: values(events) == [1, 2])
    assert await insist(lambda: store.lease_keepalive(lease.id)) == lease.ttl_s


async def test_what_a_user_may_not_do_is_definite(make_tls, start_etcd, connect):
    tls = make_tls()
    member = start_etcd(tls=tls)
    for command in (
        "user add root --no-password", "user grant-role root root",
        "role add agent", "role grant-permission agent readwrite /mine/ --prefix",
        "user add n1 --no-password", "user grant-role n1 agent", "auth enable",
    ):  # fmt: skip
        member.ctl(*command.split())
    root = await connect(member.endpoint, tls=files(tls, "root"))
    agent = await connect(member.endpoint, tls=files(tls, "n1"))
    revision = await root.put(b"/theirs/a", b"")
    lease = await agent.lease_grant(10)
    await agent.put(b"/mine/a", b"", lease=lease.id)
    assert await agent.lease_keepalive(lease.id) == 10
    watch = agent.watch(b"/mine/", start_revision=revision)
    assert (await anext(watch)).events[0].kv.key == b"/mine/a"
    assert (await anext(watch)).events == []
    refused = (
        agent.get(b"/theirs/a"),
        agent.put(b"/theirs/a", b""),
        agent.txn([Compare(b"/theirs/a", "version", "==", 1)], [Put(b"/mine/a", b"")]),
        anext(agent.watch(b"/theirs/", start_revision=1)),
        anext(agent.watch(b"/", start_revision=1)),
    )
    for call in refused:
        with pytest.raises(Definite, match=r"(?i)permission ?denied"):
            await call


# Restarts and connections


async def test_a_watch_lives_through_a_crash_of_etcd(start_etcd, connect, follow, eventually):
    member = start_etcd(*NIMBLE)
    store = await connect(member.endpoint)
    events = follow(store, b"/n", await store.put(b"/n", b"0"))
    for i in range(1, 100):
        await store.put(b"/n", b"%d" % i)
        if i % 33 == 0:
            member.kill()
            await asyncio.to_thread(member.start)
            await insist(lambda: store.get(b"/n"))
    await eventually(lambda: values(events) == list(range(100)))


async def test_a_watch_cut_in_the_middle_of_catching_up_has_no_gap(etcd_endpoint, connect, tcp_proxy, follow, eventually):
    writer = await connect(etcd_endpoint)
    first = await writer.put(b"/cut/n", b"x" * 100)
    for count in [499] + [500] * 9:
        await asyncio.gather(*(writer.put(b"/cut/n", b"x" * 100) for _ in range(count)))
    proxy = await tcp_proxy(etcd_endpoint)
    reader = await connect(proxy.endpoint)
    # A message of 1,000 revisions has about 140 kB, so that each connection is cut in the middle of the second.
    proxy.cut_after = 220_000
    events = follow(reader, b"/cut/", first)
    await eventually(lambda: len(events) >= 5_000)
    assert [event.kv.version for event in events] == list(range(1, 5_001))
    assert proxy.connections >= 3


async def test_resets_under_load_lose_and_repeat_nothing(etcd_endpoint, connect, tcp_proxy, follow, eventually):
    proxy = await tcp_proxy(etcd_endpoint)
    writer, reader = await connect(etcd_endpoint), await connect(proxy.endpoint)
    events = follow(reader, b"/reset/", await writer.put(b"/reset/n", b"0"))
    for i in range(1, 500):
        await writer.put(b"/reset/n", b"%d" % i)
        if i % 50 == 0:
            proxy.cut()
            before = proxy.connections
            await eventually(lambda before=before: proxy.connections > before)
    await eventually(lambda: len(events) >= 500)
    assert values(events) == list(range(500))


async def test_reads_wait_for_a_connection_that_is_lost_for_a_moment(etcd_endpoint, connect, tcp_proxy):
    proxy = await tcp_proxy(etcd_endpoint)
    store = await connect(proxy.endpoint)
    proxy.refuse = True
    proxy.cut()
    reading = asyncio.create_task(store.range(b"/cut/"))
    with pytest.raises(Ambiguous):
        await store.put(b"/once", b"")
    proxy.refuse = False
    assert (await reading).revision > 0


async def test_a_write_is_sent_once_even_if_its_answer_is_lost(etcd_endpoint, connect, tcp_proxy):
    proxy = await tcp_proxy(etcd_endpoint)
    direct, store = await connect(etcd_endpoint), await connect(proxy.endpoint, timeout_s=0.5)
    proxy.black_hole()
    with pytest.raises(Ambiguous, match="DEADLINE_EXCEEDED"):
        await store.put(b"/lost-answer", b"")
    with pytest.raises(Ambiguous):
        await store.txn([Compare(b"/lost-answer", "version", "==", 1)], [Put(b"/lost-answer", b"2")])
    proxy.cut()
    assert await store.get(b"/none") is None
    kv = await direct.get(b"/lost-answer")
    assert kv is not None
    assert (kv.version, kv.value) == (2, b"2")


async def test_closing_the_store_ends_calls_that_wait(etcd_endpoint, connect, tcp_proxy):
    proxy = await tcp_proxy(etcd_endpoint)
    store = await connect(proxy.endpoint)
    lease = await store.lease_grant(10)
    await store.lease_keepalive(lease.id)
    proxy.black_hole()
    calls = [asyncio.create_task(call) for call in (store.put(b"/a", b""), store.get(b"/a"), store.lease_keepalive(lease.id))]
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(2):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(answer, StoreError) for answer in answers)
    assert isinstance(answers[0], Ambiguous)


async def test_a_reader_that_takes_its_time_misses_nothing(etcd_endpoint, connect):
    store = await connect(etcd_endpoint)
    watch = store.watch(b"/slow/", start_revision=await store.put(b"/slow/n", b"0"))
    assert len((await anext(watch)).events) == 1
    for start in range(0, 3_000, 100):
        await asyncio.gather(*(store.put(b"/slow/n", b"x" * 2_000) for _ in range(start, start + 100)))
    events: list[Event] = []
    while len(events) < 3_000:
        events.extend((await anext(watch)).events)
    assert [event.kv.version for event in events] == list(range(2, 3_002))
    await watch.aclose()


async def test_what_neither_answers_nor_ends_is_left_within_seconds(etcd_endpoint, etcd_cluster3, connect, tcp_proxy, follow, eventually):
    # Side by side, because each takes as long as its timeouts.
    await asyncio.gather(
        frozen("leader", etcd_cluster3(), connect, follow, eventually),
        frozen("follower", etcd_cluster3(), connect, follow, eventually),
        swallowed(etcd_endpoint, connect, tcp_proxy, follow, eventually),
    )


async def frozen(role, members, connect, follow, eventually):
    """A member of three stops, as a machine does that swaps or a process that is traced; its kernel still acknowledges packets."""
    store = await connect(*(member.endpoint for member in members), timeout_s=2)
    first = await store.put(b"/n", b"")
    watches = [follow(store, b"/n", first) for _ in range(3)]
    lease = await store.lease_grant(30)
    await store.lease_keepalive(lease.id)
    leads = [member.is_leader() for member in members]
    members[leads.index(role == "leader")].freeze()
    began = time.monotonic()
    last_error_s, answered = 0.0, 0
    while time.monotonic() - began < 8.5:
        asked_s = time.monotonic() - began
        for call in (store.put(b"/n", b""), store.get(b"/n"), store.lease_keepalive(lease.id)):
            try:
                await call
                answered += 1
            except Ambiguous:
                last_error_s = asked_s
    assert last_error_s < 7.5
    assert answered > 100
    final = await store.put(b"/n", b"")
    await eventually(lambda: all(events and events[-1].kv.mod_revision == final for events in watches))
    for events in watches:
        assert [event.kv.version for event in events] == list(range(1, events[-1].kv.version + 1))


async def swallowed(endpoint, connect, tcp_proxy, follow, eventually):
    """The only connection passes nothing on to us any more, as after a failover of a load balancer; a new one would work."""
    proxy = await tcp_proxy(endpoint)
    direct, store = await connect(endpoint), await connect(proxy.endpoint, timeout_s=1)
    lease = await store.lease_grant(60)
    await store.lease_keepalive(lease.id)
    events = follow(store, b"/hole/", await direct.put(b"/hole/n", b"0"))
    await eventually(lambda: values(events) == [0])
    proxy.black_hole()
    renewing = asyncio.create_task(insist(lambda: store.lease_keepalive(lease.id)))
    await direct.put(b"/hole/n", b"1")
    await eventually(lambda: values(events) == [0, 1], timeout_s=15)
    assert await renewing == lease.ttl_s


async def test_without_a_quorum_nothing_is_answered_and_then_everything(etcd_cluster3, connect, eventually):
    members = etcd_cluster3()
    store = await connect(*(member.endpoint for member in members), timeout_s=1)
    for member in members[1:]:
        member.freeze()
    for call in (store.put(b"/a", b""), store.get(b"/a"), store.lease_grant(5)):
        started = time.monotonic()
        with pytest.raises(Ambiguous):
            await call
        assert time.monotonic() - started < 2
    for member in members[1:]:
        member.thaw()
    await insist(lambda: store.put(b"/a", b"again"))
    kv = await store.get(b"/a")
    assert kv is not None
    assert kv.value == b"again"


# Compaction


async def test_compaction_keeps_the_present_and_takes_the_past(start_etcd, connect):
    store = await connect(start_etcd(*NIMBLE).endpoint)
    revisions = [await store.put(b"/a", b"%d" % i) for i in range(10)]
    await store.compact(revisions[5])
    await store.compact(revisions[5])
    await store.compact(revisions[2])
    for call in (store.get(b"/a", revision=revisions[4]), store.range(b"/", revision=revisions[4])):
        with pytest.raises(Compacted):
            await call
    kv = await store.get(b"/a", revision=revisions[5])
    assert kv is not None
    assert kv.value == b"5"
    with pytest.raises(Compacted) as caught:
        await anext(store.watch(b"/", start_revision=revisions[4]))
    assert caught.value.revision == revisions[5]


async def test_a_watch_that_compaction_overtakes_says_so_and_one_that_has_caught_up_goes_on(start_etcd, connect, tcp_proxy, eventually):
    member = start_etcd(*NIMBLE)
    proxy = await tcp_proxy(member.endpoint)
    direct, cut_off = await connect(member.endpoint), await connect(proxy.endpoint)
    first = await direct.put(b"/a", b"0")
    seen: list[Event] = []

    async def run(store: EtcdStore, into: list[Event]) -> None:
        async for batch in store.watch(b"/", start_revision=first):
            into.extend(batch.events)

    cut_off_seen: list[Event] = []
    watching, losing = asyncio.create_task(run(direct, seen)), asyncio.create_task(run(cut_off, cut_off_seen))
    await eventually(lambda: seen and cut_off_seen)
    proxy.refuse = True
    proxy.cut()
    for i in range(1, 10):
        last = await direct.put(b"/a", b"%d" % i)
    await eventually(lambda: len(seen) == 10)
    await direct.compact(last)
    proxy.refuse = False
    async with asyncio.timeout(10):
        with pytest.raises(Compacted) as caught:
            await losing
    assert caught.value.revision == last
    await direct.put(b"/a", b"10")
    await eventually(lambda: values(seen) == list(range(11)))
    watching.cancel()


async def test_a_quiet_watch_outlives_compaction_and_a_restart(start_etcd, connect, follow, eventually):
    # Nothing is written under its prefix, so it has no event to resume from but what it was shown of the store.
    member = start_etcd(*NIMBLE)
    store = await connect(member.endpoint)
    await store.put(b"/quiet/a", b"0")
    events = follow(store, b"/quiet/", await store.put(b"/quiet/a", b"1"))
    batches = []

    async def signs() -> None:
        async for batch in store.watch(b"/quiet/", start_revision=2):
            batches.append(batch.next_revision)

    task = asyncio.create_task(signs())
    for i in range(50):
        last = await store.put(b"/loud/a", b"%d" % i)
    await eventually(lambda: batches and batches[-1] > last)
    # The other watch began at the same time and is checked as often.
    await asyncio.sleep(2 * QUICK.quiet_s)
    await store.compact(last)
    member.kill()
    await asyncio.to_thread(member.start)
    await insist(lambda: store.put(b"/quiet/a", b"2"))
    await eventually(lambda: values(events)[-1:] == [2])
    task.cancel()


# A store that is full, or not the one it was


async def test_a_full_store_is_ambiguous_for_writes_and_fine_for_the_rest(start_etcd, connect):
    store = await connect(start_etcd(*NIMBLE, "--quota-backend-bytes", str(8 << 20)).endpoint)
    lease = await store.lease_grant(60)
    async def fill() -> None:
        for i in range(100):
            await store.put(b"/%d" % i, b"x" * 1_000_000)

    with pytest.raises(OutOfSpace, match="alarm disarm"):
        await fill()
    with pytest.raises(OutOfSpace):
        await store.txn([], [Put(b"/a", b"")])
    with pytest.raises(OutOfSpace):
        await store.lease_grant(60)
    assert await store.lease_keepalive(lease.id) == lease.ttl_s
    assert (await store.status()).alarms == ["NOSPACE"]
    assert await store.get(b"/0") is not None
    await store.delete(b"/0")
    await store.lease_revoke(lease.id)


async def test_a_store_restored_from_a_backup_is_refused(start_etcd, connect, follow):
    member = start_etcd(*NIMBLE)
    store = await connect(member.endpoint, timeout_s=1)
    await store.put(b"/a", b"old")
    member.stop()
    shutil.copytree(member.folder / "data", member.folder / "backup")
    await asyncio.to_thread(member.start)
    for _ in range(20):
        revision = await insist(lambda: store.put(b"/a", b"new"))
    watching = asyncio.create_task(anext(store.watch(b"/", start_revision=revision + 1)))
    member.stop()
    shutil.rmtree(member.folder / "data")
    shutil.move(member.folder / "backup", member.folder / "data")
    await asyncio.to_thread(member.start)
    for call in (lambda: store.get(b"/a"), lambda: store.put(b"/a", b""), lambda: watching):
        with pytest.raises(WentBack, match="restored from a backup"):
            await insist(call)


async def test_another_cluster_behind_the_same_endpoint_is_refused(start_etcd, connect, tcp_proxy):
    one, two = start_etcd(*NIMBLE), start_etcd(*NIMBLE)
    proxy = await tcp_proxy(one.endpoint)
    store = await connect(proxy.endpoint)
    lease = await store.lease_grant(60)
    await store.lease_keepalive(lease.id)
    revision = await store.put(b"/a", b"")

    async def watch() -> None:
        async for _ in store.watch(b"/", start_revision=revision + 1):
            pass

    watching = asyncio.create_task(watch())
    proxy.target = two.endpoint
    proxy.cut()
    for call in (lambda: store.get(b"/a"), lambda: store.put(b"/a", b""), store.status):
        with pytest.raises(WentBack, match="works with cluster"):
            await insist(call)
    with pytest.raises(WentBack):
        await store.lease_keepalive(lease.id)
    with pytest.raises(WentBack):
        await watching


async def test_errors_are_store_errors_whatever_the_server_sends(connect, free_tcp_server):
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 100, b""):
        endpoint = await free_tcp_server(answer)
        with pytest.raises(StoreError):
            await connect(endpoint, timeout_s=0.3)


@pytest.fixture
async def free_tcp_server() -> AsyncIterator[Callable[[bytes], Awaitable[str]]]:
    servers: list[asyncio.Server] = []

    async def factory(answer: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer)
            writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return f"127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield factory
    for server in servers:
        server.close()
