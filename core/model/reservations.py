"""Reservations that people declare: nodes, or GPUs on them, that are kept for somebody, or for maintenance, in a window of time."""

from __future__ import annotations

import msgspec

#: GPUs of a node that stand for all of it
WHOLE = -1
#: names, nodes, queues and users of one reservation, at most
MAX_NODES = 10_000
MAX_OWNERS = 100


class KeptNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node, and how many of its GPUs are kept: WHOLE is everything on it."""

    node: str
    gpus: int = WHOLE


class Reservation(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One reservation. Times are log time; from `start_ms` to before `end_ms` it is in force."""

    name: str
    nodes: tuple[KeptNode, ...]
    start_ms: int
    end_ms: int
    #: whose jobs may use it: those of these queues, or below them, and of these users
    queues: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    #: nobody's jobs may: the nodes are drained
    maintenance: bool = False
    #: gangs that cannot be preempted have to leave so long after the start as well, in seconds; 0: they stay
    deadline_s: float = 0.0
    by: str = ""
    reason: str = ""

    def owned_by(self, queue: str, user: str) -> bool:
        """Whether jobs of a queue and a user may use it."""
        return not self.maintenance and (user in self.users or any(queue == q or queue.startswith(f"{q}/") for q in self.queues))

    def problem(self) -> str:
        """Return what is wrong with it, "" when nothing is."""
        if not self.name or not self.nodes:
            return "a reservation has a name and nodes"
        if self.end_ms <= self.start_ms:
            return "a reservation ends after its start"
        if len({kept.node for kept in self.nodes}) != len(self.nodes):
            return "a node appears twice"
        if self.maintenance == bool(self.queues or self.users):
            return "a reservation is either for maintenance, or for queues and users"
        return ""


class Declared(msgspec.Struct, omit_defaults=True, gc=False):
    """A reservation in the state, and whether its start has been acted on."""

    reservation: Reservation
    begun: bool = False
    #: removed before its end; it goes when its drained nodes are given back
    over: bool = False
    index: int = 0
