"""The Store in memory: clients of a modelled etcd cluster, with switches for its bad moments.

One `MemoryCluster` is shared by any number of `MemoryStore`s, one for each process that is played. The clients keep the contract
whatever the switches do, by the same rules as on a real cluster: `answers.py` and `watching.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal, TypeVar

from gangline.core.store.answers import HighWater, repeat_read
from gangline.core.store.api import (
    Ambiguous,
    Compacted,
    Compare,
    Corrupt,
    Definite,
    Delete,
    KeyValue,
    Lease,
    LeaseNotFound,
    Op,
    OutOfSpace,
    Put,
    RangeResult,
    Status,
    StoreError,
    TxnResult,
    WatchBatch,
    prefix_end,
)
from gangline.core.store.memory_cluster import Mvcc
from gangline.core.store.watching import Glance, Message, Timing, follow

T = TypeVar("T")

#: What becomes of a write: answered; never applied; applied, but the answer is lost; applied a while after the error.
Fate = Literal["answered", "lost", "applied", "late"]

_POLLS = 20


class Faults:
    """Switches for what can go wrong; all off. Probabilities are of one request or message, drawn from `rng`."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        #: quorum lost: nothing is answered
        self.unavailable = False
        #: names of clients that reach nothing
        self.partitioned: set[str] = set()
        #: of those whose requests do not arrive, although they hear what the cluster says; and of those that are heard and hear nothing
        self.mute: set[str] = set()
        self.deaf: set[str] = set()
        #: fates of the next writes, in order; used before the probability below
        self.next_writes: deque[Fate] = deque()
        #: probability that a write is ambiguous: lost, applied or late
        self.ambiguous_write = 0.0
        #: when a late write is applied
        self.late_write_s = 0.05
        #: probability that a read is answered from `stale_revisions` ago
        self.stale_read = 0.0
        self.stale_revisions = 1
        #: the NOSPACE and CORRUPT alarms
        self.no_space = False
        self.corrupt = False
        #: probability that a watch message comes twice, has older events before it, is split, or is the end of the stream instead
        self.watch_repeat = 0.0
        self.watch_older = 0.0
        self.watch_split = 0.0
        self.watch_cancel = 0.0
        #: probability that a new watch never delivers anything
        self.watch_silent = 0.0
        #: delay of every watch message
        self.watch_late_s = 0.0

    def happens(self, probability: float) -> bool:
        """Draw once. An impossible event draws nothing, so that a switch that is off changes no sequence."""
        return probability > 0 and self.rng.random() < probability

    def fate_of_write(self) -> Fate:
        """Return what becomes of the next write."""
        if self.next_writes:
            return self.next_writes.popleft()
        if self.happens(self.ambiguous_write):
            return self.rng.choice(("lost", "applied", "late"))
        return "answered"


class MemoryCluster:
    """The cluster behind the clients.

    `clock` gives monotonic seconds. Leases expire when a client asks anything, while a watch waits, and in `tick`.
    `latency` gives the seconds that each request and each answer take. All clients must be in one event loop.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        faults: Faults | None = None,
        latency: Callable[[], float] = lambda: 0.0,
        min_lease_ttl_s: float = 2.0,
        cluster_id: int = 0x6A46,
    ) -> None:
        self.mvcc = Mvcc(clock, min_lease_ttl_s, cluster_id)
        self.faults = faults or Faults()
        self.latency = latency
        #: no request is taken any more, as if each client had closed its store
        self.closed = False
        self._streams: list[_Stream] = []
        self.mvcc.listeners.append(self._wake)

    def tick(self) -> None:
        """Expire the leases whose time is over; call it after moving a clock of your own."""
        self.mvcc.expire()

    def elect(self) -> None:
        """Have a new leader: the raft term rises, and every lease begins anew."""
        self.mvcc.raft_term += 1
        self.mvcc.renew_all_leases()

    def go_back(self, revision: int) -> None:
        """Be restored from a backup taken at `revision`. Raises Compacted, Definite."""
        self.mvcc.go_back(revision)

    def cut_watches(self) -> None:
        """End all watch streams that are open."""
        for stream in list(self._streams):
            stream.close()

    def silence_watches(self) -> None:
        """Let the watch streams that are open deliver nothing any more, without ending."""
        for stream in self._streams:
            stream.silent = True

    def _wake(self) -> None:
        for stream in self._streams:
            stream.woken.set()


class MemoryStore:
    """One client of a `MemoryCluster`; `name` is how `Faults.partitioned` calls it."""

    def __init__(
        self,
        cluster: MemoryCluster,
        name: str = "",
        *,
        timeout_s: float = 5.0,
        timing: Timing = Timing(),  # noqa: B008 - immutable
    ) -> None:
        self.cluster = cluster
        self.name = name
        self._timeout_s = timeout_s
        self._timing = timing
        self._seen = HighWater()
        self._streams: list[_Stream] = []
        self._closed = False

    @property
    def hears(self) -> bool:
        """Whether what the cluster says arrives here."""
        faults = self.cluster.faults
        return not faults.unavailable and self.name not in faults.partitioned and self.name not in faults.deaf

    @property
    def heard(self) -> bool:
        """Whether requests of this client arrive."""
        faults = self.cluster.faults
        return not faults.unavailable and self.name not in faults.partitioned and self.name not in faults.mute

    def disconnect(self) -> None:
        """Let the cluster see that this client is gone: its streams end."""
        for stream in list(self._streams):
            stream.close()

    async def get(self, key: bytes, *, revision: int = 0) -> KeyValue | None:
        """See Store."""
        kvs, _ = await self._read(key, b"", revision)
        return kvs[0] if kvs else None

    async def range(
        self, prefix: bytes, *, start: bytes = b"", limit: int = 0, revision: int = 0, keys_only: bool = False
    ) -> RangeResult:
        """See Store."""
        kvs, at = await self._read(max(start, prefix), prefix_end(prefix), revision, limit)
        if keys_only:
            kvs = [KeyValue(kv.key, b"", kv.create_revision, kv.mod_revision, kv.version, kv.lease) for kv in kvs]
        return RangeResult(kvs, revision or at)

    async def txn(self, compares: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """See Store."""
        needs_space = any(isinstance(op, Put) for op in (*success, *failure))
        return await self._write("txn", lambda: self.cluster.mvcc.txn(compares, success, failure), needs_space)

    async def put(self, key: bytes, value: bytes, *, lease: int = 0) -> int:
        """See Store."""
        result = await self._write("put", lambda: self.cluster.mvcc.txn((), (Put(key, value, lease),), ()), True)
        return result.revision

    async def delete(self, key: bytes, *, range_end: bytes = b"") -> int:
        """See Store."""
        result = await self._write("delete", lambda: self.cluster.mvcc.txn((), (Delete(key, range_end),), ()))
        return result.revision

    async def watch(
        self, prefix: bytes, *, start_revision: int, exact: bool = False
    ) -> AsyncGenerator[WatchBatch, None]:
        """See Store."""
        end = b"" if exact else prefix_end(prefix)
        try:
            async with contextlib.aclosing(follow(self, prefix, end, start_revision, self._timing)) as batches:
                async for batch in batches:
                    yield batch
        except Definite:
            if not self._closed:
                raise

    async def lease_grant(self, ttl_s: float) -> Lease:
        """See Store."""
        return await self._write("lease grant", lambda: self.cluster.mvcc.grant(ttl_s), True)

    async def lease_keepalive(self, lease: int) -> float:
        """See Store."""

        async def once(timeout_s: float) -> float:
            await self._reach("lease keepalive", timeout_s)
            ttl_s = self.cluster.mvcc.keepalive(lease)
            await self._reach("lease keepalive", timeout_s, answer=True)
            return ttl_s

        return await repeat_read(once, self._timeout_s)

    async def lease_revoke(self, lease: int) -> None:
        """See Store."""
        try:
            await self._write("lease revoke", lambda: self.cluster.mvcc.revoke(lease))
        except LeaseNotFound:
            return

    async def compact(self, revision: int) -> None:
        """See Store."""
        try:
            await self._write("compact", lambda: self._compact(revision))
        except Compacted:
            return

    async def status(self) -> Status:
        """See Store."""
        await self._reach("status", self._timeout_s)
        await self._reach("status", self._timeout_s, answer=True)
        mvcc, faults = self.cluster.mvcc, self.cluster.faults
        size = sum(len(kv.key) + len(kv.value) for kv in mvcc.read(b"", b"\0"))
        alarms = ["NOSPACE"] * faults.no_space + ["CORRUPT"] * faults.corrupt
        return Status("memory", size, size, mvcc.cluster_id, mvcc.revision, mvcc.raft_term, alarms)

    async def close(self) -> None:
        """See Store."""
        self._closed = True
        self.disconnect()

    async def open_watch(self, key: bytes, range_end: bytes, start_revision: int) -> _Stream:
        """For `watching.follow`."""
        await self._reach(f"watch {key!r}", self._timeout_s)
        return _Stream(self, key, range_end, start_revision)

    async def glance(self, key: bytes, range_end: bytes, since: int) -> Glance:
        """For `watching.follow`."""
        kvs, at = await self._read(key, range_end, 0)
        return Glance(at, any(kv.mod_revision >= since for kv in kvs), len(kvs))

    async def count_at(self, key: bytes, range_end: bytes, revision: int) -> int | None:
        """For `watching.follow`."""
        if revision < 1:
            return 0
        try:
            return len((await self._read(key, range_end, revision))[0])
        except Compacted:
            return None

    async def _read(self, key: bytes, range_end: bytes, revision: int, limit: int = 0) -> tuple[list[KeyValue], int]:
        """Return the keys and the store's revision."""

        async def once(timeout_s: float) -> tuple[list[KeyValue], int]:
            mark = self._seen.mark()
            await self._reach(f"read {key!r}", timeout_s)
            mvcc, faults = self.cluster.mvcc, self.cluster.faults
            at = mvcc.revision
            if faults.happens(faults.stale_read):
                at = max(1, mvcc.compacted, at - faults.stale_revisions)
            kvs = list(itertools.islice(mvcc.read(key, range_end, revision or at), limit or None))
            term = mvcc.raft_term
            await self._reach(f"read {key!r}", timeout_s, answer=True)
            self._seen.check(mark, mvcc.cluster_id, at, term)
            return kvs, at

        return await repeat_read(once, self._timeout_s)

    async def _write(self, what: str, apply: Callable[[], T], needs_space: bool = False) -> T:
        """Run `apply` on the cluster once, unless the switches say otherwise."""
        mark = self._seen.mark()
        await self._reach(what, self._timeout_s)
        mvcc, faults = self.cluster.mvcc, self.cluster.faults
        if faults.corrupt:
            raise Corrupt(f"{what}: corrupt cluster; stop writing, compare the members' data and restore from a backup")
        if faults.no_space and needs_space:
            raise OutOfSpace(f"{what}: database space exceeded; compact, defragment, then disarm the alarm")
        fate = faults.fate_of_write()
        if fate == "late":
            asyncio.get_running_loop().call_later(faults.late_write_s, _apply_late, apply)
        elif fate != "lost":
            result = apply()
            at, term = mvcc.revision, mvcc.raft_term
            if fate == "answered":
                await self._reach(what, self._timeout_s, answer=True)
                self._seen.check(mark, mvcc.cluster_id, at, term)
                return result
        raise Ambiguous(f"{what}: the connection was lost while waiting for the answer")

    async def _reach(self, what: str, timeout_s: float, *, answer: bool = False) -> None:
        """Travel one way, from client to cluster or with the `answer`. Raises Ambiguous when nothing gets through within `timeout_s`."""
        if self._closed or self.cluster.closed:
            raise Definite(f"{what}: this store is closed")
        await asyncio.sleep(self.cluster.latency())
        for _ in range(_POLLS):
            if self.hears if answer else self.heard:
                break
            await asyncio.sleep(timeout_s / _POLLS)
        else:
            raise Ambiguous(f"{what}: no answer within {timeout_s} s")
        self.cluster.mvcc.expire()

    def _compact(self, revision: int) -> None:
        for stream in self.cluster._streams:
            stream.skip_quiet()
        self.cluster.mvcc.compact(revision)


class _Stream:
    """One watch stream: catches up from the history, then waits for more."""

    def __init__(self, store: MemoryStore, key: bytes, range_end: bytes, start_revision: int) -> None:
        self.woken = asyncio.Event()
        self._store = store
        self._cluster = store.cluster
        self._range = key, range_end
        self._next = start_revision
        self._ready: deque[Message] = deque()
        self._closed = False
        faults = self._cluster.faults
        self.silent = faults.happens(faults.watch_silent)
        self._cluster._streams.append(self)
        store._streams.append(self)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._cluster._streams.remove(self)
            self._store._streams.remove(self)
            self.woken.set()

    def skip_quiet(self) -> None:
        """Leave behind what is of no interest: a watch that has caught up is not overtaken by compaction."""
        if self._next >= self._cluster.mvcc.compacted:
            events, goes_on = self._cluster.mvcc.events(*self._range, self._next)
            if not events:
                self._next = goes_on

    async def read(self) -> Message:
        while not self._ready:
            self.woken.clear()
            if self._closed:
                raise Ambiguous(f"watch {self._range[0]!r}: the stream has ended")
            if not self.silent and self._store.hears:
                self._cluster.mvcc.expire()
                events, self._next = self._cluster.mvcc.events(*self._range, self._next)
                if events:
                    await self._deliver(Message(events))
                    continue
            await self._wait()
        return self._ready.popleft()

    async def _wait(self) -> None:
        """Wait until something was written, or might have been: a lease expires, a partition heals."""
        pause_s = self._cluster.mvcc.seconds_to_expiry() if self._store.hears else self._store._timeout_s / _POLLS
        try:
            async with asyncio.timeout(pause_s if pause_s is None else max(pause_s, 0.01)):
                await self.woken.wait()
        except TimeoutError:
            pass

    async def _deliver(self, message: Message) -> None:
        """Queue a message, with whatever the switches do to it."""
        faults = self._cluster.faults
        if faults.happens(faults.watch_cancel):
            self.close()
            return
        delay_s = faults.watch_late_s + self._cluster.latency()
        if delay_s:
            await asyncio.sleep(delay_s)
        events = message.events
        if faults.happens(faults.watch_older):
            older, _ = self._cluster.mvcc.events(*self._range, self._cluster.mvcc.compacted)
            self._ready.append(Message([event for event in older if event.kv.mod_revision < events[0].kv.mod_revision]))
        if faults.happens(faults.watch_split):
            cut = faults.rng.randrange(len(events) + 1)
            self._ready.append(Message(events[:cut], whole=False))
            self._ready.append(Message(events[cut:]))
        else:
            self._ready.append(message)
        if faults.happens(faults.watch_repeat):
            self._ready.append(message)


def _apply_late(apply: Callable[[], object]) -> None:
    try:
        apply()
    except StoreError:
        # Refused: as a write that nobody waits for any more would be.
        return
