"""What is made of what the driver says: which GPU has which index, which are of use, and what of each has to be reported. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from gangline.core.model.documents import DriverReport, Gpu, GpuReport, XidCount
from gangline.core.model.gpufacts import MIG_LAYOUTS
from gangline.nodeagent.gpudata import GpuFacts, GpuSample
from gangline.nodeagent.gpunames import model_name

#: a GPU that is slowed down for so long is reported; a shorter time is nothing
SLOWED_S = 10.0
XIDS_MAX = 32
#: bits of NVML's clocks event reasons that are about the hardware, not about idling, a power cap or a setting
SLOWDOWNS = {0x08: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}


class Memory(msgspec.Struct, omit_defaults=True):
    """What a node remembers of its GPUs, on its disk. Counts are those of this boot."""

    boot_id: str = ""
    #: devices.Kind of the GPUs
    kind: str = ""
    #: as registered last
    gpus: tuple[Gpu, ...] = ()
    #: UUID → Xid → (how often, wall clock of the last one)
    xids: dict[str, dict[int, tuple[int, int]]] = {}
    #: UUID → NVLinks that were up when most of them were
    nvlinks: dict[str, int] = {}
    #: UUID → N of /dev/nvidiaN
    minors: dict[str, int] = {}
    #: as reported last: what the next agent says until it has looked
    reports: tuple[GpuReport, ...] = ()
    driver: DriverReport | None = None


def booted(memory: Memory, boot_id: str) -> Memory:
    """Return what is still true after a reboot: which GPUs there were."""
    return memory if memory.boot_id == boot_id else Memory(boot_id, memory.kind, memory.gpus)


def settle(known: tuple[Gpu, ...], facts: tuple[GpuFacts, ...], *, same_boot: bool) -> tuple[Gpu, ...]:
    """Return the GPUs of the node by index. A GPU is told by its UUID, whatever position the driver gives it.

    Within one boot each keeps its index, because ranks may be running on it: one that the driver does not name any more keeps its place,
    unhealthy, and new ones come last. After a boot nothing runs, so indices are in the order of the driver again; those that are missing come
    last, unhealthy, until as many others have come in their stead.
    """
    named = {f.uuid: f for f in facts}
    missing = [g for g in known if g.uuid not in named]
    at = {g.uuid: g.index for g in known}
    if same_boot:
        free = iter(range(max(at.values(), default=-1) + 1, 1 << 20))
        found = [gpu_of(f, at[f.uuid] if f.uuid in at else next(free)) for f in facts]
        return tuple(sorted((*found, *(_unhealthy(g, g.index) for g in missing)), key=lambda g: g.index))
    missing = missing[sum(f.uuid not in at for f in facts) :]  # the first of them are taken for replaced
    return (*(gpu_of(f, i) for i, f in enumerate(facts)), *(_unhealthy(g, len(facts) + i) for i, g in enumerate(missing)))


def gpu_of(facts: GpuFacts, index: int) -> Gpu:
    """Return how a GPU is registered."""
    model = model_name(facts.name)
    mig = model if facts.mig and model in MIG_LAYOUTS else ""
    return Gpu(index, facts.uuid, model, facts.memory_mib, mig=mig, links=facts.links, pci=facts.pci, numa=facts.numa)


def _unhealthy(gpu: Gpu, index: int) -> Gpu:
    # Its links may have another length than those of the others now.
    return msgspec.structs.replace(gpu, index=index, healthy=False)


def usable(gpus: tuple[Gpu, ...], named: set[str], lost: set[str], *, answers: bool) -> tuple[Gpu, ...]:
    """Return the GPUs with their health: only those that the driver names and reaches can be given to ranks, none while it does not answer."""
    depth = max((len(g.links) for g in gpus if g.uuid in named), default=0)
    found = []
    for g in gpus:
        links = g.links if len(g.links) == depth else (0,) * depth
        found.append(msgspec.structs.replace(g, healthy=answers and g.uuid in named and g.uuid not in lost, links=links))
    return tuple(found)


def slowdowns(since: dict[str, float], reasons: int, now: float) -> dict[str, float]:
    """Return since when (monotonic seconds) a GPU has been slowed down for each reason that holds now."""
    return {name: since.get(name, now) for bit, name in SLOWDOWNS.items() if reasons & bit}


def count_xid(memory: Memory, uuid: str, xid: int, at_ms: int) -> None:
    """Count one more in what is remembered. Kinds beyond the first `XIDS_MAX` of a GPU are not told apart any more: they count as Xid 0."""
    counts = memory.xids.setdefault(uuid, {})
    if xid not in counts and len(counts) >= XIDS_MAX - 1:
        xid = 0
    counts[xid] = (counts.get(xid, (0, 0))[0] + 1, at_ms)


State = Literal["present", "lost", "missing", "stale"]


def report(gpu: Gpu, state: State, sample: GpuSample | None, memory: Memory, slowed: dict[str, float], now: float) -> GpuReport | None:
    """Return what is to be reported of a GPU, None for nothing. `sample` is the last one, None when there was none."""
    xids = tuple(XidCount(x, count, at) for x, (count, at) in sorted(memory.xids.get(gpu.uuid, {}).items()))
    s = sample if sample is not None else GpuSample(gpu.uuid)
    remapped = s.remapped or (0, 0, 0, 0)
    expected = memory.nvlinks.get(gpu.uuid, 0)
    found = GpuReport(
        uuid=gpu.uuid,
        state=state,
        xids=xids, ecc_corrected=s.ecc_corrected or 0, ecc_uncorrected=s.ecc_uncorrected or 0,
        remapped_corrected=remapped[0], remapped_uncorrected=remapped[1], remap_pending=bool(remapped[2]), remap_failed=bool(remapped[3]),
        slowed=tuple(sorted(name for name, since in slowed.items() if now - since >= SLOWED_S)),
        nvlink_errors=s.nvlink_errors or 0, nvlinks_down=max(0, expected - s.nvlinks) if sample is not None and state == "present" else 0,
        needs=s.needs,
    )  # fmt: skip
    return None if found == GpuReport(gpu.uuid) else found


def without_counts(reports: tuple[GpuReport, ...]) -> tuple[GpuReport, ...]:
    """Return reports without the figures that go up by themselves in healthy hardware too: those alone are no reason to write at once."""
    return tuple(msgspec.structs.replace(r, ecc_corrected=0, nvlink_errors=0) for r in reports)
