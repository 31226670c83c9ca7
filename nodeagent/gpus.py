"""Keeps looking at the GPUs of this node: what there is, how it is, and what it tells by itself.

    driver ── facts, samples, events ──▶ GpuWatch ── inventory ──▶ registration, gangs
                                                  ── reports ────▶ observed document
                                                  ── figures ────▶ /metrics

What is defined:

*   No library or no driver, and no GPU known: the node has none, and the reason is on its health page.
*   The driver does not answer (deadline missed, crashed, or its events hang): its process is ended and started again, later each time. Until it
    answers, the node keeps its GPUs with `healthy: false`, nothing new is prepared on them, and what runs goes on. The same goes for GPUs that
    were known when there is no driver any more.
*   A GPU is lost or not named any more: unhealthy, in its place. The driver is initialised again after a minute, then more rarely, until it is
    back.
*   Another order, or fewer: see `gpustate.settle`.

An agent that is started again takes the GPUs that it remembers of this boot, so that it need not wait for the driver to be alive again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from gangline.core.model.documents import DriverReport, Gpu, GpuReport
from gangline.core.telemetry import Log
from gangline.nodeagent.devices import Inventory, Kind
from gangline.nodeagent.gpudata import Facts, GpuFacts, GpuSample, Happened, Instance, Partition, Samples
from gangline.nodeagent.gpudriver import DriverError, DriverState
from gangline.nodeagent.gpustate import Memory, State, booted, count_xid, report, settle, slowdowns, usable, without_counts

MEMORY_FILE = "gpus.json"
#: how long an agent without a memory of its GPUs waits for the driver before it registers without them
FIRST_LOOK_S = 10.0
#: seconds until the driver is initialised again while a GPU is lost or missing; doubled each time, up to the second
AGAIN_S, AGAIN_MOST_S = 60.0, 3600.0
#: figures that only count are reported so often at most
COUNTS_S = 10.0
#: reading takes at most this part of the time: with many GPUs, or a slow driver, it is done more rarely
PART = 0.05


class Backend(Protocol):
    """Where GPUs are asked about: `nvmlgpus.NvmlGpus` or `simgpus.SimulatedGpus`. What asks raises DriverError."""

    @property
    def interval_s(self) -> float:
        """How often to ask."""
        ...

    @property
    def state(self) -> DriverState:
        """How the driver is."""
        ...

    @property
    def message(self) -> str:
        """Why it does not answer."""
        ...

    @property
    def since_ms(self) -> int:
        """Since when it is in this state, by the wall clock."""
        ...

    @property
    def restarts(self) -> int:
        """How often asking was begun anew."""
        ...

    @property
    def pause_s(self) -> float:
        """Seconds until it is worth asking again."""
        ...

    async def facts(self) -> Facts:
        """Return what GPUs there are."""
        ...

    async def samples(self) -> Samples:
        """Return all figures."""
        ...

    async def partition(self, ask: Partition) -> tuple[Instance, ...]:
        """Make, unmake and look at MIG instances."""
        ...

    def renew(self) -> None:
        """See GPUs as they are now, from the next question on."""

    def close(self) -> None:
        """Let go of the driver."""


class GpuWatch:
    """The GPUs of this node as they are now. Lives on one event loop."""

    def __init__(self, kind: Kind, folder: Path, boot_id: str, log: Log) -> None:
        """Remember in `folder`. Give it its `backend` and its `changed` before it is opened."""
        self._kind: Kind = kind
        self._path = folder / MEMORY_FILE
        self._log = log
        self._memory = self._remembered(boot_id)
        self.backend: Backend
        #: called when the inventory or a report has changed: with whether it was the inventory
        self.changed: Callable[[bool], None] = lambda inventory: None
        self.inventory = Inventory(kind=kind)
        self.reports: tuple[GpuReport, ...] = ()
        self.driver: DriverReport | None = None
        #: the last figures by UUID, and what the driver says of each GPU
        self.samples: dict[str, GpuSample] = {}
        self.facts: dict[str, GpuFacts] = {}
        #: processor seconds that reading has taken, and how often it was done
        self.cpu_s = 0.0
        self.reads = 0
        self._version = ""
        #: GPUs that the driver counts, -1: they have to be looked at afresh; and how many of them it cannot reach
        self._count = -1
        self._unreachable = 0
        #: why it has not told what GPUs there are, "not asked yet" to begin with
        self._unknown = "the driver has not been asked yet"
        self._lost: set[str] = set()
        self._slowed: dict[str, dict[str, float]] = {}
        self._renew_at, self._renew_s = 0.0, AGAIN_S
        self._reported_at = 0.0
        self._wake = asyncio.Event()

    def counted(self, uuid: str, xid: int) -> int:
        """Return how many Xids of a kind of a GPU are known."""
        return self._memory.xids.get(uuid, {}).get(xid, (0, 0))[0]

    def happened(self, event: Happened) -> None:
        """Take in an event of the driver."""
        if event.kind == "xid" and event.uuid:
            count_xid(self._memory, event.uuid, event.xid, event.at_ms)
            self._save()
            self._log.warning("xid", gpu=event.uuid, xid=event.xid)
            if not self._unknown:  # else the first look, which is about to end, tells of it
                self._report()
        self._wake.set()  # an ECC error or a lost GPU shows in the figures

    def minors(self) -> dict[int, int]:
        """Return N of /dev/nvidiaN by index of the GPU, of those of which it is known, also from an earlier agent."""
        known = self._memory.minors
        return {g.index: known[g.uuid] for g in self.inventory.gpus if known.get(g.uuid, -1) >= 0}

    async def open(self) -> None:
        """Take the GPUs that are remembered of this boot; without such, wait a little for the driver."""
        if self._memory.gpus and self._same_boot:
            self.inventory = Inventory(self._memory.gpus, self._kind)
            self.reports, self.driver = self._memory.reports, self._memory.driver
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self.look()
                return
        self._take(self._memory.gpus)

    def only(self, uuids: set[str]) -> None:
        """Forget all GPUs but these: simulated ones are those of the command line."""
        self._memory.gpus = tuple(g for g in self._memory.gpus if g.uuid in uuids)
        self._memory.reports = tuple(r for r in self._memory.reports if r.uuid in uuids)

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                begun = time.monotonic()
                await self.look()
                took = time.monotonic() - begun
                await self._pause(max(self.backend.interval_s, self.backend.pause_s, took / PART if self.backend.state == "answers" else 0.0))
        finally:
            self.backend.close()

    async def look(self) -> None:
        """Look once, whatever comes of it."""
        self._renew_for_the_lost(time.monotonic())
        try:
            samples = await self.backend.samples() if self._count >= 0 else None
            if samples is None or samples.count != self._count:
                if samples is not None:
                    self.backend.renew()
                self._learn(await self.backend.facts())
                samples = await self.backend.samples()
                self._count = samples.count
            self._measure(samples)
        except DriverError as e:
            self._count = -1  # who comes back may not be who went
            if not self.facts:
                self._unknown = str(e)
            if self.backend.state == "answers":
                self._log.warning("gpus_not_read", message=str(e))
        self._take(self._memory.gpus)

    def _renew_for_the_lost(self, now: float) -> None:
        """Have the driver initialised again, which finds GPUs that have been reset or put back; it need not be often."""
        if not self._lost and all(g.uuid in self.facts for g in self._memory.gpus):
            self._renew_at, self._renew_s = now + AGAIN_S, AGAIN_S
        elif self.facts and now >= self._renew_at:
            self._renew_s = min(AGAIN_MOST_S, 2 * self._renew_s)
            self._renew_at = now + self._renew_s
            self.backend.renew()
            self._count = -1

    async def _pause(self, seconds: float) -> None:
        """Wait, less when something has happened; but not at once, since a broken GPU may tell of it again and again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.sleep(min(seconds, 0.2))
                await self._wake.wait()
        self._wake.clear()

    # ---------------------------------------------------------------- what is made of it

    @property
    def _same_boot(self) -> bool:
        return self._settled or not self._booted

    @property
    def _answers(self) -> bool:
        return self.backend.state == "answers" and not self._unknown

    def _state_of(self, uuid: str) -> State:
        if not self._answers:
            return "stale"
        if uuid in self._lost or (uuid not in self.facts and self._unreachable):
            return "lost"
        return "present" if uuid in self.facts else "missing"

    def _learn(self, facts: Facts) -> None:
        self.facts = {f.uuid: f for f in facts.gpus}
        self._version, self._unreachable, self._unknown = facts.driver, facts.unreachable, ""
        gpus = settle(self._memory.gpus, facts.gpus, same_boot=self._same_boot)
        self._settled = True
        self._saved = False
        for f in facts.gpus:
            self._memory.minors[f.uuid] = f.minor
            self._memory.nvlinks[f.uuid] = max(self._memory.nvlinks.get(f.uuid, 0), f.nvlinks)
        if [(g.uuid, g.index) for g in gpus] != [(g.uuid, g.index) for g in self._memory.gpus] and self._memory.gpus:
            self._log.warning("gpus_changed", before=[g.uuid for g in self._memory.gpus], now=[g.uuid for g in gpus])
        self._memory.gpus = gpus

    def _measure(self, samples: Samples) -> None:
        now = time.monotonic()
        self.cpu_s += samples.cpu_s
        self.reads += 1
        lost = {s.uuid for s in samples.gpus if s.lost}
        for s in samples.gpus:
            self.samples[s.uuid] = msgspec.structs.replace(self.samples[s.uuid], lost=True) if s.lost and s.uuid in self.samples else s
            self._slowed[s.uuid] = slowdowns(self._slowed.get(s.uuid, {}), s.reasons, now)
        for uuid in lost - self._lost:
            self._log.error("gpu_lost", gpu=uuid, message="the driver cannot reach it any more")
        self._lost = lost

    def _take(self, gpus: tuple[Gpu, ...]) -> None:
        """Tell of what has changed."""
        gpus = usable(gpus, set(self.facts), self._lost, answers=self._answers)
        reason = "" if gpus else self.backend.message or self._unknown or "the driver names no GPU"
        inventory = Inventory(gpus, self._kind, reason)
        if gpus != self._memory.gpus or not self._saved:
            self._memory.gpus = gpus
            self._save()
        self._report()
        if inventory != self.inventory:
            self.inventory = inventory
            self.changed(True)

    def _report(self) -> None:
        """Make the reports anew."""
        now, back, driver = time.monotonic(), self.backend, None
        if not self._answers and self._memory.gpus:
            driver = DriverReport("silent" if back.state == "silent" else "failed", back.message or self._unknown, back.since_ms, back.restarts)
        found = (
            report(g, self._state_of(g.uuid), self.samples.get(g.uuid), self._memory, self._slowed.get(g.uuid, {}), now)
            for g in self._memory.gpus
        )
        reports = tuple(r for r in found if r is not None)
        if (reports, driver) == (self.reports, self.driver):
            return
        only_counts = driver == self.driver and without_counts(reports) == without_counts(self.reports)
        if only_counts and now < self._reported_at + COUNTS_S:
            return
        self.reports, self.driver, self._reported_at = reports, driver, now
        self._memory.reports, self._memory.driver = reports, driver
        self._save()
        self.changed(False)

    # ---------------------------------------------------------------- what is remembered

    def _remembered(self, boot_id: str) -> Memory:
        memory = Memory()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            memory = msgspec.json.decode(self._path.read_bytes(), type=Memory)
        #: the host was booted since, so that indices follow the driver, once
        self._booted = memory.boot_id != boot_id
        self._settled = False
        self._saved = False
        if memory.kind not in ("", self._kind):
            memory = Memory()  # simulated before, or the other way round
        memory.kind = self._kind
        return booted(memory, boot_id)

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(self._memory))
            os.replace(new, self._path)
            self._saved = True
        except OSError as e:
            self._log.error("gpus_not_remembered", message="the next agent has to count anew", error=e)
