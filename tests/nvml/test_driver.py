"""What becomes of the node when GPUs or their driver fail, on the stand-in for NVML: rows 64 to 68 of the catalogue of failures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gangline.core.telemetry import Log
from gangline.nodeagent import gpudriver
from gangline.nodeagent.gpudriver import DriverError
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.nvmlgpus import NvmlGpus

pytestmark = pytest.mark.timeout(60)


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0.01)


Watching = Callable[..., Awaitable[GpuWatch]]


@pytest.fixture
async def watching(tmp_path: Path, log: Log) -> AsyncIterator[Watching]:
    """Open a watch on the stand-in, as an agent does that starts; each call is another agent with the same memory."""
    tasks: list[asyncio.Task[None]] = []

    async def open_watch(boot: str = "boot-1", deadline_s: float = 3.0) -> GpuWatch:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        watch = GpuWatch("nvml", tmp_path, boot, log)
        watch.backend = NvmlGpus(watch.happened, log, interval_s=0.1, samples_s=deadline_s, facts_s=10.0, backoff_s=0.1)
        await watch.open()
        tasks.append(asyncio.create_task(watch.run()))
        return watch

    yield open_watch
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def eight(stub: Any) -> None:
    for i in range(8):
        stub.add(numa=i // 4)


def usable(watch: GpuWatch) -> list[int]:
    return [g.index for g in watch.inventory.gpus if g.healthy]


async def test_what_is_registered(stub: Any, watching: Watching) -> None:
    eight(stub)
    stub.add("A100", "NVIDIA A100-SXM4-80GB", numa=1)
    stub.add("L40S", "NVIDIA L40S", numa=1)
    watch = await watching()
    gpus = watch.inventory.gpus
    assert [(g.index, g.model, g.mig, g.links) for g in gpus] == [
        *((i, "H100", "H100", (i // 4,)) for i in range(8)), (8, "A100", "A100", (1,)), (9, "L40S", "", (1,)),
    ]  # fmt: skip
    assert (gpus[5].uuid, gpus[5].pci, gpus[5].numa, gpus[5].memory_mib) == (stub.uuid(5), "00000000:15:00.0", 1, 81_559)
    assert watch.reports == ()


async def test_bridged_pairs_and_switches_are_groups(stub: Any, gpus: NvmlGpus) -> None:
    for i in range(8):
        stub.add(numa=i // 4, switch=i // 4)
        stub.gpus[i].bridged_to = (i ^ 1) + 1
    assert [g.links for g in (await gpus.facts()).gpus] == [(i // 4, i // 2) for i in range(8)]


async def test_row_64_a_gpu_that_falls_off_the_bus(stub: Any, watching: Watching) -> None:
    eight(stub)
    watch = await watching()
    stub.gpus[3].lost = 1
    stub.event(3, data=79)
    await until(lambda: usable(watch) == [0, 1, 2, 4, 5, 6, 7])
    await until(lambda: watch.reports and watch.reports[0].xids)
    (report,) = watch.reports
    assert (report.uuid, report.state, report.xids[0].xid, report.xids[0].count) == (stub.uuid(3), "lost", 79, 1)
    assert watch.driver is None
    # NVML does not name it any more when it is initialised again, and the agent that does this has another process; its place is kept.
    watch = await watching()
    await until(lambda: watch.reports and watch.reports[0].state == "lost")
    assert usable(watch) == [0, 1, 2, 4, 5, 6, 7]
    # A reset brings it back.
    stub.gpus[3].lost = 0
    watch = await watching()
    await until(lambda: len(usable(watch)) == 8)
    assert watch.reports[0].xids[0].count == 1
    # The next boot counts anew.
    watch = await watching("boot-2")
    assert watch.reports == ()


async def test_a_gpu_that_was_reset_comes_back_by_itself(stub: Any, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.nodeagent.gpus.AGAIN_S", 0.3)
    eight(stub)
    watch = await watching()
    stub.gpus[3].present = 0
    await until(lambda: usable(watch) == [0, 1, 2, 4, 5, 6, 7])
    assert watch.reports[0].state == "missing"
    stub.gpus[3].present = 1
    await until(lambda: len(usable(watch)) == 8)


async def test_rows_65_and_66_what_is_counted_and_measured(stub: Any, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.nodeagent.gpustate.SLOWED_S", 0.3)
    monkeypatch.setattr("gangline.nodeagent.gpus.COUNTS_S", 0.0)
    eight(stub)
    watch = await watching()
    for _ in range(3):
        stub.event(1, data=13)
    stub.event(1, data=94)
    gpu = stub.gpus[2]
    gpu.ecc_uncorrected, gpu.ecc_corrected, gpu.needs, gpu.reasons = 2, 70, 4, 0x40 | 0x4 | 0x1
    gpu.remapped[:] = [1, 2, 1, 0]
    gpu.nvlink_errors, gpu.links_up = 123, gpu.links_up & ~0b101
    await until(lambda: len(watch.reports) == 2 and watch.reports[1].slowed and len(watch.reports[0].xids) == 2)
    first, second = watch.reports
    assert [(x.xid, x.count) for x in first.xids] == [(13, 3), (94, 1)]
    assert (second.ecc_uncorrected, second.ecc_corrected, second.needs, second.slowed) == (2, 70, "drain_and_reset", ("hw_thermal",))
    assert (second.remapped_corrected, second.remapped_uncorrected, second.remap_pending, second.remap_failed) == (1, 2, True, False)
    assert (second.nvlink_errors, second.nvlinks_down) == (123, 2)
    # What an Xid means is the scheduler's to say; here nothing has become unusable.
    assert len(usable(watch)) == 8
    gpu.reasons = 0
    await until(lambda: not watch.reports[1].slowed)


async def test_nvlink_errors_of_drivers_that_count_per_link(stub: Any, gpus: NvmlGpus) -> None:
    stub.add()
    stub.gpus[0].links_counted_each, stub.gpus[0].nvlink_errors = 1, 7
    await gpus.facts()
    assert (await gpus.samples()).gpus[0].nvlink_errors == 7


async def test_figures_that_a_gpu_does_not_have(stub: Any, gpus: NvmlGpus) -> None:
    stub.add("L40S", "NVIDIA L40S")
    stub.gpus[0].has_ecc, stub.gpus[0].links, stub.gpus[0].processes = 0, 0, 2
    stub.gpus[0].pids[:2], stub.gpus[0].bytes[:2] = [11, 22], [1 << 30, 2 << 30]
    await gpus.facts()
    (s,) = (await gpus.samples()).gpus
    assert (s.ecc_corrected, s.remapped, s.nvlink_errors, s.nvlinks) == (None, None, None, 0)
    assert s.processes == ((11, 1 << 30), (22, 2 << 30))


@pytest.mark.parametrize("where", ["nvmlDeviceGetPowerUsage", "*"])
async def test_row_67_a_driver_that_hangs(stub: Any, watching: Watching, where: str) -> None:
    eight(stub)
    watch = await watching()
    longest, begun = 0.0, time.monotonic()
    stub.state.hang = where.encode()
    while watch.driver is None:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        longest = max(longest, time.monotonic() - before)
    assert time.monotonic() - begun < 30
    assert longest < 1.5, "the event loop, which renews the lease, was held up: the driver is waited for twice as long"
    assert watch.driver.state == "silent"
    assert usable(watch) == []
    assert {r.state for r in watch.reports} == {"stale"}
    assert len(watch.inventory.gpus) == 8
    stub.state.hang = b""
    await until(lambda: len(usable(watch)) == 8)
    assert watch.driver is None
    assert watch.reports == ()
    assert watch.backend.restarts >= 1


async def test_row_67_an_agent_that_starts_while_the_driver_hangs(stub: Any, watching: Watching) -> None:
    """It has its GPUs at once, and does not wait for the driver before it renews the lease of its node."""
    eight(stub)
    await watching()
    stub.state.hang = b"*"
    begun = time.monotonic()
    watch = await watching()
    assert time.monotonic() - begun < 3.0
    assert len(watch.inventory.gpus) == 8
    assert watch.minors() == {i: i for i in range(8)}
    await until(lambda: watch.driver is not None)
    assert usable(watch) == []


async def test_row_67_waiting_for_events_hangs(stub: Any, watching: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gangline.nodeagent.nvmlgpus.EVENTS_S", 0.5)
    eight(stub)
    watch = await watching()
    stub.state.hang = b"nvmlEventSetWait_v2"
    await until(lambda: watch.driver is not None)
    assert watch.driver is not None
    assert "wait for events" in watch.driver.message
    stub.state.hang = b""
    await until(lambda: watch.driver is None)


async def test_row_67_a_library_that_crashes(stub: Any, watching: Watching) -> None:
    eight(stub)
    watch = await watching()
    stub.state.crash = b"nvmlDeviceGetTemperature"
    await until(lambda: watch.driver is not None)
    assert watch.driver is not None
    assert (watch.driver.state, "SIGSEGV" in watch.driver.message) == ("failed", True)
    assert usable(watch) == []
    stub.state.crash = b""
    await until(lambda: len(usable(watch)) == 8)


async def test_the_driver_vanishes(stub: Any, watching: Watching) -> None:
    """As when it is unloaded: GPUs that were there are unusable, they are not gone."""
    eight(stub)
    await watching()
    stub.state.no_driver = 1
    watch = await watching()
    await until(lambda: watch.driver is not None)
    assert watch.driver is not None
    assert (watch.driver.state, watch.driver.message) == ("failed", "NVML: Driver Not Loaded")
    assert (len(watch.inventory.gpus), usable(watch)) == (8, [])


async def test_no_driver_and_no_library_and_no_gpu(stub: Any, watching: Watching, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watch = await watching()
    assert (watch.inventory.gpus, watch.inventory.reason) == ((), "the driver names no GPU")
    stub.state.no_driver = 1
    watch = await watching("boot-2")
    assert (watch.inventory.gpus, watch.inventory.reason) == ((), "NVML: Driver Not Loaded")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "nowhere"))
    watch = await watching("boot-3")
    assert (watch.inventory.gpus, watch.driver, watch.reports) == ((), None, ())
    assert "Not Found" in watch.inventory.reason


async def test_row_68_another_order_after_a_reboot(stub: Any, watching: Watching) -> None:
    eight(stub)
    watch = await watching()
    before = [g.uuid for g in watch.inventory.gpus]
    stub.swap(0, 7)
    # In the same boot ranks may be running: every GPU keeps its index.
    watch = await watching()
    await until(lambda: watch.facts)
    assert [g.uuid for g in watch.inventory.gpus] == before
    watch = await watching("boot-2")
    assert [g.uuid for g in watch.inventory.gpus] == [before[7], *before[1:7], before[0]]
    assert usable(watch) == list(range(8))


async def test_row_68_fewer_gpus_after_a_reboot(stub: Any, watching: Watching) -> None:
    eight(stub)
    watch = await watching()
    before = [g.uuid for g in watch.inventory.gpus]
    stub.gpus[2].present = 0
    watch = await watching("boot-2")
    assert [g.uuid for g in watch.inventory.gpus] == [*before[:2], *before[3:], before[2]]
    assert usable(watch) == list(range(7))
    assert [(r.uuid, r.state) for r in watch.reports] == [(before[2], "missing")]
    # Another card takes its place: then nothing is missing.
    new = stub.add()
    watch = await watching("boot-3")
    assert [g.uuid for g in watch.inventory.gpus] == [*before[:2], *before[3:], stub.uuid(new)]
    assert watch.reports == ()


async def test_processes_that_cannot_be_killed_are_not_piled_up(stub: Any, events: list[Any], log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped instead of hanging in the kernel, and the kill kept from them: what matters is that they do not go."""
    stub.add()
    held: list[int] = []
    monkeypatch.setattr(gpudriver.os, "kill", lambda pid, number: held.append(pid))
    backend = NvmlGpus(events.append, log, samples_s=0.3, backoff_s=0.0)
    stub.state.hang = b"*"
    try:
        for _ in range(gpudriver.UNDEAD_MAX):
            with pytest.raises(DriverError, match="has not answered"):
                await backend.samples()
        with pytest.raises(DriverError, match="cannot be killed: boot the node"):
            await backend.samples()
        assert len(held) == gpudriver.UNDEAD_MAX
        assert backend.pause_s > 10
    finally:
        monkeypatch.undo()
        for pid in held:
            os.kill(pid, signal.SIGKILL)
