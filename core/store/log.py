"""The log in the store: one key for each frame, appended by the leader alone, read by all schedulers. DESIGN section 2.

An append is one transaction with three guards: the election key has the create revision that is our token, the frame's key does not exist,
and that of the frame before it does. So a deposed leader appends nothing, and the log has neither forks nor holes. When an append gets no
answer, the very same frame is sent again. The answer to that settles the first one too:

    applied                          written now, and once: had the first one been applied, the second guard would have failed
    refused, our frame is there      written by an earlier try
    refused, another's frame there   not written, and never will be
    refused, the token is stale      not written, and never will be: a create revision does not come back

Index + 1 is never tried before index is settled.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import NamedTuple, cast

from gangline.core.store.api import Compacted, Compare, Delete, Event, Get, KeyValue, OutOfSpace, Put, Store, StoreError, WatchBatch
from gangline.core.store.fencing import SETTLE_S, Fenced, Unsettled, fenced, guard, send_until_answered, write_fenced
from gangline.core.store.keys import Keys

__all__ = ["Entry", "Fenced", "Log", "LogGap", "Page", "Truncated", "Unsettled"]

#: a page aims at so many bytes, so that frames of any size can be read
_PAGE_BYTES = 4 << 20
_FIRST_PAGE = 200
_PAGE_FRAMES_MAX = 5_000

#: frames deleted in one transaction: a delete of a million keys would keep the store from answering
_DELETE_FRAMES = 1_000

_NONCE_BYTES_MIN = 8


#: one frame as it is stored, not yet decoded or checked: (index, bytes, store revision that wrote it)
Entry = tuple[int, bytes, int]


class Page(NamedTuple):
    """Successive entries. `revision` is when they were read, `more` tells that the log went on after them."""

    entries: list[Entry]
    revision: int
    more: bool


class LogGap(StoreError):
    """The log cannot be read on from `index`: the frame is missing although later ones exist, or something else is in its place."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(f"log frame {index}: {what}; reading stops here and nothing is skipped")
        self.index = index


class Truncated(StoreError):
    """The frames asked for were deleted after a snapshot: load the newest snapshot and go on after it.

    `first_available` is the first index that the store still has.
    """

    def __init__(self, wanted: int, first_available: int) -> None:
        super().__init__(f"log frame {wanted} is no longer in the store, which begins at {first_available}; load the newest snapshot")
        self.wanted = wanted
        self.first_available = first_available


class Log:
    """The frames of one cluster."""

    def __init__(self, store: Store, keys: Keys, *, settle_s: float = SETTLE_S) -> None:
        """`settle_s` bounds the time in which an append without an answer is settled."""
        self._store = store
        self._keys = keys
        self._settle_s = settle_s

    async def append(self, data: bytes, *, index: int, nonce: bytes, token: int) -> int:
        """Write the frame `data` at `index`, exactly once, and return the store revision that wrote it.

        `nonce` is the random part of `data` that no other frame has. Raises Fenced (not written, and never will be), Unsettled,
        TooLarge (not written), OutOfSpace (perhaps written: append the same frame again later, and nothing else before it). A cancelled
        append is as one that is Unsettled.
        """
        if len(nonce) < _NONCE_BYTES_MIN or nonce not in data:
            raise ValueError(f"append at index {index}: the frame does not contain its nonce of at least {_NONCE_BYTES_MIN} bytes")
        what = f"append at index {index}"
        key = self._keys.frame(index)
        compares = [guard(self._keys, token), Compare(key, "version", "==", 0)]
        if index > 1:  # truncation never takes the last frame: without it the store has lost something, and a hole would make that lasting
            compares.append(Compare(self._keys.frame(index - 1), "version", ">", 0))
        try:
            result = await send_until_answered(self._store, compares, [Put(key, data)], [Get(key), Get(self._keys.leader)], what, self._settle_s)
        except OutOfSpace:
            # Without space the store refuses a transaction with a put before it looks at the guards, but it still answers reads.
            stored = await self._store.get(key)
            if stored is None or stored.value != data:
                raise
            return stored.mod_revision
        if result.succeeded:
            return result.revision
        return await self._settle_refused(data, index, token, *result.gets)

    async def _settle_refused(self, data: bytes, index: int, token: int, stored: KeyValue | None, leader: KeyValue | None) -> int:
        if stored is not None and stored.value == data:
            return stored.mod_revision
        seen = leader.create_revision if leader else 0
        if stored is not None:
            raise Fenced(
                f"append at index {index} refused: another's frame is there since revision {stored.mod_revision}, leader key has create "
                f"revision {seen}, ours is {token}; stepping down", token, seen,
            )  # fmt: skip
        first = await self.first_index()
        if first is not None and first > index:
            # The successor has truncated the log meanwhile, and what was at our index with it.
            raise Unsettled(f"append at index {index}: the log begins at {first} now, so nobody can tell; stepping down")
        if seen == token:
            raise Fenced(f"append at index {index} refused: the frame before it is gone from the store; stepping down", token, seen)
        raise fenced(f"append at index {index}", token, seen)

    async def first_index(self) -> int | None:
        """Return the index of the first frame in the store, None when it has none."""
        found = await self._store.range(self._keys.log, limit=1, keys_only=True)
        return self._index(found.kvs[0].key, 1) if found.kvs else None

    async def page(self, first: int, *, limit: int = _FIRST_PAGE, revision: int = 0) -> Page:
        """Return at most `limit` entries from `first` on, as of `revision` (0: now). Raises LogGap, Truncated, Compacted."""
        found = await self._store.range(self._keys.log, start=self._keys.frame(first), limit=limit + 1, revision=revision)
        entries: list[Entry] = []
        for want, kv in enumerate(found.kvs[:limit], first):
            index = self._index(kv.key, want)
            if index != want:
                await self._raise_missing(want, index, found.revision)
            entries.append((index, kv.value, kv.mod_revision))
        return Page(entries, found.revision, len(found.kvs) > limit)

    async def pages(self, first: int, last: int | None = None) -> AsyncIterator[Page]:
        """Yield the log from `first` to `last` (None: to its end), at least one page, all as of one revision.

        When the store compacts that revision meanwhile, the pages after that are of a newer one; frames do not change, so nothing else does.
        Raises LogGap, Truncated.
        """
        revision, limit = 0, _FIRST_PAGE
        while True:
            if last is not None:
                limit = max(0, min(limit, last - first + 1))
            try:
                page = await self.page(first, limit=limit, revision=revision)
            except Compacted:
                if not revision:
                    raise
                revision = 0
                continue
            if last is not None and first + len(page.entries) > last:
                page = page._replace(more=False)
            yield page
            if not page.more:
                return
            first += len(page.entries)
            revision = page.revision
            size = sum(len(data) for _, data, _ in page.entries)
            limit = max(1, min(_PAGE_FRAMES_MAX, _PAGE_BYTES * len(page.entries) // max(1, size)))

    async def read(self, first: int, last: int | None = None) -> AsyncIterator[Entry]:
        """Yield the entries from `first` to `last` (None: to the end), in order. Raises LogGap, Truncated."""
        async for page in self.pages(first, last):
            for entry in page.entries:
                yield entry

    async def follow(self, first: int, revision: int) -> AsyncIterator[list[Entry]]:
        """Yield the entries from `first` on as they are appended, those of one answer together, from store revision `revision` on.

        An empty list is a sign of life: the log has been followed to its end. After compaction the log is listed again and the watch goes
        on behind the list; so nothing is skipped or repeated. Entries older than `first` are ignored, and so is truncation, unless it took
        what is still to come: Truncated. Raises LogGap for a frame that was never there or was overwritten.
        """
        want = first
        while True:
            try:
                # The contract of a watch is that closing its iterator ends it; both kinds of store use generators for that.
                watch = cast(AsyncGenerator[WatchBatch, None], self._store.watch(self._keys.log, start_revision=revision))
                async with contextlib.aclosing(watch):
                    async for batch in watch:
                        entries, whole = self._select(batch.events, want)
                        want += len(entries)
                        revision = batch.next_revision
                        if entries or not batch.events:
                            yield entries
                        if not whole:
                            break
                    else:
                        return
            except Compacted:
                pass
            # Old servers lose watch events after a compaction (etcd-io/etcd#17529), so a hole in a watch need not be one in the log.
            with contextlib.suppress(Compacted):
                async for page in self.pages(want):
                    want += len(page.entries)
                    revision = page.revision + 1
                    yield page.entries

    def _select(self, events: list[Event], want: int) -> tuple[list[Entry], bool]:
        """Return the entries from `want` on, and False when one is missing after them."""
        entries: list[Entry] = []
        for event in events:
            if event.kind == "delete":
                continue
            kv = event.kv
            index = self._index(kv.key, want)
            if kv.version != 1:
                raise LogGap(index, f"was overwritten at revision {kv.mod_revision}, which no scheduler does")
            if index > want:
                return entries, False
            if index == want:
                entries.append((index, kv.value, kv.mod_revision))
                want += 1
        return entries, True

    async def truncate(self, before: int, token: int) -> None:
        """Delete the frames with a lower index than `before`, the oldest first. They must be in a snapshot and archived.

        History stays: see `compact`. Raises Fenced, Unsettled; some frames may be deleted then, always the oldest.
        """
        first = await self.first_index()
        if first is None:
            return
        for start in range(first, before, _DELETE_FRAMES):
            end = min(start + _DELETE_FRAMES, before)
            delete = Delete(self._keys.frame(start), self._keys.frame(end))
            await write_fenced(self._store, self._keys, token, [delete], f"truncation of log {start} to {end - 1}", settle_s=self._settle_s)

    async def compact(self, index: int) -> None:
        """Forget the store's history from before the frame `index` was written: followers that have not come so far must list again.

        The space of truncated frames is free only once a frame appended after their truncation is given. The revision is that of a frame's
        own put, never one that deleted frames: compaction there makes old servers lose the delete (etcd-io/etcd#18089, #19179).
        Raises Truncated, LogGap when there is no such frame.
        """
        page = await self.page(index, limit=1)
        if not page.entries:
            raise LogGap(index, "does not exist, so history before it cannot be forgotten")
        await self._store.compact(page.entries[0][2])

    async def _raise_missing(self, want: int, found: int, revision: int) -> None:
        first = await self._store.range(self._keys.log, limit=1, keys_only=True, revision=revision)
        if first.kvs and self._index(first.kvs[0].key, want) < want:
            raise LogGap(want, f"is missing, the next one in the store is {found}")
        raise Truncated(want, found)

    def _index(self, key: bytes, want: int) -> int:
        digits = key[len(self._keys.log) :]
        if len(digits) != 16 or not digits.isdigit():
            raise LogGap(want, f"there is a key {key!r} among the frames, which no scheduler writes")
        return int(digits)
