"""What ranks have of single GPUs, added up: which of them may share one, and which parts of it they get. Pure.

A GPU is in one of three uses at a time: whole, for one rank; shared, by any number of ranks that together take no more than all of it; or
partitioned by MIG, into instances that do not overlap. Shares and amounts of memory on one GPU are added up in thousandths of a MiB of its
memory, so that both are exact: half of 80 GiB and 40 GiB are the same, and three thirds of a GPU's memory fit on it.
"""

from __future__ import annotations

import msgspec

#: thousandths of a GPU
GPU = 1000


class MigSlice(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """One MIG instance: on GPU `gpu` of the node, of this profile, in the memory slices [start, start + size)."""

    gpu: int
    start: int
    size: int
    profile: str

    def overlaps(self, other: MigSlice) -> bool:
        """Whether both are in some memory slice of one GPU."""
        return self.gpu == other.gpu and self.start < other.start + other.size and other.start < self.start + self.size


class GpuShare(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a rank has of its GPUs when it does not have the whole of each.

    `milli` thousandths of each; with `memory_mib` that much memory of each, of which `milli` is the share, rounded up to hundredths, that its
    queue is charged for. Or MIG instances: then both are 0.
    """

    milli: int = 0
    memory_mib: int = 0
    mig: tuple[MigSlice, ...] = ()


class GpuUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is taken of one GPU that is not given whole: sums of shares and memory, and MIG instances in the order of their starts.

    `charged` are the thousandths of GPUs that queues are charged for it.
    """

    gpu: int
    milli: int = 0
    memory_mib: int = 0
    mig: tuple[MigSlice, ...] = ()
    charged: int = 0

    def plus(self, other: GpuUse) -> GpuUse:
        """Return both together."""
        mig = tuple(sorted((*self.mig, *other.mig)))
        return GpuUse(self.gpu, self.milli + other.milli, self.memory_mib + other.memory_mib, mig, self.charged + other.charged)

    def minus(self, other: GpuUse) -> GpuUse:
        """Return what is left of this without the other, which is part of it."""
        mig = list(self.mig)
        for one in other.mig:
            mig.remove(one)
        left = (self.milli - other.milli, self.memory_mib - other.memory_mib, tuple(mig), self.charged - other.charged)
        return GpuUse(self.gpu, *left)

    def __bool__(self) -> bool:
        return bool(self.milli or self.memory_mib or self.mig)

    def amount(self, memory_mib: int) -> int:
        """Return what the shares take of a GPU with this much memory, in thousandths of a MiB."""
        return self.milli * max(1, memory_mib) + self.memory_mib * GPU

    def problem(self, memory_mib: int) -> str:
        """Return why a GPU with this much memory cannot be used so, "" when it can."""
        if self.mig and (self.milli or self.memory_mib):
            return "is shared and partitioned at once"
        if self.amount(memory_mib) > GPU * max(1, memory_mib):
            return "is shared beyond the whole of it"
        for a, b in zip(self.mig, self.mig[1:], strict=False):
            if a.overlaps(b):
                return f"has overlapping MIG instances, {a.profile} at {a.start} and {b.profile} at {b.start}"
        return ""


def uses_of(gpus: tuple[int, ...], share: GpuShare | None) -> list[GpuUse]:
    """Return what a rank takes of each GPU that it does not have whole; nothing when it has its GPUs whole."""
    if share is None:
        return []
    if not share.mig:
        milli = 0 if share.memory_mib else share.milli
        return [GpuUse(gpu, milli, share.memory_mib, (), share.milli) for gpu in gpus]
    by_gpu: dict[int, list[MigSlice]] = {}
    for one in share.mig:
        by_gpu.setdefault(one.gpu, []).append(one)
    return [
        GpuUse(gpu, 0, 0, tuple(sorted(some)), sum(mig_gpus(one.profile) * GPU for one in some)) for gpu, some in sorted(by_gpu.items())
    ]


def charged_milli(gpus: tuple[int, ...], share: GpuShare | None) -> int:
    """Return the thousandths of GPUs that a queue is charged for what a rank has: an instance counts by the leading number of its profile."""
    if share is None:
        return len(gpus) * GPU
    return share.milli * len(gpus) + sum(mig_gpus(one.profile) * GPU for one in share.mig)


def in_gpus(milli: int) -> float:
    """Return thousandths of GPUs in GPUs: a whole number where they are whole."""
    return milli // GPU if milli % GPU == 0 else milli / GPU


def mig_gpus(profile: str) -> int:
    """Return how many GPUs of quota one instance of a profile counts for: its leading number, 3 for `3g.20gb`.

    Raises ValueError if the profile does not begin with a number.
    """
    digits = profile.split("g", 1)[0]
    if not digits.isdigit():
        raise ValueError(f"MIG profile {profile!r} does not begin with a number of slices, as 1g.5gb does")
    return int(digits)


def share_of_memory(memory_mib: int, device_memory_mib: int) -> int:
    """Return the thousandths of a device that so much memory is of it, rounded up to hundredths of the device.

    A device whose memory is not known has none of it.
    """
    return -(-memory_mib * 100 // device_memory_mib) * (GPU // 100) if device_memory_mib > 0 else 1 << 62
