"""Where a gang fits: all of it or none of it, on the fewest and fullest nodes that do.

The first policy, blind to topology: nodes of one GPU model if possible, in the job's order of preference; a gang that fits on one node goes to
the node that it fills best; a larger one to the emptiest nodes, and its remainder where it fills best.
"""

from __future__ import annotations

import msgspec

from gangline.core.model.events import PlacedPart, PlacedRank
from gangline.core.model.state import Job, Node, State


class Room(msgspec.Struct):
    """What is free on one node for the gang in question."""

    node: str
    model: str
    gpus: list[int]
    cpus_milli: int
    memory_mib: int


class Refusal(msgspec.Struct, frozen=True):
    """Why a gang is not placed: the constraint that bound, with its numbers."""

    code: str
    message: str
    need: dict[str, int] = {}
    have: dict[str, int] = {}


class FreeView:
    """What-if copy of the free capacity: placements of one pass are taken from it, the state stays as it is."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.rooms = {n.id: _room(n) for n in state.nodes.values() if n.schedulable}

    def take(self, job: Job, parts: tuple[PlacedPart, ...]) -> None:
        """Subtract a placement."""
        res = job.spec.resources
        for part in parts:
            room = self.rooms[part.node]
            used = {g for r in part.ranks for g in r.gpus}
            room.gpus = [g for g in room.gpus if g not in used]
            room.cpus_milli -= len(part.ranks) * res.cpus_milli
            room.memory_mib -= len(part.ranks) * res.memory_mib

    def for_job(self, job: Job, now_ms: int) -> list[Room]:
        """Return the rooms as this gang sees them: without the nodes it avoids, and with what its own dying ranks still hold."""
        rooms = [r for r in self.rooms.values() if job.avoid.get(r.node, 0) <= now_ms]
        return [self._with_own(job, r) for r in rooms] if job.previous_nodes else rooms

    def _with_own(self, job: Job, room: Room) -> Room:
        node = self._state.nodes[room.node]
        own = node.holdings.get(job.id)
        if own is None:
            return room
        healthy = {g.index for g in node.registration.gpus if g.healthy}
        gpus = sorted({*room.gpus, *(g for g in own.gpus if g in healthy)})
        return Room(room.node, room.model, gpus, room.cpus_milli + own.cpus_milli, room.memory_mib + own.memory_mib)


def _room(node: Node) -> Room:
    gpus = node.registration.gpus
    return Room(node.id, gpus[0].model if gpus else "", list(node.free_gpus), node.free_cpus_milli, node.free_memory_mib)


def shape(job: Job) -> tuple[object, ...]:
    """Return what alone decides whether a gang without history can be placed: equal shapes fail together."""
    return (job.spec.gang, job.spec.resources)


def place(job: Job, rooms: list[Room]) -> tuple[PlacedPart, ...] | Refusal:
    """Return the parts of the whole gang, or the reason why it does not fit into `rooms`."""
    if not rooms:
        return Refusal("no_nodes", "no node takes new ranks: all are lost, cordoned, draining or avoided by this job")
    models = job.spec.resources.gpu_models
    usable = [r for r in rooms if r.model in models] if models and job.spec.resources.gpus else rooms
    if not usable:
        return Refusal("no_such_model", f"no node that takes new ranks has a GPU of model {' or '.join(models)}")
    for model in models or sorted({r.model for r in usable}):
        parts = _fill(job, [r for r in usable if r.model == model], elastic=False)
        if parts:
            return parts
    return _fill(job, usable, elastic=True) or _refusal(job, usable)


def _fill(job: Job, rooms: list[Room], elastic: bool) -> tuple[PlacedPart, ...] | None:
    gang = job.spec.gang
    fits = sorted(((capacity, r) for r in rooms if (capacity := _capacity(job, r))), key=lambda c: (-c[0], c[1].node))
    total = sum(c for c, _ in fits)
    ranks = gang.ranks
    if total < ranks:
        step = gang.ranks_per_node or 1
        ranks = total // step * step
        if not elastic or ranks < gang.min_ranks:
            return None
    chosen: list[tuple[Room, int]] = []
    while ranks:
        # The node that the remainder fills best, else the emptiest one.
        best = min((i for i in range(len(fits)) if fits[i][0] >= ranks), key=lambda i: (fits[i][0], i), default=0)
        capacity, room = fits.pop(best)
        chosen.append((room, min(capacity, ranks)))
        ranks -= min(capacity, ranks)
    return _parts(job, chosen)


def _capacity(job: Job, room: Room) -> int:
    """How many ranks the room holds."""
    res = job.spec.resources
    limits = [
        *([len(room.gpus) // res.gpus] if res.gpus else []),
        *([room.cpus_milli // res.cpus_milli] if res.cpus_milli else []),
        *([room.memory_mib // res.memory_mib] if res.memory_mib else []),
    ]
    capacity = max(0, min(limits, default=job.spec.gang.ranks))
    exact = job.spec.gang.ranks_per_node
    return capacity if not exact else exact if capacity >= exact else 0


def _parts(job: Job, chosen: list[tuple[Room, int]]) -> tuple[PlacedPart, ...]:
    per_rank = job.spec.resources.gpus
    parts: list[PlacedPart] = []
    number = 0
    for room, count in sorted(chosen, key=lambda c: c[0].node):
        ranks = tuple(PlacedRank(number + i, tuple(room.gpus[i * per_rank : (i + 1) * per_rank])) for i in range(count))
        parts.append(PlacedPart(room.node, ranks))
        number += count
    return tuple(parts)


def _refusal(job: Job, rooms: list[Room]) -> Refusal:
    gang, res = job.spec.gang, job.spec.resources
    per_rank = {"gpus": res.gpus, "cpus_milli": res.cpus_milli, "memory_mib": res.memory_mib}
    need = {what: gang.min_ranks * amount for what, amount in per_rank.items()}
    have = {
        "gpus": sum(len(r.gpus) for r in rooms),
        "cpus_milli": sum(r.cpus_milli for r in rooms),
        "memory_mib": sum(r.memory_mib for r in rooms),
    }
    words = {"gpus": "GPUs", "cpus_milli": "CPU milli-cores", "memory_mib": "MiB of memory"}
    for what in need:
        if need[what] > have[what]:
            return Refusal(f"not_enough_{what.split('_')[0]}", f"needs {need[what]} {words[what]}, {have[what]} are free", need, have)
    per_node = f" {gang.ranks_per_node} on each node" if gang.ranks_per_node else ""
    held = sum(_capacity(job, r) for r in rooms)
    message = f"needs room for {gang.min_ranks} ranks{per_node}; enough is free in all, but the nodes have room for {held} as it is spread now"
    return Refusal("fragmented", message, need | {"ranks": gang.min_ranks}, have | {"ranks": held})
