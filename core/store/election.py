"""Who leads: one key, created by one candidate, bound to that candidate's lease. DESIGN section 3.

    key absent ── create, guarded by create_revision == 0 ──▶ ours ── keepalive every ttl/4, key read after each ──▶ ours …
        ▲                                                       │
        └── lease expired or revoked, key deleted by hand ──────┘

The create revision of the key is the fencing token: it guards every write of the leader (`fencing.py`), so the lease is never what keeps
two leaders from writing. It only decides how soon there is a new one, and by `Leadership.valid` the old one stops deciding before that:

    sent ─────────────── ttl − margin: valid ends ──── ttl: the lease can have expired
     └ the last keepalive that was answered, counted from when it was *sent*

`valid` compares a clock with a number. So after anything that held the process up it is right at once, before any task has run.
A process whose host was suspended wakes with a clock that stood still; its writes are fenced all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NamedTuple, cast

from gangline.core.model.codec import pack
from gangline.core.store import candidate
from gangline.core.store.api import (
    Ambiguous,
    Compacted,
    Compare,
    Definite,
    Delete,
    Get,
    KeyValue,
    LeaseNotFound,
    Put,
    Store,
    StoreError,
    WatchBatch,
)
from gangline.core.store.fencing import guard, send_until_answered
from gangline.core.store.keys import Keys
from gangline.core.store.node import SchedulerAddress

#: part of the time to live that is left when a leader stops deciding: for what is under way, and for clocks that differ in speed
_MARGIN = 1 / 3

#: keepalives in one time to live; after one that failed the next follows sooner
_KEEPALIVES = 4
_RETRIES = 20

#: a waiting candidate reads the key so often in one time to live: old servers can lose the delete of a watch
_RECHECKS = 2

_PAUSE_S = 0.5
_REVOKE_TRIES = 3


class Seen(NamedTuple):
    """Who leads. `token` is the create revision of the election key, 0 (and an empty value) when nobody does."""

    value: bytes
    token: int


class Leadership:
    """One term as leader, from its election to its end."""

    def __init__(self, store: Store, keys: Keys, token: int, lease: int, ttl_s: float, sent_at: float, clock: Callable[[], float]) -> None:
        """Use `Election.campaign`. `sent_at` is when the lease was last asked for, by `clock`."""
        #: fencing token, and the epoch of the log entries that are written under it
        self.token = token
        self.lease = lease
        #: by `clock`: no decision after it
        self.deadline = 0.0
        #: set once the term is over for good; `reason` then says why
        self.lost = asyncio.Event()
        self.reason = ""
        self._store = store
        self._keys = keys
        self._clock = clock
        self._ttl_s = ttl_s
        self._expires_at = 0.0
        self._renewed(sent_at, ttl_s)
        self._task = asyncio.create_task(self._keep_alive(), name="leadership-keepalive")

    def valid(self) -> bool:
        """Tell whether this process may decide now. It can become valid again after a pause, as long as it is not `lost`."""
        return not self.lost.is_set() and self._clock() < self.deadline

    async def resign(self) -> None:
        """End the term now: the key goes with the lease, and another candidate can take over at once. Never raises StoreError.

        Without an answer of the store the lease ends by itself after its time.
        """
        self._lose("resigned")
        self._task.cancel()
        await asyncio.wait({self._task})
        within_s = self._ttl_s / _KEEPALIVES
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(within_s):
                # Somebody may have put the key by hand and so unbound it from the lease; it would then stay for ever.
                await self._store.txn([guard(self._keys, self.token)], [Delete(self._keys.leader)])
        await _revoke(self._store, self.lease, within_s)

    async def _keep_alive(self) -> None:
        try:
            await self._renew_until_lost()
        finally:
            self._lose("the keepalive task ended")

    async def _renew_until_lost(self) -> None:
        every_s = self._ttl_s / _KEEPALIVES
        pause_s = every_s
        while not self.lost.is_set():
            await asyncio.sleep(pause_s)
            sent_at = self._clock()
            try:
                async with asyncio.timeout(every_s):
                    ttl_s = await self._store.lease_keepalive(self.lease)
                    # Old servers acknowledge a revoked lease, and the key can be deleted by hand.
                    key = await self._store.get(self._keys.leader)
            except LeaseNotFound as e:
                self._lose(f"lease {self.lease:x} is gone: {e}")
            except (StoreError, TimeoutError) as e:
                pause_s = self._ttl_s / _RETRIES
                if self._clock() >= self._expires_at:
                    self._lose(f"lease {self.lease:x} was not renewed in {self._ttl_s:.1f} s: {e or 'no answer'}")
            else:
                pause_s = every_s
                if key is None or (key.create_revision, key.lease) != (self.token, self.lease):
                    now = f"has create revision {key.create_revision} and lease {key.lease:x}" if key else "is gone"
                    self._lose(f"the leader key {now}, ours are {self.token} and {self.lease:x}")
                else:
                    self._renewed(sent_at, ttl_s)

    def _renewed(self, sent_at: float, ttl_s: float) -> None:
        self.deadline = sent_at + ttl_s * (1 - _MARGIN)
        self._expires_at = sent_at + ttl_s

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()


class Election:
    """One candidate."""

    def __init__(self, store: Store, keys: Keys, name: str, value: bytes, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`value` is what the election key says of us, best `candidate.encode(candidate.this_process(name))`: then a restart is quick.

        `clock` gives seconds and never goes back.
        """
        self._store = store
        self._keys = keys
        self._value = value
        self._ttl_s = ttl_s
        self._clock = clock
        me = candidate.decode(value)
        self._me = me if me is not None and me.name == name else None

    async def campaign(self) -> Leadership:
        """Wait until this candidate leads. Goes on through outages of the store; raises other StoreErrors than Ambiguous."""
        while True:
            try:
                key, revision = await self._read()
                if key is None:
                    leadership = await self._try()
                    if leadership is not None:
                        return leadership
                elif not await self._take_from_dead_self(key):
                    await self._changed(revision)
            except (Ambiguous, LeaseNotFound):
                await asyncio.sleep(_PAUSE_S)

    async def observe(self) -> AsyncIterator[Seen]:
        """Yield who leads now, and then each change; what was true only in between two reads is left out."""
        last: Seen | None = None
        while True:
            try:
                key, revision = await self._read()
                seen = Seen(key.value, key.create_revision) if key else Seen(b"", 0)
                if seen != last:
                    last = seen
                    yield seen
                await self._changed(revision)
            except Ambiguous:
                await asyncio.sleep(_PAUSE_S)

    async def _read(self) -> tuple[KeyValue | None, int]:
        """Return the election key and the revision at which it was read."""
        found = await self._store.range(self._keys.leader, limit=1)
        key = found.kvs[0] if found.kvs and found.kvs[0].key == self._keys.leader else None
        return key, found.revision

    async def _changed(self, revision: int) -> None:
        """Return when the key has changed after `revision`, or when it is time to read it again."""
        watch = cast(AsyncGenerator[WatchBatch, None], self._store.watch(self._keys.leader, start_revision=revision + 1, exact=True))
        with contextlib.suppress(TimeoutError, Compacted):
            async with asyncio.timeout(self._ttl_s / _RECHECKS), contextlib.aclosing(watch):
                async for batch in watch:
                    if batch.events:
                        return

    async def _try(self) -> Leadership | None:
        """Create the key; None when another was faster."""
        sent_at = self._clock()
        lease = await self._store.lease_grant(self._ttl_s)
        try:
            token = await self._create(lease.id)
        except BaseException:
            # Cancelled, or nobody knows: the key must not stay behind for a whole time to live with nobody at work.
            await _revoke(self._store, lease.id, self._ttl_s / _KEEPALIVES)
            raise
        if not token:
            await _revoke(self._store, lease.id, self._ttl_s / _KEEPALIVES)
            return None
        return Leadership(self._store, self._keys, token, lease.id, lease.ttl_s, sent_at, self._clock)

    async def _create(self, lease: int) -> int:
        """Return the token, 0 when another has the key. No other candidate has our lease, so it tells whose key it is."""
        result = await send_until_answered(
            self._store, [Compare(self._keys.leader, "create_revision", "==", 0)], [Put(self._keys.leader, self._value, lease)],
            [Get(self._keys.leader)], "election", self._ttl_s / 2,
        )  # fmt: skip
        if result.succeeded:
            return result.revision
        key = result.gets[0]
        return key.create_revision if key is not None and key.lease == lease else 0

    async def _take_from_dead_self(self, key: KeyValue) -> bool:
        """Delete the key of an earlier process of this very scheduler that is provably gone. Its lease would only keep all others waiting."""
        other = candidate.decode(key.value)
        if self._me is None or other is None or other.name != self._me.name or not candidate.is_gone(other, self._me):
            return False
        await self._store.txn([Compare(self._keys.leader, "create_revision", "==", key.create_revision)], [Delete(self._keys.leader)])
        return True


async def announce(store: Store, keys: Keys, address: SchedulerAddress, *, ttl_s: float) -> None:
    """Keep the address of a scheduler in the store, under a lease, until cancelled; then take it back at once.

    Goes on through outages of the store, and puts the key again when it was lost. Raises other StoreErrors than those.
    """
    key = keys.scheduler(address.name)
    while True:
        lease = 0
        try:
            granted = await store.lease_grant(ttl_s)
            lease = granted.id
            await store.put(key, pack(address), lease=lease)
            while True:
                await asyncio.sleep(granted.ttl_s / _KEEPALIVES)
                await _keep_announced(store, key, lease, granted.ttl_s)
        except (Ambiguous, LeaseNotFound):
            await asyncio.sleep(_PAUSE_S)
        finally:
            if lease:
                await _revoke(store, lease, ttl_s / _KEEPALIVES)


async def _keep_announced(store: Store, key: bytes, lease: int, ttl_s: float) -> None:
    """Renew once. Raises LeaseNotFound when the key is no longer ours, Ambiguous after a whole time to live without an answer."""
    deadline = asyncio.get_running_loop().time() + ttl_s
    while True:
        try:
            await store.lease_keepalive(lease)
            found = await store.get(key)
            break
        except Ambiguous:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(_PAUSE_S)
    if found is None or found.lease != lease:
        raise LeaseNotFound(f"the announcement {key!r} is not bound to lease {lease:x} any more")


async def _revoke(store: Store, lease: int, within_s: float) -> None:
    with contextlib.suppress(TimeoutError, Definite):
        async with asyncio.timeout(within_s):
            for _ in range(_REVOKE_TRIES):
                with contextlib.suppress(StoreError):
                    await store.lease_revoke(lease)
                    return
