"""What happened to each job, read from the log as it grows: as a standby would, by a watch, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import msgspec

from gangline.core.model import events as ev
from gangline.core.model.codec import decode_frame
from gangline.core.store.etcd import EtcdStore
from gangline.core.store.keys import Keys
from gangline.core.store.log import Log


class Life(msgspec.Struct):
    """One job. Times are log time in ms; 0: not yet."""

    priority: int
    queue: str
    submitted_ms: int
    #: its first placement, and the first time that all ranks ran
    placed_ms: int = 0
    running_ms: int = 0
    finished_ms: int = 0
    outcome: str = ""
    #: when it was first told why it waits
    deferred_ms: int = 0
    evictions: int = 0
    #: ranks of the present placement that have not started
    to_start: int = 0


class History:
    """Follows the log from its beginning. `wait` for what is to be in it."""

    def __init__(self, endpoint: str, cluster: str) -> None:
        """Begin to follow."""
        self.jobs: dict[str, Life] = {}
        self.finished = self.running = self.events = self.frames = 0
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._follow_in_thread, args=(endpoint, cluster), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Return when the condition holds, which is looked at after each entry. Raises TimeoutError, or what stopped the follower."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not condition():
                if self._failure is not None:
                    raise self._failure
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"not within {timeout_s:g} s: {what}")

    def _follow_in_thread(self, endpoint: str, cluster: str) -> None:
        with self._runner as runner:
            try:
                runner.run(self._follow(endpoint, cluster))
            except asyncio.CancelledError:
                pass
            except BaseException as e:  # noqa: BLE001 - whoever waits is told
                with self._changed:
                    self._failure = e
                    self._changed.notify_all()

    async def _follow(self, endpoint: str, cluster: str) -> None:
        self._task = asyncio.current_task()
        store = await EtcdStore.connect([endpoint])
        try:
            async for entries in Log(store, Keys(cluster)).follow(1, 1):
                with self._changed:
                    for index, data, _ in entries:
                        frame = decode_frame(data, index, None)
                        self.frames += 1
                        self.events += len(frame.events)
                        for event in frame.events:
                            self._take(event, frame.at_ms)
                    self._changed.notify_all()
        finally:
            await store.close()

    def _take(self, event: ev.LogEvent, at_ms: int) -> None:
        match event:
            case ev.JobSubmitted():
                self.jobs[event.job] = Life(event.spec.priority, event.spec.queue, at_ms)
            case ev.GangPlaced():
                life = self.jobs[event.job]
                life.placed_ms = life.placed_ms or at_ms
                life.to_start = sum(len(part.ranks) for part in event.parts)
            case ev.RanksStarted():
                life = self.jobs[event.job]
                life.to_start -= len(event.ranks)
                if life.to_start == 0:
                    self._runs(life, at_ms)
            case ev.GangFinished():
                life = self.jobs[event.job]
                if event.outcome == "succeeded":
                    self._runs(life, at_ms)  # of a very short one, the end may have been reported first
                life.finished_ms, life.outcome = at_ms, event.outcome
                self.finished += 1
            case ev.GangPreempting():
                self.jobs[event.job].evictions += 1
            case ev.GangsDeferred():
                for job in event.jobs:
                    self.jobs[job].deferred_ms = self.jobs[job].deferred_ms or at_ms

    def _runs(self, life: Life, at_ms: int) -> None:
        if not life.running_ms:
            self.running += 1
            life.running_ms = at_ms
