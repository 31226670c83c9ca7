"""GPUs as NVML tells of them: the only module that calls pynvml (with `nvmlmig.py`). It runs in a process of its own, see `gpuprocess.py`.

Every call may hang or crash, which is why. A figure that this GPU or driver does not have is None. Names and meanings: NVIDIA's nvml.h, in the
versions that pynvml calls (nvmlDeviceGetCount_v2, nvmlEventSetWait_v2, nvmlDeviceGetComputeRunningProcesses_v3, ...).
"""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from gangline.nodeagent.gpudata import Facts, GpuFacts, GpuSample, Happened, Samples
from gangline.nodeagent.nvmlpaths import groups


def quietly_imported() -> Any:
    """Return pynvml, without what it says about the name of its package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pynvml
    return pynvml


nvml = quietly_imported()

T = TypeVar("T")

#: NUMA nodes are asked for in words of 64
_NUMA_WORDS = 4
_SWITCH_LEVEL = nvml.NVML_TOPOLOGY_MULTIPLE
_NEEDS = {
    nvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "gpu_reset",
    nvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "node_reboot",
    nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "drain_p2p",
    nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "drain_and_reset",
}
_MODES: dict[int, Literal["default", "exclusive", "prohibited"]] = {
    nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive", nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}  # fmt: skip
#: fields that are read with one call; those of NVLink are sums over all links. Drivers for NVLink 5 count per link instead
_FIELDS = (
    nvml.NVML_FI_DEV_MEMORY_TEMP, nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
    nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)  # fmt: skip
_NVLINK_TOTALS = _FIELDS[3:]
_NVLINK_EACH = (nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY, nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY, nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC)
_EVENTS = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
#: about the GPU or the driver as a whole, not about one figure
_LOST = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED)


class Gone(Exception):
    """There is no driver or no library: the message says what."""


def _optional(call: Callable[..., T], *args: Any) -> T | None:
    """Return what a call returns; None when this GPU or driver has no such thing. Other errors go on: they are not about the figure."""
    try:
        return call(*args)
    except nvml.NVMLError as e:
        if e.value in _LOST:
            raise
        return None


class Driver:
    """NVML from its initialisation to its end. Everything raises pynvml.NVMLError."""

    def __init__(self) -> None:
        """Load the library and initialise it. Raises Gone when there is none."""
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as e:
            if e.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                raise Gone(str(e)) from None
            raise
        #: by UUID, in NVML's order
        self.handles: dict[str, Any] = {}
        self._links: dict[str, tuple[int, ...]] = {}
        self._find()

    def close(self) -> None:
        """End it."""
        nvml.nvmlShutdown()

    def _find(self) -> None:
        self.unreachable = 0
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                self.handles[_text(nvml.nvmlDeviceGetUUID(handle))] = handle
            except nvml.NVMLError:
                self.unreachable += 1  # fallen off the bus; NVML still counts it until the host is booted

    # ---------------------------------------------------------------- facts

    def facts(self) -> Facts:
        """Read what each GPU is and where it hangs."""
        found, reached, unreachable = [], [], self.unreachable
        for uuid, handle in self.handles.items():
            try:
                found.append(self._facts(uuid, handle))
                reached.append(handle)
            except nvml.NVMLError:
                unreachable += 1
        links = groups([f.numa for f in found], self._same(reached, _one_switch), self._same(reached, self._bridged))
        gpus = tuple(_with_links(f, g) for f, g in zip(found, links, strict=True))
        return Facts(gpus, _text(nvml.nvmlSystemGetDriverVersion()), unreachable)

    def _facts(self, uuid: str, handle: Any) -> GpuFacts:
        pci = _optional(nvml.nvmlDeviceGetPciInfo, handle)
        minor = _optional(nvml.nvmlDeviceGetMinorNumber, handle)
        mig = _optional(nvml.nvmlDeviceGetMigMode, handle)
        self._links[uuid] = tuple(_links_up(handle, range(nvml.NVML_NVLINK_MAX_LINKS)))
        return GpuFacts(
            uuid=uuid, name=_text(nvml.nvmlDeviceGetName(handle)), memory_mib=int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20,
            minor=-1 if minor is None else minor, pci="" if pci is None else _text(pci.busId).lower(), numa=_numa(handle),
            mig=mig is not None, mig_on=mig is not None and mig[0] == nvml.NVML_DEVICE_MIG_ENABLE, nvlinks=len(self._links[uuid]),
            compute_mode=_MODES.get(_optional(nvml.nvmlDeviceGetComputeMode, handle) or 0, "default"),
        )  # fmt: skip

    def _same(self, handles: list[Any], near: Callable[[Any, Any], bool]) -> list[int]:
        """Return for each GPU the position of the first one that it is near to, itself at the latest."""
        firsts: list[int] = []
        for i, handle in enumerate(handles):
            firsts.append(next((j for j in range(i) if firsts[j] == j and near(handles[j], handle)), i))
        return firsts

    def _bridged(self, a: Any, b: Any) -> bool:
        """Whether an NVLink goes from one straight to the other, and not through a switch that joins all."""
        there = _optional(nvml.nvmlDeviceGetPciInfo, b)
        for link in _links_up(a, range(nvml.NVML_NVLINK_MAX_LINKS)):
            other = _optional(nvml.nvmlDeviceGetNvLinkRemotePciInfo, a, link)
            if there is not None and other is not None and _text(other.busId).lower() == _text(there.busId).lower():
                return True
        return False

    # ---------------------------------------------------------------- samples

    def samples(self, events_age_s: float) -> Samples:
        """Read all GPUs."""
        begun = time.thread_time()
        gpus = tuple(self._sample(uuid, handle) for uuid, handle in self.handles.items())
        return Samples(gpus, nvml.nvmlDeviceGetCount(), events_age_s, time.thread_time() - begun)

    def _sample(self, uuid: str, handle: Any) -> GpuSample:
        try:
            return self._read(uuid, handle)
        except nvml.NVMLError as e:
            if e.value not in _LOST:
                raise
            return GpuSample(uuid, lost=True)

    def _read(self, uuid: str, handle: Any) -> GpuSample:
        use = _optional(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _optional(nvml.nvmlDeviceGetMemoryInfo, handle)
        processes = _optional(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        fields = _fields(handle, _FIELDS)
        links = tuple(_links_up(handle, self._links.get(uuid, ())))
        return GpuSample(
            uuid=uuid,
            busy=None if use is None else use.gpu, memory_busy=None if use is None else use.memory,
            memory_used=None if memory is None else memory.used, memory_total=None if memory is None else memory.total,
            power_mw=_optional(nvml.nvmlDeviceGetPowerUsage, handle), power_limit_mw=_optional(nvml.nvmlDeviceGetEnforcedPowerLimit, handle),
            energy_mj=_optional(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
            celsius=_optional(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU), memory_celsius=fields.get(_FIELDS[0]),
            sm_mhz=_optional(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=_optional(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            reasons=_reasons(handle),
            ecc_corrected=_ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=_ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            remapped=_optional(nvml.nvmlDeviceGetRemappedRows, handle), pcie_replays=fields.get(_FIELDS[1]),
            nvlinks=len(links), nvlink_errors=_nvlink_errors(handle, fields, self._links.get(uuid, ())),
            needs=_NEEDS.get(fields.get(_FIELDS[2], 0), ""),
            processes=tuple((p.pid, p.usedGpuMemory or 0) for p in processes),
        )  # fmt: skip


class Events:
    """The event set of all GPUs, waited for in a thread of its own. Raises pynvml.NVMLError."""

    def __init__(self, driver: Driver) -> None:
        """Register for what each GPU can tell; one that can tell nothing is left out."""
        self._set = nvml.nvmlEventSetCreate()
        self._uuids: dict[int, str] = {}
        for uuid, handle in driver.handles.items():
            can = _optional(nvml.nvmlDeviceGetSupportedEventTypes, handle) or 0
            if can & _EVENTS and _optional(lambda h=handle, c=can: nvml.nvmlDeviceRegisterEvents(h, c & _EVENTS, self._set) or True):
                self._uuids[_address(handle)] = uuid

    def wait(self, timeout_ms: int) -> Happened | None:
        """Return the next event, None when there is none in this time. That a GPU fell off the bus is one, which GPU may be unknown."""
        try:
            data = nvml.nvmlEventSetWait_v2(self._set, timeout_ms)
        except nvml.NVMLError as e:
            if e.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            if e.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return Happened("", "lost", at_ms=_now_ms())
            raise
        uuid = self._uuids.get(_address(data.device), "")
        if data.eventType == nvml.nvmlEventTypeXidCriticalError:
            return Happened(uuid, "xid", int(data.eventData), _now_ms())
        return Happened(uuid, "ecc", 0, _now_ms())


# ---------------------------------------------------------------- single readings


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _now_ms() -> int:
    """Return wall-clock milliseconds, for people."""
    return time.time_ns() // 1_000_000


def _numa(handle: Any) -> int:
    """Return the NUMA node nearest to a GPU: the lowest, where it is near to several."""
    words = _optional(nvml.nvmlDeviceGetMemoryAffinity, handle, _NUMA_WORDS, nvml.NVML_AFFINITY_SCOPE_NODE)
    for at, word in enumerate(words or ()):
        if word:
            return int(64 * at + (word & -word).bit_length() - 1)
    return -1


def _one_switch(a: Any, b: Any) -> bool:
    """Whether data goes from one to the other through PCIe switches only, not through the host's bridge."""
    level = _optional(nvml.nvmlDeviceGetTopologyCommonAncestor, a, b)
    return level is not None and level <= _SWITCH_LEVEL


def _links_up(handle: Any, links: range | tuple[int, ...]) -> Iterator[int]:
    """Yield those of these NVLinks that are up. The first number that a GPU does not have ends them."""
    for link in links:
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except nvml.NVMLError as e:
            if e.value in _LOST:
                raise
            return


def _reasons(handle: Any) -> int:
    reasons = _optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # a driver before 535
        reasons = _optional(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    return reasons or 0


def _ecc(handle: Any, kind: int) -> int | None:
    return _optional(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, nvml.NVML_VOLATILE_ECC)


def _fields(handle: Any, ids: tuple[Any, ...]) -> dict[Any, int]:
    """Return the whole-number fields that this GPU has, by id or (id, scope)."""
    values = _optional(nvml.nvmlDeviceGetFieldValues, handle, list(ids))
    if values is None:
        return {}
    return {i: _whole(v) for i, v in zip(ids, values, strict=True) if v.nvmlReturn == nvml.NVML_SUCCESS}


def _whole(field: Any) -> int:
    value, kind = field.value, field.valueType
    if kind == nvml.NVML_VALUE_TYPE_UNSIGNED_INT:
        return int(value.uiVal)
    if kind == nvml.NVML_VALUE_TYPE_DOUBLE:
        return int(value.dVal)
    if kind in (nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, nvml.NVML_VALUE_TYPE_SIGNED_INT):
        return int(value.sllVal if kind == nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG else value.siVal)
    return int(value.usVal if kind == nvml.NVML_VALUE_TYPE_UNSIGNED_SHORT else value.ullVal)


def _nvlink_errors(handle: Any, fields: dict[Any, int], links: tuple[int, ...]) -> int | None:
    """Return the errors of all links together. None: it has no links, or nobody counts."""
    if not links:
        return None
    totals = [fields[f] for f in _NVLINK_TOTALS if f in fields]
    if not totals:
        totals = list(_fields(handle, tuple((f, link) for f in _NVLINK_EACH for link in links)).values())
    return sum(totals) if totals else None


def _with_links(facts: GpuFacts, links: tuple[int, ...]) -> GpuFacts:
    return msgspec.structs.replace(facts, links=links)
