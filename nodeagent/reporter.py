"""Writes the observed document when it has changed: one write in flight, the newest state wins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from gangline.core.model.documents import Observed, ObservedGang
from gangline.core.store.api import StoreError
from gangline.core.store.node import NameTaken, NodeStore
from gangline.core.telemetry import Log

#: steps of training are written at most this often; everything else at once
PROGRESS_S = 2.0
#: while ranks of a gang are starting, those that execute are reported together this often; the last one is reported at once
STARTS_S = 0.2
#: other changes within this time are written together; the first one after a quiet time is written at once, and so is what a barrier waits for
GATHER_S = 0.02
RETRY_S = 0.3


class Reporter:
    """`run` it; set `dirty` when the document may have changed."""

    def __init__(
        self, store: NodeStore, document: Callable[[], Observed | None], barriers: Callable[[], set[str]], dirty: asyncio.Event,
        written: Callable[[float], None], not_ours: Callable[[], None], log: Log,
    ) -> None:  # fmt: skip
        """`barriers` are the jobs whose ranks on other nodes wait for this one; `not_ours` is called when the registration is gone."""
        self._store = store
        self._document = document
        self._barriers = barriers
        self._dirty = dirty
        self._on_written = written
        self._not_ours = not_ours
        self._log = log
        self._sequence = 0
        self._last: Observed | None = None
        self._last_at = 0.0

    @property
    def settled(self) -> bool:
        """Whether everything that is worth reporting has been written."""
        now = self._document()
        return now is None or not self._differs(now)

    def again(self) -> None:
        """Write the whole state once more, changed or not: the node has just registered."""
        self._last = None
        self._dirty.set()

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            document = self._document()
            if document is None or not self._differs(document):
                continue
            wait_s = self._last_at + self._patience(document) - _now()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._something_urgent()
                document = self._document()
            if document is not None:
                await self._write(document)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_S):
                        await self._next_phase()
                self._dirty.set()

    async def _next_phase(self) -> None:
        """Wait until a gang that others wait for has come into another phase."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            waiting = self._barriers()
            if not waiting:
                continue
            document = self._document()
            if document is not None and self._last is not None and _phases(document, waiting) != _phases(self._last, waiting):
                return

    def _patience(self, document: Observed) -> float:
        """Return how long after the last write this one can wait."""
        if self._last is None or _urgent(document) != _urgent(self._last):
            return 0.0
        return PROGRESS_S if _without_steps(document) == _without_steps(self._last) else STARTS_S

    async def _something_urgent(self) -> None:
        """Wait until there is something that cannot wait."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            document = self._document()
            if document is not None and not self._patience(document):
                return

    def _differs(self, document: Observed) -> bool:
        return self._last is None or msgspec.structs.replace(document, sequence=self._last.sequence, at_ms=self._last.at_ms) != self._last

    async def _write(self, document: Observed) -> None:
        document = msgspec.structs.replace(document, sequence=self._sequence + 1)
        begun = _now()
        try:
            await self._store.write_observed(document)
        except NameTaken:
            self._not_ours()
            await asyncio.sleep(RETRY_S)
        except StoreError as e:
            self._log.warning("observed_not_written", message="it is tried again", error=str(e))
            await asyncio.sleep(RETRY_S)
            self._dirty.set()
        else:
            self._sequence += 1
            self._last, self._last_at = document, _now()
            self._on_written(self._last_at - begun)


def _now() -> float:
    """Return the seconds of the event loop's clock, which a simulation makes."""
    return asyncio.get_running_loop().time()


def _without_steps(document: Observed) -> tuple[Any, ...]:
    gangs: tuple[ObservedGang, ...] = tuple(msgspec.structs.replace(g, step=-1, paces=()) for g in document.gangs)
    return (document.desired_index, document.epoch, gangs, document.gpus, document.driver, document.checks)


def _phases(document: Observed, jobs: set[str]) -> list[tuple[str, int, str]]:
    return [(g.job, g.generation, g.phase) for g in document.gangs if g.job in jobs]


def _urgent(document: Observed) -> tuple[Any, ...]:
    """Return all but how far each gang's start and its training have come."""
    gangs = tuple(_urgent_gang(g) for g in document.gangs)
    return (document.desired_index, document.epoch, gangs, document.gpus, document.driver, document.checks)


def _urgent_gang(gang: ObservedGang) -> tuple[ObservedGang, bool]:
    over = tuple(r for r in gang.ranks if r.state not in ("starting", "running"))
    return (msgspec.structs.replace(gang, step=-1, paces=(), ranks=over), any(r.state == "starting" for r in gang.ranks))
