"""Real GPUs made ready for the ranks that get them: MIG mode and instances as decided, and modes that forbid sharing refused.

Nothing here decides: `partitions.planned` says what differs, NVML does it (nvmlmig.py, in its process), and what NVML shows then is believed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gangline.core.model.documents import DesiredRank
from gangline.core.model.gpushares import MigSlice
from gangline.nodeagent import deviceaccess, mps
from gangline.nodeagent.gpudata import Instance, Partition
from gangline.nodeagent.gpudriver import DriverError
from gangline.nodeagent.gpus import GpuWatch
from gangline.nodeagent.partitions import Change, planned

#: numbers of the device files of instances, by the driver
MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"


class _Known(msgspec.Struct):
    """The file: the instances in this boot. They do not outlive it."""

    boot_id: str
    instances: list[tuple[MigSlice, Instance]]


class NvmlPartitions:
    """See partitions.Partitions."""

    def __init__(self, watch: GpuWatch, path: Path, boot_id: str, mps_pipe: str = "") -> None:
        """Remember instances in `path`, for an agent that starts what another one has prepared."""
        self._watch = watch
        self._path = path
        self._boot_id = boot_id
        self._mps_pipe = mps_pipe
        self._instances: dict[MigSlice, Instance] = {}
        #: GPUs by UUID that are in MIG mode, as far as it is known
        self._on: dict[str, bool] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            known = msgspec.json.decode(path.read_bytes(), type=_Known)
            if known.boot_id == boot_id:
                self._instances = dict(known.instances)

    async def arrange(self, ranks: Iterable[DesiredRank]) -> Change:
        """Make and unmake, one GPU after the other. Raises OSError, with what of it was done already done: the next try goes on from there."""
        ranks = tuple(ranks)
        await self._check_modes(ranks)
        gpus = {gpu.index: gpu for gpu in self._watch.inventory.gpus}
        partitioned = {one.gpu for r in ranks if r.share is not None for one in r.share.mig}
        made: list[MigSlice] = []
        unmade: list[MigSlice] = []
        for index in sorted({g for r in ranks for g in r.gpus} | partitioned):
            gpu = gpus.get(index)
            if gpu is None or not gpu.mig or not (index in partitioned or self._is_on(gpu.uuid)):
                continue
            there = await self._look(index, Partition(gpu.uuid))
            broken = [one for one, uuid in there.items() if not uuid]
            change = planned((one for one, uuid in there.items() if uuid), [r for r in ranks if index in r.gpus or _has(r, index)])
            mine = [one for one in change.made if one.gpu == index]
            unmake = tuple(sorted({one.start for one in (*change.unmade, *broken)}))
            if mine or unmake or index not in partitioned:
                make = tuple((one.profile, one.start) for one in mine)
                await self._look(index, Partition(gpu.uuid, unmake, make, mig=index in partitioned))
            made += mine
            unmade += change.unmade
        return Change(tuple(made), tuple(unmade))

    def uuid_of(self, one: MigSlice) -> str:
        """Return the UUID of an instance, "" when it is not there."""
        there = self._instances.get(one)
        return there.uuid if there is not None else ""

    def closed(self, rank: DesiredRank) -> tuple[tuple[int, int], ...]:
        """Return the device files, as (major, minor), that a rank is not to open: those of other GPUs, and of other instances on its own."""
        minors = self._watch.minors()
        slices = rank.share.mig if rank.share is not None else ()
        mine: dict[int, set[int]] = {}
        for one in slices:
            there = self._instances.get(one)
            if there is not None and one.gpu in minors:
                mine.setdefault(minors[one.gpu], set()).add(there.gi)
        others = deviceaccess.others(minors, (*rank.gpus, *(one.gpu for one in slices)))
        return others + deviceaccess.instances(_read(MIG_MINORS), _read("/proc/devices"), mine) if mine else others

    async def _look(self, index: int, ask: Partition) -> dict[MigSlice, str]:
        """Ask, and keep what is there then."""
        there: tuple[Instance, ...] = await self._watch.backend.partition(ask)
        if ask.mig is not None:
            self._on[ask.uuid] = ask.mig
        found = {MigSlice(index, i.start, i.size, i.profile): i for i in there}
        before = dict(self._instances)
        self._instances = {one: i for one, i in before.items() if one.gpu != index} | {one: i for one, i in found.items() if i.uuid}
        if self._instances != before:
            self._save()
        return {one: i.uuid for one, i in found.items()}

    def _is_on(self, uuid: str) -> bool:
        """Whether a GPU is, or may be, in MIG mode."""
        facts = self._watch.facts.get(uuid)
        return self._on.get(uuid, facts is None or facts.mig_on)

    async def _check_modes(self, ranks: tuple[DesiredRank, ...]) -> None:
        by_index = {gpu.index: self._watch.facts.get(gpu.uuid) for gpu in self._watch.inventory.gpus}
        shared = {g for r in ranks if r.share is not None and not r.share.mig for g in r.gpus}
        for index in sorted({g for r in ranks for g in r.gpus}):
            facts = by_index.get(index)
            mode = "default" if facts is None else facts.compute_mode
            # With MPS the one process that uses a GPU is the server of all.
            if mode == "prohibited" or (mode == "exclusive" and index in shared and not self._mps_pipe):
                raise DriverError(f"GPU {index} is in compute mode {mode}, which forbids this: nvidia-smi -i {index} -c DEFAULT")
        if shared and self._mps_pipe and (why := await mps.problem(self._mps_pipe)):
            raise DriverError(why)

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):  # then a new agent prepares anew
            new.write_bytes(msgspec.json.encode(_Known(self._boot_id, list(self._instances.items()))))
            new.replace(self._path)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _has(rank: DesiredRank, index: int) -> bool:
    return rank.share is not None and any(one.gpu == index for one in rank.share.mig)
