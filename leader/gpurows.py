"""What the HTTP API says of parts of GPUs: docs/api.md. Pure."""

from __future__ import annotations

import msgspec

from gangline.core.model.gpushares import GPU, GpuShare, MigSlice, in_gpus
from gangline.core.model.state import Node


class InstanceRow(msgspec.Struct, frozen=True):
    """One MIG instance."""

    gpu: int
    profile: str
    #: its first memory slice
    start: int


class ShareRow(msgspec.Struct, frozen=True):
    """What a rank has of its GPUs where it does not have them whole."""

    #: of each GPU, as its queue is charged for it; null for MIG instances
    part: float | None
    #: of each GPU, where memory was asked for
    memory_mib: int | None
    mig: list[InstanceRow]


class PartedGpuRow(msgspec.Struct, frozen=True):
    """A GPU that is shared or partitioned."""

    gpu: int
    #: what of it can still be shared; null when it is partitioned
    free: float | None
    mig: list[InstanceRow]


def share_row(share: GpuShare | None) -> ShareRow | None:
    """Return what a rank has of its GPUs, None when it has them whole."""
    if share is None:
        return None
    return ShareRow(None if share.mig else share.milli / GPU, share.memory_mib or None, [_instance(one) for one in share.mig])


def parted_rows(node: Node) -> list[PartedGpuRow]:
    """Return the GPUs of a node that are shared or partitioned."""
    memory = {gpu.index: max(1, gpu.memory_mib) for gpu in node.registration.gpus}
    rows = []
    for gpu, use in sorted(node.parted.items()):
        full = GPU * memory.get(gpu, 1)
        free = None if use.mig else in_gpus(max(0, (full - use.amount(memory.get(gpu, 1))) * 100 // full) * 10)
        rows.append(PartedGpuRow(gpu, free, [_instance(one) for one in use.mig]))
    return rows


def _instance(one: MigSlice) -> InstanceRow:
    return InstanceRow(one.gpu, one.profile, one.start)
