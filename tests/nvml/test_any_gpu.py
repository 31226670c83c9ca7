"""The device suite: runs unchanged on the stand-in and on the GPUs of this machine. It changes nothing on a GPU."""

from __future__ import annotations

import asyncio
import resource
import time
from pathlib import Path
from typing import Any

from gangline.core.telemetry import Log
from gangline.nodeagent.gpudata import Partition
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.nvmlgpus import NvmlGpus


async def test_inventory(any_gpus: Any, gpus: NvmlGpus) -> None:
    facts = await gpus.facts()
    assert facts.gpus
    assert facts.driver.split(".")[0].isdecimal()
    assert len({g.uuid for g in facts.gpus}) == len(facts.gpus)
    assert len({len(g.links) for g in facts.gpus}) == 1
    for gpu in facts.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.memory_mib > 1000
        assert gpu.minor >= 0
        assert len(gpu.pci.split(":")) == 3
        assert gpu.numa >= -1


async def test_figures(any_gpus: Any, gpus: NvmlGpus) -> None:
    samples = await gpus.samples()
    assert samples.count == len(samples.gpus) > 0
    for s in samples.gpus:
        assert not s.lost
        assert s.memory_used is not None
        assert s.memory_total is not None
        assert 0 <= s.memory_used <= s.memory_total
        assert s.celsius is None or 0 < s.celsius < 120
        assert s.power_mw is None or 0 < s.power_mw < 3_000_000
        assert s.busy is None or 0 <= s.busy <= 100


async def test_events_are_waited_for(any_gpus: Any, gpus: NvmlGpus) -> None:
    await gpus.samples()
    await asyncio.sleep(1.2)
    assert (await gpus.samples()).events_age_s < 1.0


async def test_instances_are_looked_at(any_gpus: Any, gpus: NvmlGpus) -> None:
    facts = await gpus.facts()
    for gpu in facts.gpus:
        there = await gpus.partition(Partition(gpu.uuid))
        assert bool(there) <= gpu.mig_on


async def test_the_node_has_them_usable(any_gpus: Any, gpus: NvmlGpus, tmp_path: Path, log: Log) -> None:
    watch = GpuWatch("nvml", tmp_path, "boot", log)
    watch.backend = gpus
    await watch.open()
    assert watch.inventory.gpus
    assert all(g.healthy for g in watch.inventory.gpus)
    assert [g.index for g in watch.inventory.gpus] == list(range(len(watch.inventory.gpus)))
    assert all(r.state == "present" for r in watch.reports)
    assert watch.driver is None


async def test_reading_costs_little(any_gpus: Any, gpus: NvmlGpus, record_property: Any) -> None:
    """At the default of one reading in five seconds, less than a hundredth of a core for eight GPUs."""
    await gpus.samples()
    rounds, cpu_s, ours = 20, 0.0, resource.getrusage(resource.RUSAGE_SELF)
    begun = time.monotonic()
    for _ in range(rounds):
        samples = await gpus.samples()
        cpu_s += samples.cpu_s
    mine = resource.getrusage(resource.RUSAGE_SELF)
    each = cpu_s / rounds / len(samples.gpus)
    record_property("cpu_us_per_gpu_and_reading", round(each * 1e6, 1))
    record_property("agent_cpu_us_per_reading", round((mine.ru_utime + mine.ru_stime - ours.ru_utime - ours.ru_stime) / rounds * 1e6, 1))
    record_property("wall_ms_per_reading", round((time.monotonic() - begun) / rounds * 1e3, 2))
    assert each * len(samples.gpus) / 5.0 < 0.01
