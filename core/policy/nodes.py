"""One node of the what-if world: what it has, what is idle, and what will be idle.

Two numbers are kept for everything countable:

idle    not held by any rank on the node, ranks that are leaving included among the holders
later   what will be free once everything that leaves has left, less what is reserved for ranks that wait for that

A rank fits *now* if it fits into both: so a reservation keeps others off, idle room included. It fits *later*, and can be given a reservation,
if it fits into `later`. Holding, leaving and reserving are sums, so undoing them in reverse order restores the node exactly.

A device that carries shares is never given whole. Whole devices are sets of bits (`now_mask`, `later_mask`), so that counting and choosing
them is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gangline.core.model.gpufacts import MigLayout
from gangline.core.policy import numa
from gangline.core.policy.numa import Zone, ZoneUse
from gangline.core.policy.requests import GPU, Request

#: one MIG instance: device, first memory slice, profile
Slot = tuple[int, int, str]


@dataclass(frozen=True)
class NodeSpec:
    """What a node has. `gpus` whole devices, each with `gpu_memory_mib` MiB; `mig` instances by profile on a partitioned node.

    A node with a `mig_layout` partitions idle devices as ranks ask for instances (migplan.py). `links` says where each device hangs
    (linkaffinity.py).
    """

    name: str
    gpus: int = 0
    gpu_memory_mib: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0
    max_pods: int = 110
    labels: dict[str, str] = field(default_factory=dict)
    mig: dict[str, int] | None = None
    #: "mixed": takes MIG ranks only, besides those without devices; "single": its instances are given as whole devices
    mig_strategy: str = ""
    numa_policy: str = ""
    mig_layout: MigLayout | None = None
    links: tuple[tuple[int, ...], ...] = ()
    zones: tuple[tuple[tuple[int | None, int | None, int | None], tuple[int | None, int | None, int | None]], ...] = ()
    #: of its GPUs; "" where that does not matter
    gpu_model: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, or is to be: a node, its devices with the thousandths taken of each, its NUMA zones, and its MIG instances.

    A device is named once for each share of it. Those of MIG instances are named in `devices` as well, once each.
    """

    node: Node
    devices: tuple[int, ...] = ()
    milli: int = 0
    zones: ZoneUse = ()
    mig: tuple[Slot, ...] = ()


class Node:
    """One node. Only World changes it."""

    __slots__ = (
        "cpu_idle", "cpu_later", "dev_idle", "dev_later", "full", "gpus", "index", "later_mask", "later_milli", "legacy_mig",
        "memory_idle", "memory_later", "mig_idle", "mig_later", "mig_only", "model", "name", "now_mask", "pods_idle", "pods_later", "sharing",
        "slots_idle", "slots_later", "spec", "zones",
    )  # fmt: skip

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.name = spec.name
        #: position in the order of names
        self.index = -1
        self.gpus = spec.gpus
        self.model = spec.gpu_model
        self.mig_only = spec.mig is not None and spec.mig_strategy == "mixed"
        self.cpu_idle = self.cpu_later = spec.cpu_milli
        self.memory_idle = self.memory_later = spec.memory_bytes
        self.pods_idle = self.pods_later = spec.max_pods
        #: what a device has, in thousandths of a MiB of its memory, so that shares and amounts of memory add up exactly
        self.full = GPU * max(1, spec.gpu_memory_mib)
        self.dev_idle = [self.full] * spec.gpus
        self.dev_later = [self.full] * spec.gpus
        self.now_mask = self.later_mask = (1 << spec.gpus) - 1
        self.later_milli = spec.gpus * GPU
        #: devices that carry a share or are reserved for one
        self.sharing: dict[int, int] = {}
        mig = {p: spec.mig[p] for p in sorted(spec.mig)} if spec.mig else {}
        self.mig_idle, self.mig_later = dict(mig), dict(mig)
        #: MIG instances by device, (start, profile) each, on a node that partitions its devices; a device is here while it has any
        self.slots_idle: dict[int, list[tuple[int, str]]] = {}
        self.slots_later: dict[int, list[tuple[int, str]]] = {}
        self.legacy_mig = 0
        self.zones = [Zone(allocatable, idle) for allocatable, idle in spec.zones]

    def __repr__(self) -> str:
        return f"Node({self.name})"

    def take(self, request: Request, place: Place, idle: int, later: int) -> None:
        """Change what is idle and what will be by `idle` and `later` times (-1, 0, 1) what the rank takes in this place."""
        self.cpu_idle += idle * request.cpu_milli
        self.cpu_later += later * request.cpu_milli
        self.memory_idle += idle * request.memory_bytes
        self.memory_later += later * request.memory_bytes
        self.pods_idle += idle
        self.pods_later += later
        if place.mig:
            self._take_slots(place.mig, idle, later)
        elif place.devices:
            self._take_devices(request, place, idle, later)
        if self.spec.mig_layout is None:
            for profile, instances in request.mig:
                self.mig_idle[profile] = self.mig_idle.get(profile, 0) + idle * instances
                self.mig_later[profile] = self.mig_later.get(profile, 0) + later * instances
        if request.legacy_mig:
            self.legacy_mig -= idle
        if place.zones:
            numa.take(self.zones, place.zones, idle, later)

    def take_alike(self, request: Request, devices: list[int], ranks: int, idle: int, later: int) -> None:
        """Change it as `take` does, for so many ranks with the same plain request; `devices` are those of all of them."""
        self.cpu_idle += idle * ranks * request.cpu_milli
        self.cpu_later += later * ranks * request.cpu_milli
        self.memory_idle += idle * ranks * request.memory_bytes
        self.memory_later += later * ranks * request.memory_bytes
        self.pods_idle += idle * ranks
        self.pods_later += later * ranks
        for device in devices:
            self.dev_idle[device] += idle * self.full
            self.dev_later[device] += later * self.full
            self._set_masks(device)
        self.later_milli += later * GPU * len(devices)

    def share_of(self, request: Request) -> int:
        """Return what the request takes of each of its devices here, in the units of `full`; more than that if it cannot be had."""
        if request.whole:
            return self.full
        if request.memory_mib:
            return request.memory_mib * GPU if self.spec.gpu_memory_mib else self.full + 1
        return request.milli * max(1, self.spec.gpu_memory_mib)

    def _take_devices(self, request: Request, place: Place, idle: int, later: int) -> None:
        amount = self.share_of(request)
        for device in place.devices:
            self.dev_idle[device] += idle * amount
            self.dev_later[device] += later * amount
            self._set_masks(device)
            if not request.whole:
                self._note_share(device, idle, later)
        self.later_milli += later * place.milli * len(place.devices)

    def _set_masks(self, device: int) -> None:
        bit, full = 1 << device, self.full
        free_later = self.dev_later[device] == full
        self.later_mask = self.later_mask | bit if free_later else self.later_mask & ~bit
        self.now_mask = self.now_mask | bit if free_later and self.dev_idle[device] == full else self.now_mask & ~bit

    def _take_slots(self, slots: tuple[Slot, ...], idle: int, later: int) -> None:
        """Instances come (-1) or go (1). A device with any has nothing left for whole ranks and shares."""
        for device, start, profile in slots:
            if _change(self.slots_idle, device, (start, profile), idle):
                self.dev_idle[device] += idle * self.full
            if _change(self.slots_later, device, (start, profile), later):
                self.dev_later[device] += later * self.full
                self.later_milli += later * GPU
            self._set_masks(device)

    def _note_share(self, device: int, idle: int, later: int) -> None:
        """Count who uses the device in shares: a holder counts 2, of which leaving takes 1, and a reservation counts 1."""
        uses = self.sharing.get(device, 0) - idle - later
        if uses:
            self.sharing[device] = uses
        else:
            self.sharing.pop(device, None)


def _change(slots: dict[int, list[tuple[int, str]]], device: int, slot: tuple[int, str], by: int) -> bool:
    """Add an instance (by -1), take one away (1) or neither (0); whether it is the first, or the last, of its device."""
    if by < 0:
        slots.setdefault(device, []).append(slot)
        return len(slots[device]) == 1
    if by > 0:
        slots[device].remove(slot)
        if not slots[device]:
            del slots[device]
            return True
    return False
