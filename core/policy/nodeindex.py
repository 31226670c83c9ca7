"""Nodes sorted by how full they are, so that the best node for a rank is found without looking at all of them.

An index covers all nodes or those of one topology domain. It reads from `World.touched` which nodes have changed since it was last asked, so
changes cost nothing until somebody asks, and then only what has changed is sorted in again.

Nodes with devices are in one bucket for each combination of (what will be idle, devices free now, devices free later, GPU model); there are few
of these.
For ranks without devices all nodes are sorted by idle CPU, those that have no devices apart.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from heapq import merge

from gangline.core.policy.fragmentation import Measure
from gangline.core.policy.fragmentindex import FragmentIndex
from gangline.core.policy.migplan import has_room
from gangline.core.policy.nodes import Node
from gangline.core.policy.world import World

#: what will be idle in thousandths of a device, devices free now, devices free later, their model
Bucket = tuple[int, int, int, str]


class NodeIndex:
    """An index of some of the world's nodes. It is void when nodes are added or removed (World.node_version)."""

    def __init__(self, world: World, nodes: list[Node]) -> None:
        self._world = world
        #: in the order of names
        self.nodes = nodes
        self.version = world.node_version
        self._read = len(world.touched)
        self._bucket_of: dict[int, Bucket] = {}
        self._buckets: dict[Bucket, list[int]] = {}
        self._cpu_of: dict[int, int] = {}
        #: by idle CPU; [0] nodes without devices, [1] nodes with
        self._cpu: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._sharers: dict[int, None] = {}
        self._partitioned: dict[int, None] = {}
        self._members = {n.index: n for n in nodes}
        self._worth: FragmentIndex | None = None
        for node in nodes:
            bucket = (node.later_milli, node.now_mask.bit_count(), node.later_mask.bit_count(), node.model)
            self._bucket_of[node.index] = bucket
            self._buckets.setdefault(bucket, []).append(node.index)
            self._cpu_of[node.index] = node.cpu_later
            self._cpu[1 if node.gpus else 0].append((node.cpu_later, node.index))
            if _can_share(node):
                self._sharers[node.index] = None
            if node.slots_later and has_room(node):
                self._partitioned[node.index] = None
        for some in self._cpu:
            some.sort()

    def sync(self) -> None:
        """Sort in again what has changed."""
        touched = self._world.touched
        if self._read >= len(touched):
            self._read = len(touched)
            return
        for at in dict.fromkeys(touched[self._read :]):
            node = self._members.get(at)
            if node is not None:
                self._update(at, node)
        self._read = len(touched)

    def forget_touched(self) -> None:
        """Empty the world's list of changes. Only for the one index that lives as long as the world, between sessions."""
        self.sync()
        self._world.touched.clear()
        self._read = 0

    def by_worth(self, measure: Measure) -> FragmentIndex:
        """Return the nodes by what they lose in worth, as this measure has it."""
        self.sync()
        if self._worth is None or self._worth.measure is not measure:
            self._worth = FragmentIndex(measure, self.nodes)
        return self._worth

    def _update(self, at: int, node: Node) -> None:
        if self._worth is not None:
            self._worth.changed(at)
        bucket = (node.later_milli, node.now_mask.bit_count(), node.later_mask.bit_count(), node.model)
        old = self._bucket_of[at]
        if bucket != old:
            some = self._buckets[old]
            del some[bisect_left(some, at)]
            if not some:
                del self._buckets[old]
            insort(self._buckets.setdefault(bucket, []), at)
            self._bucket_of[at] = bucket
        cpu = self._cpu_of[at]
        if cpu != node.cpu_later:
            line = self._cpu[1 if node.gpus else 0]
            del line[bisect_left(line, (cpu, at))]
            insort(line, (node.cpu_later, at))
            self._cpu_of[at] = node.cpu_later
        if _can_share(node):
            self._sharers[at] = None
        else:
            self._sharers.pop(at, None)
        if node.slots_later and has_room(node):
            self._partitioned[at] = None
        elif self._partitioned:
            self._partitioned.pop(at, None)

    def room_for(self, devices: int) -> int:
        """Return how many ranks with so many whole devices the nodes have devices for, when what is leaving has left."""
        self.sync()
        return sum(bucket[2] // devices * len(some) for bucket, some in self._buckets.items())

    def fullest(self, devices: int, now: bool, without: Collection[str] = ()) -> Iterator[Node]:
        """Return the nodes with so many devices free, now or later, of other models than these: the fullest first, then by name."""
        self.sync()
        buckets = sorted(b for b in self._buckets if (b[1] if now else b[2]) >= devices and b[3] not in without)
        at = 0
        while at < len(buckets):
            end = at
            while end < len(buckets) and buckets[end][0] == buckets[at][0]:
                end += 1
            lists = [self._buckets[b] for b in buckets[at:end]]
            for index in lists[0] if len(lists) == 1 else merge(*lists):
                yield self._members[index]
            at = end

    def least_cpu(self, cpu_milli: int) -> Iterator[Node]:
        """Return the nodes where so much CPU will be idle: those without devices first, then the fullest, then by name."""
        self.sync()
        for line in self._cpu:
            for _, index in line[bisect_left(line, (cpu_milli, -1)) :]:
                yield self._members[index]

    def sharing(self) -> list[Node]:
        """Return the nodes on which some device carries a share and has room for more, by name."""
        self.sync()
        return [self._members[at] for at in sorted(self._sharers)]

    def partitioned(self) -> list[Node]:
        """Return the nodes on which some device has MIG instances, and goes on having some, and room for more, by name."""
        self.sync()
        return [self._members[at] for at in sorted(self._partitioned)]


def _can_share(node: Node) -> bool:
    return any(node.dev_later[device] > 0 for device in node.sharing)
