"""Simulated GPUs that can break: what `--gpus sim:h100x8` has, with faults read from a file in the agent's state directory.

They are honest about being simulated: no figure that nothing measures, and nothing breaks unless somebody has written so (`gangline chaos inject
gpu-...`, chaos/gpufaults.py). A broken one goes the same way as a real one: through `gpus.py` into the registration and the observed document.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from gangline.core.model.documents import Gpu
from gangline.nodeagent.gpudata import Facts, GpuFacts, GpuSample, Happened, Instance, Partition, Samples
from gangline.nodeagent.gpudriver import DriverError
from gangline.nodeagent.gpustate import SLOWDOWNS

FAULTS_FILE = "gpu-faults.json"


class SimGpuFault(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What is wrong with one GPU. Counters are totals; an Xid is reported as often as its count says, wherever the count came from."""

    lost: bool = False
    missing: bool = False
    #: Xid → how often since boot; and the wall clock of the last one
    xids: dict[int, int] = {}
    at_ms: int = 0
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    slowed: tuple[str, ...] = ()
    nvlinks_down: int = 0
    nvlink_errors: int = 0
    needs: str = ""


class SimFaults(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The file: the faults by index of the GPU, and whether the driver answers."""

    driver: Literal["", "silent", "failed"] = ""
    gpus: dict[int, SimGpuFault] = {}


def read_faults(folder: Path) -> SimFaults:
    """Return the faults of a node by its agent's state directory; no file is no fault. Raises ValueError for one that is not understood."""
    try:
        return msgspec.json.decode((folder / FAULTS_FILE).read_bytes(), type=SimFaults)
    except FileNotFoundError:
        return SimFaults()


def write_faults(folder: Path, faults: SimFaults) -> None:
    """Put faults in force; the agent looks once a second."""
    new = folder / (FAULTS_FILE + ".new")
    new.write_bytes(msgspec.json.encode(faults))
    new.replace(folder / FAULTS_FILE)


#: NVLinks of a simulated GPU, as of an H100
_LINKS = 18


class SimulatedGpus:
    """A backend of `gpus.GpuWatch`."""

    interval_s = 1.0

    def __init__(self, gpus: tuple[Gpu, ...], folder: Path, counted: Callable[[str, int], int], happened: Callable[[Happened], None]) -> None:
        """`counted` says how many Xids of a kind of a GPU are known already."""
        self._gpus = gpus
        self._folder = folder
        self._counted = counted
        self._happened = happened
        self.state: Literal["answers", "silent", "failed"] = "answers"
        self.message = ""
        self.since_ms = 0
        self.restarts = 0
        self.pause_s = 0.0

    async def facts(self) -> Facts:
        """See gpus.Backend."""
        faults = self._faults()
        there = (g for g in self._gpus if not faults.gpus.get(g.index, _NONE).missing)
        return Facts(tuple(
            GpuFacts(g.uuid, g.model, g.memory_mib, g.index, mig=bool(g.mig), links=g.links, nvlinks=_LINKS) for g in there
        ), "simulated")  # fmt: skip

    async def samples(self) -> Samples:
        """See gpus.Backend."""
        faults = self._faults()
        there = [g for g in self._gpus if not faults.gpus.get(g.index, _NONE).missing]
        for gpu in there:
            self._tell(gpu.uuid, faults.gpus.get(gpu.index, _NONE))
        return Samples(tuple(_sample(g, faults.gpus.get(g.index, _NONE)) for g in there), len(there), 0.0, 0.0)

    async def partition(self, ask: Partition) -> tuple[Instance, ...]:
        """Simulated GPUs are partitioned by `partitions.SimulatedPartitions`."""
        raise DriverError(f"simulated GPU {ask.uuid} has no driver to ask")

    def renew(self) -> None:
        """See gpus.Backend."""

    def close(self) -> None:
        """See gpus.Backend."""

    def _faults(self) -> SimFaults:
        try:
            faults = read_faults(self._folder)
        except (OSError, ValueError) as e:
            self.state, self.message = "failed", f"{FAULTS_FILE}: {e}"
            raise DriverError(self.message) from None
        self.state = faults.driver or "answers"
        self.message = f"the simulated driver is {faults.driver}" if faults.driver else ""
        if faults.driver:
            raise DriverError(self.message)
        return faults

    def _tell(self, uuid: str, fault: SimGpuFault) -> None:
        for xid, count in fault.xids.items():
            for _ in range(count - self._counted(uuid, xid)):
                self._happened(Happened(uuid, "xid", xid, fault.at_ms))


_NONE = SimGpuFault()


def _sample(gpu: Gpu, fault: SimGpuFault) -> GpuSample:
    reasons = sum(bit for bit, name in SLOWDOWNS.items() if name in fault.slowed)
    return GpuSample(
        uuid=gpu.uuid, lost=fault.lost, memory_total=gpu.memory_mib << 20, reasons=reasons,
        ecc_corrected=fault.ecc_corrected, ecc_uncorrected=fault.ecc_uncorrected, remapped=fault.remapped,
        nvlinks=_LINKS - fault.nvlinks_down, nvlink_errors=fault.nvlink_errors, needs=fault.needs,
    )  # fmt: skip
