"""Keeps the log in the store short: snapshot, archive what it covers, delete that, compact.

Nothing here is urgent, so a failure is noted and tried again later; the term goes on.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gangline.core.model.state import State
from gangline.core.model.statecodec import dump_state
from gangline.core.store.api import Store, StoreError
from gangline.core.store.archive import Archive
from gangline.core.store.election import Leadership
from gangline.core.store.fencing import Fenced
from gangline.core.store.log import Log
from gangline.core.store.snapshots import Snapshots
from gangline.core.telemetry import Log as Journal

#: a snapshot after so many entries or events; the tail that a restart must fold is bounded by both
EVERY_ENTRIES = 5_000
EVERY_EVENTS = 50_000
#: entries that stay in the store behind the snapshot, for followers that are a little behind
KEPT_ENTRIES = 2_000
#: looks so often whether it is time
_LOOK_S = 5.0
_ARCHIVE_ENTRIES = 1_000


class _Term(Protocol):
    state: State
    leadership: Leadership
    clean: asyncio.Event
    events_written: int


class Snapshotter:
    """Runs beside a leader's term."""

    def __init__(self, store: Store, log: Log, snapshots: Snapshots, archive: Archive, term: _Term, journal: Journal) -> None:
        self._store = store
        self._log = log
        self._snapshots = snapshots
        self._archive = archive
        self._term = term
        self._journal = journal
        self._newest = 0
        self._events_then = 0

    async def run(self) -> None:
        """Look from time to time whether the log has grown enough, for ever."""
        found = None
        while found is None:
            try:
                found = await self._snapshots.latest()
                self._newest = found[0] if found is not None else 0
                break
            except StoreError:
                await asyncio.sleep(_LOOK_S)
        while True:
            await asyncio.sleep(_LOOK_S)
            entries = self._term.state.index - self._newest
            if entries >= EVERY_ENTRIES or self._term.events_written - self._events_then >= EVERY_EVENTS:
                try:
                    await self.once()
                except Fenced:
                    return
                except StoreError as e:
                    self._journal.warning("snapshot_failed", index=self._term.state.index, message=str(e))

    async def once(self) -> int:
        """Take a snapshot now and shorten the log behind it. Returns the index that it covers. Raises StoreError."""
        await self._term.clean.wait()
        state, token = self._term.state, self._term.leadership.token
        index, data, events = state.index, dump_state(state), self._term.events_written
        await self._snapshots.save(data, index, token)
        self._newest, self._events_then = index, events
        oldest = await self._snapshots.prune(token=token)
        # If the newest snapshot should prove damaged, the one before it and the log after that still give everything.
        keep_from = min(index - KEPT_ENTRIES, oldest + 1 if oldest < index else 1)
        if keep_from > 1:
            await self._archive_before(keep_from)
            await self._log.truncate(keep_from, token)
            # Behind every follower that is not hopelessly late; those list again.
            await self._log.compact(keep_from)
        self._journal.info("snapshot", index=index, bytes=len(data), kept_from=max(1, keep_from))
        return index

    async def _archive_before(self, before: int) -> None:
        first = await self._log.first_index()
        if first is None or first >= before:
            return
        frames: list[tuple[int, bytes]] = []
        async for index, data, _ in self._log.read(first, before - 1):
            frames.append((index, data))
            if len(frames) >= _ARCHIVE_ENTRIES:
                await asyncio.to_thread(self._archive.write, frames)
                frames = []
        if frames:
            await asyncio.to_thread(self._archive.write, frames)
