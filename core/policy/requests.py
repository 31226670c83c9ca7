"""What one rank asks for, in the units in which everything is counted.

Amounts are whole numbers, so that taking something and giving it back restores exactly what was there: GPUs in thousandths of a device
(`GPU` = 1000), CPU in milli-cores, memory in bytes. A *vector* is the triple of these, in that order. Queues are charged with vectors.

A rank asks for devices in one of four ways, or for none:

whole   `count` devices for itself
share   `milli` thousandths of each of `count` devices, on which others may have shares too
memory  `memory_mib` of the memory of each of `count` devices: a share whose size depends on the device that it gets
MIG     instances by profile, on nodes that are partitioned already, or that partition their GPUs as they are asked (migplan.py)

Requests are interned by the world (`World.intern`): equal requests are one object, and its `number` stands for all that matters when a rank is
placed. So what failed for one rank is known to fail for every other one with the same number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gangline.core.model.gpushares import GPU as GPU
from gangline.core.model.gpushares import mig_gpus as mig_gpus
from gangline.core.model.gpushares import share_of_memory as share_of_memory

Vector = tuple[int, int, int]

#: larger than every real amount: no quota, no limit
UNLIMITED = 1 << 62
#: names of the entries of a vector, in order
RESOURCES = ("gpu", "cpu", "memory")
ZERO: Vector = (0, 0, 0)


def add(a: Vector, b: Vector) -> Vector:
    """Return a + b."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def subtract(a: Vector, b: Vector) -> Vector:
    """Return a - b."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def within(a: Vector, limit: Vector) -> bool:
    """Whether a is at most `limit` in every resource."""
    return a[0] <= limit[0] and a[1] <= limit[1] and a[2] <= limit[2]


@dataclass(frozen=True)
class Affinity:
    """Which other ranks a rank wants near, or not near: `attract` and `repel` name node labels ("hostname" is the node itself)."""

    labels: tuple[tuple[str, str], ...] = ()
    attract: str = ""
    repel: str = ""


@dataclass(frozen=True)
class Request:
    """What one rank asks for. Equal requests are placed alike."""

    #: whole devices, or devices of which a share is wanted
    count: int = 0
    #: thousandths of each device: GPU for whole ones, 0 when `memory_mib` decides
    milli: int = GPU
    memory_mib: int = 0
    #: its shares may be on one device: they are those of several ranks that are placed together
    stacked: bool = False
    #: (profile, instances), sorted by profile
    mig: tuple[tuple[str, int], ...] = ()
    cpu_milli: int = 0
    memory_bytes: int = 0
    #: names of the only nodes that will do, sorted; None: any
    nodes: tuple[str, ...] | None = None
    affinity: Affinity | None = None
    #: CPU and memory must come from the NUMA zones of the node, where it has such
    zone_bound: bool = False
    #: asks for MIG devices in a way that is no longer served: never placed anew
    legacy_mig: bool = False
    #: given by World.intern; not part of its value
    number: int = field(default=-1, compare=False)

    @property
    def whole(self) -> bool:
        """Asks for whole devices."""
        return self.count > 0 and self.milli == GPU and not self.memory_mib

    @property
    def shared(self) -> bool:
        """Asks for shares of devices."""
        return self.count > 0 and not self.whole

    @property
    def plain(self) -> bool:
        """Only counts decide where it fits: whole devices or none, CPU and memory, on any node."""
        return not (self.shared or self.mig or self.affinity or self.zone_bound or self.legacy_mig or self.nodes is not None)

    def milli_on(self, device_memory_mib: int) -> int:
        """Return the thousandths that it takes of each device with this much memory."""
        return share_of_memory(self.memory_mib, device_memory_mib) if self.memory_mib else self.milli

    def vector(self, device_memory_mib: int) -> Vector:
        """Return what a queue is charged for it on devices with this much memory."""
        gpus = self.count * self.milli_on(device_memory_mib) if self.count else 0
        for profile, instances in self.mig:
            gpus += instances * mig_gpus(profile) * GPU
        return (gpus, self.cpu_milli, self.memory_bytes)
