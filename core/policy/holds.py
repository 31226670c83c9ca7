"""Holds: room that is kept from some, within a session.

A hold belongs to a waiting gang with a reservation (reserve.py). While it is *on*, what the gang needs beyond what others will have given back
by its start is covered on each of its nodes: it is not free for anybody, now or later.

- it is off for the gang itself, and for those who come before the gang in the order: a reservation serves the order, it does not turn it round;
- once the gang has been refused in a pass, it is on for all who come after it;
- and it is lifted for a job that will have ended by then (backfill.py).

A hold of a reservation that people have declared (windows.py) is on from the start, for all but whom the reservation admits.

Covering and lifting are written to the world's journal, like all that a session does, and are undone with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gangline.core.policy.gangs import Job, PodsetGroup, Rank
from gangline.core.policy.nodes import Node, Place
from gangline.core.policy.queues import Queue, QueueSpec
from gangline.core.policy.requests import GPU, Request


@dataclass(frozen=True)
class Want:
    """What is to be kept on one node: devices, CPU and memory that will not come from those who end in time."""

    node: str
    gpus: int
    cpu_milli: int
    memory_bytes: int


@dataclass
class Hold:
    """Room that is kept. `name` is the job it is for."""

    name: str
    #: log time at which it is needed; None: as soon as it has come together
    starts_ms: int | None
    wants: tuple[Want, ...]
    #: of a reservation that people have declared (windows.py): on from the start of the session, and its name
    always: bool = False
    reservation: str = ""
    maintenance: bool = False
    #: predictions count for who may use it until then; not any more once the first promise of a start was broken
    trusting: bool = True
    #: what covers it now, one for each node: kept by World
    covers: dict[Rank, Place] = field(default_factory=dict)
    #: less was there than is to be kept, though the time is known from which it is to be there
    short: bool = False

    @property
    def on(self) -> bool:
        """Whether anything is covered."""
        return bool(self.covers)


class Holds:
    """All holds of a session by name, and which are on."""

    def __init__(self, holds: list[Hold], leaves: Callable[[Job, Hold], bool] = lambda _job, _hold: False) -> None:
        """`leaves` tells whether a job that is placed now will be out of the way of a hold."""
        self.by_name = {hold.name: hold for hold in holds}
        self.leaves = leaves
        self._queue = Queue(QueueSpec("gangline/holds", ""), None)
        self._count = 0

    def of(self, job: Job) -> Hold | None:
        """Return the hold of a gang."""
        return self.by_name.get(job.name)

    def on(self) -> list[Hold]:
        """Return the holds that are on."""
        return [hold for hold in self.by_name.values() if hold.on]

    def of_gangs(self) -> list[Hold]:
        """Return the holds of waiting gangs that are on."""
        return [hold for hold in self.on() if not hold.always]

    def closed_to(self, job: Job) -> dict[str, None]:
        """Return the nodes that declared reservations keep a job off, wholly or in part."""
        closed = (hold for hold in self.by_name.values() if hold.always and not self.leaves(job, hold))
        return {want.node: None for hold in closed for want in hold.wants}

    def cover_of(self, hold: Hold, want: Want, node: Node) -> tuple[Rank, Place]:
        """Return what is to be covered of a node: what is wanted, as far as it is there."""
        free = [d for d in range(node.gpus) if node.later_mask >> d & 1]
        devices = tuple(free[: want.gpus])
        cpu, memory = min(want.cpu_milli, max(0, node.cpu_later)), min(want.memory_bytes, max(0, node.memory_later))
        lacks = len(devices) < want.gpus or cpu < want.cpu_milli or memory < want.memory_bytes
        hold.short = hold.short or (hold.starts_ms is not None and lacks)
        job = Job(hold.name, self._queue, priority=0, preemptible=False, order=0, root=PodsetGroup("", None, []))
        self._count += 1
        request = Request(count=len(devices), milli=GPU, cpu_milli=cpu, memory_bytes=memory)
        return Rank(job, 0, f"{hold.name}/hold-{self._count}", request, None), Place(node, devices, GPU if devices else 0)
