"""One scheduler process: follows the log, campaigns, leads when elected, and serves its folded state all the time.

    starting ──recover──▶ standby ──elected──▶ leader
                            ▲                    │ deposed, cut off, or the outcome of an append unknown:
                            └────── recover ◀────┘ what was folded may not be true, so it is folded again from the log
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

from gangline.core.model.codec import Frame, decode_frame, unpack
from gangline.core.model.state import State
from gangline.core.store import candidate
from gangline.core.store.api import Ambiguous, Store, StoreError
from gangline.core.store.archive import Archive, NotArchived
from gangline.core.store.election import Election, Leadership, announce
from gangline.core.store.fencing import Fenced
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log, Truncated
from gangline.core.store.node import SchedulerAddress
from gangline.core.store.recover import fold_next, recover
from gangline.core.store.snapshots import Snapshots
from gangline.core.telemetry import Log as Journal
from gangline.core.telemetry import Telemetry
from gangline.leader.clock import LogClock
from gangline.leader.commands import Accepted, Command
from gangline.leader.metrics import Metrics
from gangline.leader.service import Gone, NotLeader, Unavailable
from gangline.leader.snapshotter import Snapshotter
from gangline.leader.term import Deposed, Term

#: newest frames kept in memory for those who follow events
_TAIL_FRAMES = 4_096
_RETRY_S = 0.5


class Scheduler:
    """Implements `service.Service`."""

    def __init__(
        self, *, name: str, store: Store, keys: Keys, url: str, state_dir: Path, ttl_s: float, telemetry: Telemetry, journal: Journal,
        monotonic: Callable[[], float] = time.monotonic, wall_ms: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        """`url` is where the API of this scheduler is reached, `ttl_s` the time to live of a leadership; a simulation brings its own clocks."""
        self.name = name
        self.url = url
        self.role: Literal["starting", "standby", "leader"] = "starting"
        self.leader_name = ""
        self.leader_url = ""
        self.store_ok = False
        self.state = State()
        #: a leader's term, while this scheduler leads
        self.term: Term | None = None
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._journal = journal
        self._log = Log(store, keys)
        self._snapshots = Snapshots(store, keys)
        self._archive = Archive(state_dir / "archive")
        self._monotonic = monotonic
        self._clock = LogClock(monotonic, wall_ms)
        self._telemetry = telemetry
        self.metrics = Metrics(telemetry, lambda: self.state, self._clock.now_ms)
        self._tail: deque[Frame] = deque(maxlen=_TAIL_FRAMES)
        self._advanced = asyncio.Condition()
        self._followed_at = 0.0
        self._stopping = asyncio.Event()

    # ---------------------------------------------------------------- life

    async def run(self) -> None:
        """Serve until `stop`. Raises BadFrame or LogGap when the log cannot be followed: a person must look at it."""
        background = [
            asyncio.create_task(announce(self._store, self._keys, SchedulerAddress(self.name, self.url), ttl_s=self._ttl_s)),
            asyncio.create_task(self._watch_leader()),
            asyncio.create_task(self._probe_store()),
        ]
        try:
            while not self._stopping.is_set():
                await self._one_round()
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)

    async def stop(self) -> None:
        """Hand over and end."""
        self._stopping.set()
        if self.term is not None:
            self.term.stop()

    async def _one_round(self) -> None:
        """Recover, follow, lead; returns when it must begin again."""
        self.role = "starting"
        try:
            found = await recover(self._store, self._keys)
        except Ambiguous as e:
            self._journal.warning("store_unreachable", message=str(e))
            await asyncio.sleep(_RETRY_S)
            return
        self.state = found.state
        self._tail.clear()
        self.role = "standby"
        await self._publish()
        self._journal.info("standby", index=self.state.index, epoch=self.state.epoch)
        leadership = await self._stand_by(found.revision)
        if leadership is not None:
            await self._lead(leadership)

    async def _stand_by(self, revision: int) -> Leadership | None:
        """Fold the log as it grows until elected; None when the scheduler stops or must recover."""
        value = candidate.encode(candidate.this_process(self.name))
        election = Election(self._store, self._keys, self.name, value, self._ttl_s, clock=self._monotonic)
        campaign = asyncio.create_task(election.campaign())
        follow = asyncio.create_task(self._follow(revision))
        stop = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([campaign, follow, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (follow, stop, campaign):
                task.cancel()
            won, followed, _ = await asyncio.gather(campaign, follow, stop, return_exceptions=True)
        if isinstance(followed, (Ambiguous, Truncated)):
            self._journal.warning("following_again", index=self.state.index, message=str(followed))
        elif isinstance(followed, Exception):
            raise followed
        if isinstance(won, Leadership) and (self._stopping.is_set() or isinstance(followed, Exception)):
            await won.resign()
            return None
        if isinstance(won, Exception):
            raise won
        return won if isinstance(won, Leadership) else None

    async def _follow(self, revision: int) -> None:
        async for entries in self._log.follow(self.state.index + 1, revision + 1):
            for index, data, _ in entries:
                with self._telemetry.span("fold", index):
                    frame = fold_next(self.state, data)
                self._clock.saw(frame.at_ms)
                self._committed(frame)
            self.state.scratch.nobody_decides()
            self._followed_at = asyncio.get_running_loop().time()
            if entries:
                await self._publish()

    async def _lead(self, leadership: Leadership) -> None:
        try:
            await self._catch_up()
            term = self.term = Term(
                name=self.name, store=self._store, keys=self._keys, log=self._log, leadership=leadership, state=self.state,
                clock=self._clock, metrics=self.metrics, journal=self._journal, on_frame=self._lead_frame, monotonic=self._monotonic,
            )  # fmt: skip
            self.role, self.leader_name, self.leader_url = "leader", self.name, self.url
            snapshotter = Snapshotter(self._store, self._log, self._snapshots, self._archive, term, self._journal)
            if self._stopping.is_set():
                term.stop()
            keep = asyncio.create_task(snapshotter.run())
            try:
                await term.run()
            finally:
                keep.cancel()
                await asyncio.gather(keep, return_exceptions=True)
        except (Deposed, Fenced, Ambiguous, Truncated) as e:
            self._journal.warning("deposed", epoch=leadership.token, index=self.state.index, message=str(e))
        finally:
            self.role, self.term = "starting", None
            await leadership.resign()
            await self._publish()

    async def _catch_up(self) -> None:
        """Fold to the end of the log, which nobody else can extend any more."""
        async for _, data, _ in self._log.read(self.state.index + 1):
            self._committed(fold_next(self.state, data))

    # ---------------------------------------------------------------- what others see

    def now_ms(self) -> int:
        """Return log time."""
        return self._clock.now_ms()

    async def view(self, min_index: int = 0, wait_s: float = 0.0) -> State:
        """See Service."""
        if self.state.index < min_index:
            async with asyncio.timeout(wait_s), self._advanced:
                await self._advanced.wait_for(lambda: self.state.index >= min_index)
        while self.term is not None and not self.term.clean.is_set():
            await self.term.clean.wait()
        return self.state

    async def execute(self, commands: list[Command]) -> list[Accepted | Exception]:
        """See Service."""
        term = self.term
        if term is None:
            known = self.leader_name != self.name
            raise NotLeader(self.leader_name if known else "", self.leader_url if known else "")
        if term.out_of_space:
            raise Unavailable("the store has no space left and refuses writes; an operator must make space (docs/operating.md)")
        return await term.execute(commands)

    async def entries(self, first: int, *, follow: bool = False) -> AsyncIterator[Frame]:
        """See Service."""
        async for frame in self._history(first):
            yield frame
            first = frame.index + 1
        while follow:
            async with self._advanced:
                while not self._tail or self._tail[-1].index < first:
                    await self._advanced.wait()
            if self._tail[0].index > first:
                async for frame in self._history(first):
                    yield frame
                    first = frame.index + 1
                continue
            for frame in list(self._tail):
                if frame.index >= first:
                    yield frame
                    first = frame.index + 1

    async def _history(self, first: int) -> AsyncIterator[Frame]:
        """Yield what is committed now from `first` on: archive, store, memory, whichever has it."""
        last = self.state.index if self.term is None or self.term.clean.is_set() else self.state.index - 1
        first = max(first, 1)
        if self._tail and self._tail[0].index <= first:
            for frame in list(self._tail):
                if frame.index >= first:
                    yield frame
            return
        try:
            async for index, data, _ in self._log.read(first, last):
                yield decode_frame(data, index, None)
        except Truncated as e:
            if (self._archive.first or e.first_available) > first:
                raise Gone(e.first_available) from e
            try:
                for index, data in self._archive.read(first, e.first_available - 1):
                    yield decode_frame(data, index, None)
            except NotArchived as gap:
                raise Gone(gap.next or e.first_available) from gap
            async for frame in self._history(e.first_available):
                yield frame

    @property
    def lag_s(self) -> float:
        """See Service."""
        if self.role == "leader":
            return 0.0
        return max(0.0, asyncio.get_running_loop().time() - self._followed_at) if self._followed_at else 0.0

    # ---------------------------------------------------------------- shared steps

    def _lead_frame(self, frame: Frame) -> None:
        self._committed(frame)
        self._publish_soon()

    def _committed(self, frame: Frame) -> None:
        self._tail.append(frame)
        self.metrics.on_frame(frame)

    def _publish_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._publish())
        task.add_done_callback(lambda t: t.exception())

    async def _publish(self) -> None:
        async with self._advanced:
            self._advanced.notify_all()

    async def _watch_leader(self) -> None:
        """Know who leads and how to reach it."""
        election = Election(self._store, self._keys, self.name, b"", self._ttl_s, clock=self._monotonic)
        async for seen in election.observe():
            other = candidate.decode(seen.value) if seen.token else None
            self.leader_name = other.name if other is not None else ""
            self.leader_url = await self._address(self.leader_name)

    async def _address(self, name: str) -> str:
        if not name:
            return ""
        with contextlib.suppress(StoreError, ValueError):
            found = await self._store.get(self._keys.scheduler(name))
            if found is not None:
                return unpack(found.value, SchedulerAddress).url
        return ""

    async def _probe_store(self) -> None:
        """Know whether the store answers: agents that cannot reach it ask."""
        while True:
            try:
                async with asyncio.timeout(2.0):
                    await self._store.get(self._keys.leader)
                self.store_ok = True
                if not self.leader_url:  # it may have been elected before it said how it is reached
                    self.leader_url = await self._address(self.leader_name)
            except (StoreError, TimeoutError):
                self.store_ok = False
            await asyncio.sleep(1.0)
