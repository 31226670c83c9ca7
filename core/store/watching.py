"""How a watch survives everything that happens to one: the same rules over a real stream and over the modelled one.

A stream of the store may be cut, cancelled, refused, fall silent, repeat events, or split one revision over several messages.
`follow` turns any number of such streams into one sequence without a gap and without a repetition:

1. A stream starts at the last delivered revision + 1. The revision in a message's header says nothing about what was delivered.
2. Events below that revision are repetitions and are dropped. Of a split message only the whole revisions are passed on.
3. A stream that ends for any reason but compaction or refusal is opened again.
4. A quiet stream is checked: a linearizable read tells whether the range has changed since. If not, the watch has caught up,
   which is passed on as an empty batch, and a later stream starts from there. If it has, and the stream does not deliver it
   soon, the stream is given up and another opened from the last delivered revision.
   Progress notifications are not used: up to etcd 3.4.24 and 3.5.7 they overtake events (etcd-io/etcd#15220).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Literal, NamedTuple, Protocol

from gangline.core.store.api import Ambiguous, Definite, Event, WatchBatch

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

#: The checks of a quiet watch may take this part of the store's time; a big range is therefore checked less often.
_PART_OF_CHECKS = 0.02


class Timing(NamedTuple):
    """When a quiet watch is checked."""

    #: seconds without an event until the range is read
    quiet_s: float = 10.0
    #: seconds that a stream has for delivering what that read showed
    behind_s: float = 2.0


class Message(NamedTuple):
    """What one read of a stream gave."""

    events: list[Event]
    #: False when the rest of the last event's revision may be in the next message
    whole: bool = True


class Stream(Protocol):
    """One watch stream of the store."""

    async def read(self) -> Message:
        """Return the next message. Raises Compacted, Definite (refused), Ambiguous (anything else that ended it)."""

    def close(self) -> None:
        """Give the stream up; a pending `read` ends."""


class Glance(NamedTuple):
    """What a read of a range showed at `revision`."""

    revision: int
    #: whether a key of the range was written since the revision that was asked about
    written: bool
    #: number of keys in the range
    keys: int


class Source(Protocol):
    """What `follow` needs of a store. All reads are linearizable."""

    async def open_watch(self, key: bytes, range_end: bytes, start_revision: int) -> Stream:
        """Start a stream and return once the store has accepted it. Raises as `Stream.read`."""

    async def glance(self, key: bytes, range_end: bytes, since: int) -> Glance:
        """Tell whether anything in the range has a modification revision of `since` or newer."""

    async def count_at(self, key: bytes, range_end: bytes, revision: int) -> int | None:
        """Return the number of keys in the range at a revision, None when it is compacted."""


async def follow(
    source: Source, key: bytes, range_end: bytes, start_revision: int, timing: Timing
) -> AsyncGenerator[WatchBatch, None]:
    """Yield every change in the range from `start_revision` on. Raises Compacted, Definite and WentBack; ends when closed."""
    if start_revision < 1:
        raise Definite(f"watch of {key!r} from revision {start_revision}: start at the revision of a list + 1, at least 1")
    follower = _Follower(source, key, range_end, start_revision, timing)
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async with contextlib.aclosing(follower.run_stream()) as batches:
                async for batch in batches:
                    pause_s = _FIRST_PAUSE_S
                    yield batch
        except Ambiguous:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Follower:
    """Where a watch is, over all of its streams."""

    def __init__(self, source: Source, key: bytes, range_end: bytes, start_revision: int, timing: Timing) -> None:
        self.source = source
        self.key = key
        self.range_end = range_end
        self.timing = timing
        #: everything below was delivered
        self.next_revision = start_revision
        #: nothing happened from `next_revision` up to here, as a read has shown; where the next stream starts
        self.resume_revision = start_revision
        #: number of keys in the range just before `resume_revision`, None until it was read
        self.keys: int | None = None
        #: events of the newest revision of a split message
        self.held: list[Event] = []

    async def run_stream(self) -> AsyncGenerator[WatchBatch, None]:
        """Yield from one stream until it ends, which always raises."""
        # An older event on the new stream was not asked for, so it cannot be a late one.
        self.next_revision = self.resume_revision
        self.held = []
        stream = await self.source.open_watch(self.key, self.range_end, self.resume_revision)
        reading: asyncio.Future[Message] | None = None
        try:
            loop = asyncio.get_running_loop()
            behind = False
            check_at = loop.time() + self.timing.quiet_s
            while True:
                reading = reading or asyncio.ensure_future(stream.read())
                await asyncio.wait((reading,), timeout=max(0.0, check_at - loop.time()))
                if reading.done():
                    message, reading = reading.result(), None
                    batch = self._take(message)
                    if batch:
                        yield batch
                        behind = False
                        check_at = loop.time() + self.timing.quiet_s
                        continue
                if loop.time() < check_at:
                    continue
                if behind:
                    raise Ambiguous(f"watch of {self.key!r}: the stream is silent about changes after {self.next_revision - 1}")
                started = loop.time()
                verdict = await self._check()
                if verdict is False:
                    behind = True
                    check_at = loop.time() + self.timing.behind_s
                    continue
                check_at = loop.time() + max(self.timing.quiet_s, (loop.time() - started) / _PART_OF_CHECKS)
                if verdict is not None and not (reading and reading.done()):
                    self._caught_up(*verdict)
                    yield WatchBatch([], self.resume_revision)
        finally:
            if reading:
                reading.cancel()
            stream.close()

    def _take(self, message: Message) -> WatchBatch | None:
        """Return the new and whole revisions of a message."""
        events = self.held + [event for event in message.events if event.kv.mod_revision >= self.next_revision]
        self.held = []
        if events and not message.whole:
            # A later revision in the same message proves that the one before it is complete. So a huge message is passed on
            # piece by piece, and no more than one revision is ever held.
            newest = events[-1].kv.mod_revision
            self.held = [event for event in events if event.kv.mod_revision == newest]
            events = events[: len(events) - len(self.held)]
        if not events:
            return None
        self.next_revision = events[-1].kv.mod_revision + 1
        self.resume_revision = max(self.resume_revision, self.next_revision)
        self.keys = None
        return WatchBatch(events, self.resume_revision)

    async def _check(self) -> tuple[int, int | None] | Literal[False] | None:
        """Return (revision, keys) when nothing has happened up to there, False when that is not so, None when nobody knows."""
        try:
            seen = await self.source.glance(self.key, self.range_end, self.resume_revision)
            if seen.revision < self.resume_revision:
                # The watch starts in the future; the keys just before `resume_revision` are those of now only if it starts next.
                return self.resume_revision - 1, seen.keys if seen.revision + 1 == self.resume_revision else None
            if seen.written:
                return False
            # A deleted key is seen by its absence only.
            if self.keys is None:
                self.keys = await self.source.count_at(self.key, self.range_end, self.resume_revision - 1)
            return (seen.revision, seen.keys) if seen.keys == self.keys else False
        except Ambiguous:
            return None

    def _caught_up(self, revision: int, keys: int | None) -> None:
        self.resume_revision = revision + 1
        self.keys = keys
