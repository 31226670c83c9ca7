"""The figures of the GPUs on the agent's /metrics. A scrape reads what was sampled last: it asks no driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gangline.core.model.documents import Gpu, GpuReport
from gangline.core.telemetry import Labels, Telemetry
from gangline.nodeagent.gpudata import GpuSample
from gangline.nodeagent.gpus import GpuWatch

#: name, description, unit, figure of one GPU in that unit (None: it has no such figure)
_GAUGES: tuple[tuple[str, str, str, Callable[[GpuSample], float | None]], ...] = (
    ("busy", "Part of the time in which something ran on the GPU.", "ratio", lambda s: _scaled(s.busy, 100)),
    ("memory.busy", "Part of the time in which its memory was read or written.", "ratio", lambda s: _scaled(s.memory_busy, 100)),
    ("memory.used", "Memory in use.", "By", lambda s: s.memory_used),
    ("memory.total", "Memory.", "By", lambda s: s.memory_total),
    ("power", "Power that it draws.", "W", lambda s: _scaled(s.power_mw, 1000)),
    ("power.limit", "Power that it may draw.", "W", lambda s: _scaled(s.power_limit_mw, 1000)),
    ("temperature", "Temperature.", "Cel", lambda s: s.celsius),
    ("memory.temperature", "Temperature of its memory.", "Cel", lambda s: s.memory_celsius),
    ("clock.sm.mhz", "Clock of its processors.", "", lambda s: s.sm_mhz),
    ("clock.memory.mhz", "Clock of its memory.", "", lambda s: s.memory_mhz),
    ("nvlinks.up", "NVLinks that are up.", "", lambda s: s.nvlinks),
    ("processes", "Processes that compute on it.", "", lambda s: len(s.processes)),
    ("remap.pending", "1 if a row of its memory waits for a reset.", "", lambda s: None if s.remapped is None else s.remapped[2]),
)
_SUMS: tuple[tuple[str, str, str, Callable[[GpuSample], float | None]], ...] = (
    ("energy", "Energy since the driver was loaded.", "J", lambda s: _scaled(s.energy_mj, 1000)),
    ("nvlink.errors", "Errors on its NVLinks since the driver was loaded.", "", lambda s: s.nvlink_errors),
    ("pcie.replays", "Packets that were sent again on PCIe.", "", lambda s: s.pcie_replays),
    ("ecc.corrected", "Corrected memory errors since the driver was loaded.", "", lambda s: s.ecc_corrected),
    ("ecc.uncorrected", "Uncorrected memory errors since the driver was loaded.", "", lambda s: s.ecc_uncorrected),
    ("rows.remapped", "Rows of memory remapped in its life.", "", lambda s: None if s.remapped is None else s.remapped[0] + s.remapped[1]),
)


def register(watch: GpuWatch, telemetry: Telemetry) -> None:
    """Have the figures given with each scrape."""

    def each(figure: Callable[[GpuSample], float | None]) -> Callable[[], Iterator[tuple[float, Labels]]]:
        def read() -> Iterator[tuple[float, Labels]]:
            for gpu in watch.inventory.gpus:
                sample = watch.samples.get(gpu.uuid)
                value = figure(sample) if sample is not None and gpu.healthy else None
                if value is not None:
                    yield value, _labels(gpu)

        return read

    for name, description, unit, figure in _GAUGES:
        telemetry.gauge(f"gangline.agent.gpu.{name}", description, each(figure), unit)
    for name, description, unit, figure in _SUMS:
        telemetry.sums(f"gangline.agent.gpu.{name}", description, each(figure), unit)
    telemetry.gauge("gangline.agent.gpu.usable", "1 if ranks can be given the GPU.", lambda: _usable(watch))
    telemetry.gauge("gangline.agent.gpu.slowed", "1 for each reason that has slowed the GPU down for 10 seconds.", lambda: _slowed(watch))
    telemetry.sums("gangline.agent.gpu.xids", "Xids since the host was booted.", lambda: _xids(watch))
    telemetry.gauge("gangline.agent.gpu.driver.answers", "1 if the driver of the GPUs answers.", lambda: [(int(watch.driver is None), {})])
    telemetry.sums("gangline.agent.gpu.driver.restarts", "Times that asking the driver was begun anew.", lambda: [(watch.backend.restarts, {})])
    telemetry.sums("gangline.agent.gpu.reads", "Times that all GPUs were read.", lambda: [(watch.reads, {})])
    telemetry.sums("gangline.agent.gpu.read.cpu", "Processor time that reading the GPUs has taken.", lambda: [(watch.cpu_s, {})], "s")


def _usable(watch: GpuWatch) -> Iterator[tuple[float, Labels]]:
    return ((int(gpu.healthy), _labels(gpu)) for gpu in watch.inventory.gpus)


def _labels(gpu: Gpu) -> Labels:
    return {"gpu": str(gpu.index), "uuid": gpu.uuid, "model": gpu.model}


def _scaled(value: int | None, by: int) -> float | None:
    return None if value is None else value / by


def _reports(watch: GpuWatch) -> Iterator[tuple[Gpu, GpuReport]]:
    by_uuid = {gpu.uuid: gpu for gpu in watch.inventory.gpus}
    return ((by_uuid[r.uuid], r) for r in watch.reports if r.uuid in by_uuid)


def _slowed(watch: GpuWatch) -> Iterator[tuple[float, Labels]]:
    return ((1, {**_labels(gpu), "reason": reason}) for gpu, r in _reports(watch) for reason in r.slowed)


def _xids(watch: GpuWatch) -> Iterator[tuple[float, Labels]]:
    return ((x.count, {**_labels(gpu), "xid": str(x.xid)}) for gpu, r in _reports(watch) for x in r.xids)
