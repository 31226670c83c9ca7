"""Faults of simulated GPUs and of their driver: written where the agent of the node looks for them (nodeagent/simgpus.py).

They take effect within a second, and stay until they are healed. What real GPUs do is tried on the stand-in for NVML in tests/nvml instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from gangline.chaos.faults import Fault
from gangline.nodeagent.gpus import MEMORY_FILE
from gangline.nodeagent.gpustate import Memory
from gangline.nodeagent.simgpus import SimFaults, SimGpuFault, read_faults, write_faults

#: the Xid of a GPU that has fallen off the bus
OFF_THE_BUS = 79


def _changed(faults: SimFaults, gpu: int, **fields: Any) -> SimFaults:
    before = faults.gpus.get(gpu, SimGpuFault())
    return msgspec.structs.replace(faults, gpus={**faults.gpus, gpu: msgspec.structs.replace(before, **fields)})


def _counted(faults: SimFaults, gpu: int, xid: int) -> SimFaults:
    xids = faults.gpus.get(gpu, SimGpuFault()).xids
    return _changed(faults, gpu, xids={**xids, xid: xids.get(xid, 0) + 1}, at_ms=time.time_ns() // 1_000_000)


class _OfGpu(Fault):
    """Base of those that are about one GPU."""

    __slots__ = ()
    node: str
    gpu: int

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"GPU {self.gpu} of {self.node}"

    def __str__(self) -> str:
        return f"{self.NAME} {self.whom()}"


@dataclass(frozen=True, slots=True)
class GpuXid(_OfGpu):
    """The driver reports an Xid, an error by its number, of one GPU."""

    NAME: ClassVar[str] = "gpu-xid"
    node: str
    gpu: int
    xid: int

    def on(self, faults: SimFaults) -> SimFaults:
        """Count one more."""
        return _counted(faults, self.gpu, self.xid)

    def off(self, faults: SimFaults) -> SimFaults:
        """It has happened."""
        return faults


@dataclass(frozen=True, slots=True)
class GpuLost(_OfGpu):
    """One GPU falls off the bus: Xid 79, and the driver cannot reach it any more."""

    NAME: ClassVar[str] = "gpu-lost"
    node: str
    gpu: int

    def on(self, faults: SimFaults) -> SimFaults:
        """It is lost."""
        return _changed(_counted(faults, self.gpu, OFF_THE_BUS), self.gpu, lost=True)

    def off(self, faults: SimFaults) -> SimFaults:
        """As after a reset."""
        return _changed(faults, self.gpu, lost=False)


@dataclass(frozen=True, slots=True)
class GpuMissing(_OfGpu):
    """The driver does not name one GPU any more."""

    NAME: ClassVar[str] = "gpu-missing"
    node: str
    gpu: int

    def on(self, faults: SimFaults) -> SimFaults:
        """It is not there."""
        return _changed(faults, self.gpu, missing=True)

    def off(self, faults: SimFaults) -> SimFaults:
        """It is back."""
        return _changed(faults, self.gpu, missing=False)


@dataclass(frozen=True, slots=True)
class GpuEcc(_OfGpu):
    """One uncorrectable error in the memory of a GPU: Xid 94, a row to be remapped, and a reset that the driver asks for."""

    NAME: ClassVar[str] = "gpu-ecc"
    node: str
    gpu: int

    def on(self, faults: SimFaults) -> SimFaults:
        """Count it."""
        before = faults.gpus.get(self.gpu, SimGpuFault())
        corrected, uncorrected, _, failed = before.remapped
        counted = _counted(faults, self.gpu, 94)
        return _changed(
            counted, self.gpu, ecc_uncorrected=before.ecc_uncorrected + 1, remapped=(corrected, uncorrected + 1, 1, failed), needs="gpu_reset"
        )

    def off(self, faults: SimFaults) -> SimFaults:
        """As after a reset: the row is remapped."""
        corrected, uncorrected, _, failed = faults.gpus.get(self.gpu, SimGpuFault()).remapped
        return _changed(faults, self.gpu, ecc_uncorrected=0, remapped=(corrected, uncorrected, 0, failed), needs="")


@dataclass(frozen=True, slots=True)
class GpuHot(_OfGpu):
    """The hardware slows one GPU down because it is too hot."""

    NAME: ClassVar[str] = "gpu-hot"
    node: str
    gpu: int

    def on(self, faults: SimFaults) -> SimFaults:
        """It is slow."""
        return _changed(faults, self.gpu, slowed=("hw_thermal",))

    def off(self, faults: SimFaults) -> SimFaults:
        """It has cooled down."""
        return _changed(faults, self.gpu, slowed=())


@dataclass(frozen=True, slots=True)
class GpuLinkDown(_OfGpu):
    """One NVLink of a GPU goes down, with errors on it and Xid 74."""

    NAME: ClassVar[str] = "gpu-link-down"
    node: str
    gpu: int

    def on(self, faults: SimFaults) -> SimFaults:
        """One more is down."""
        before = faults.gpus.get(self.gpu, SimGpuFault())
        counted = _counted(faults, self.gpu, 74)
        return _changed(counted, self.gpu, nvlinks_down=before.nvlinks_down + 1, nvlink_errors=before.nvlink_errors + 100)

    def off(self, faults: SimFaults) -> SimFaults:
        """All are up."""
        return _changed(faults, self.gpu, nvlinks_down=0)


@dataclass(frozen=True, slots=True)
class GpuDriverSilent(Fault):
    """The driver of a node's GPUs does not answer any more."""

    NAME: ClassVar[str] = "gpu-driver-silent"
    node: str

    def whom(self) -> str:
        """Return whom it hits, for people."""
        return f"the GPU driver of {self.node}"

    def __str__(self) -> str:
        return f"{self.NAME} {self.whom()}"

    def on(self, faults: SimFaults) -> SimFaults:
        """It is silent."""
        return msgspec.structs.replace(faults, driver="silent")

    def off(self, faults: SimFaults) -> SimFaults:
        """It answers."""
        return msgspec.structs.replace(faults, driver="")


GpuFault = GpuXid | GpuLost | GpuMissing | GpuEcc | GpuHot | GpuLinkDown | GpuDriverSilent
GPU_FAULTS: dict[str, type[Fault]] = {
    fault.NAME: fault for fault in (GpuXid, GpuLost, GpuMissing, GpuEcc, GpuHot, GpuLinkDown, GpuDriverSilent)
}


def problem(fault: GpuFault, folder: Path) -> str:
    """Return why a node, given by its agent's state directory, cannot have this fault, "" when it can."""
    try:
        memory = msgspec.json.decode((folder / MEMORY_FILE).read_bytes(), type=Memory)
    except (OSError, msgspec.DecodeError):
        return f"{fault.node} has no GPUs that its agent remembers"
    if memory.kind != "simulated":
        return f"the GPUs of {fault.node} are real: only simulated ones break when they are told to"
    number = 0 if isinstance(fault, GpuDriverSilent) else fault.gpu
    return "" if any(g.index == number for g in memory.gpus) else f"{fault.node} has no GPU {number}; it has {len(memory.gpus)}"


def put(fault: GpuFault, folder: Path) -> None:
    """Put it in force on a node."""
    write_faults(folder, fault.on(read_faults(folder)))


def take_back(fault: GpuFault, folder: Path) -> None:
    """Undo what of it can be undone: counters stay, since what was counted has happened."""
    write_faults(folder, fault.off(read_faults(folder)))
