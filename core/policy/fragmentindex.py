"""Nodes by what they lose in worth (fragmentation.py) when a rank is placed on them: the best is found without looking at all of them.

For each kind of request the index keeps what every node would lose, and looks again only at nodes that have changed since the request was last
asked about. Only requests whose fit depends on nothing but the node are kept so (`keeps`); the others are scored one node at a time.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from gangline.core.policy import devices
from gangline.core.policy.fragmentation import CPU, Measure
from gangline.core.policy.linkaffinity import nearest_devices
from gangline.core.policy.nodes import Node, Place
from gangline.core.policy.predicates import right_kind, room
from gangline.core.policy.requests import GPU, Request

#: nodes noted as changed before all that is kept of them is dropped; a bound for memory only
_NOTED = 100_000


def keeps(request: Request) -> bool:
    """Whether the index can keep what it knows about such a request."""
    return not (request.memory_mib or request.stacked or request.mig or request.affinity or request.zone_bound or request.legacy_mig)


class _Ranking:
    """What each node would lose for one request: a heap in which older entries stay until they come up."""

    __slots__ = ("heap", "loss", "read")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, int]] = []
        #: by node: what it loses and the device to use, None where the request does not fit
        self.loss: dict[int, tuple[float, int] | None] = {}
        self.read = 0


class FragmentIndex:
    """Answers which node of some loses least. `changed` must be called for each node whose room has changed."""

    def __init__(self, measure: Measure, nodes: list[Node]) -> None:
        self.measure = measure
        self._nodes = {node.index: node for node in nodes}
        #: what a rank would take of NUMA zones decides on the node too; such nodes are not for this index
        self.usable = not any(node.zones for node in nodes)
        self._changes: list[int] = []
        self._rankings: dict[tuple[int, bool], _Ranking] = {}

    def changed(self, at: int) -> None:
        """Note that a node has changed."""
        self._changes.append(at)
        if len(self._changes) > _NOTED:
            self._changes.clear()
            self._rankings.clear()

    def best(self, request: Request, now: bool) -> Place | None:
        """Return the place that costs least, of equal ones on the first node by name; None if it fits nowhere."""
        ranking = self._rankings.get((request.number, now))
        if ranking is None:
            ranking = self._rankings[request.number, now] = _Ranking()
            names = None if request.nodes is None else set(request.nodes)
            kind = [at for at, node in self._nodes.items() if not request.count or (node.gpus >= request.count and right_kind(node, request))]
            for at in kind if names is None else [at for at in kind if self._nodes[at].name in names]:
                found = ranking.loss[at] = self._loss(self._nodes[at], request, now)
                if found is not None:
                    ranking.heap.append((found[0], at, found[1]))
            heapify(ranking.heap)
        else:
            for at in dict.fromkeys(self._changes[ranking.read :]):
                if at not in ranking.loss:
                    continue
                found = self._loss(self._nodes[at], request, now)
                if found is not None and found != ranking.loss[at]:
                    heappush(ranking.heap, (found[0], at, found[1]))
                ranking.loss[at] = found
        ranking.read = len(self._changes)
        heap = ranking.heap
        while heap:
            loss, at, device = heap[0]
            if ranking.loss[at] == (loss, device):
                return _place(self._nodes[at], request, device, now)
            heappop(heap)
        return None

    def _loss(self, node: Node, request: Request, now: bool) -> tuple[float, int] | None:
        found = self._lost(node, request, now)
        return None if found is None else (found[0] + CPU * (node.cpu_later - request.cpu_milli) / 1000, found[1])

    def _lost(self, node: Node, request: Request, now: bool) -> tuple[float, int] | None:
        """Return what the node would lose in worth, and the device of the best share (0 without one); None if the request does not fit."""
        whole = request.whole
        if whole and (node.now_mask if now else node.later_mask).bit_count() < request.count:
            return None
        if request.count and not whole and max(node.dev_later) < node.share_of(request):
            return None
        if not room(node, request, now):
            return None
        idle, worth = idle_of(node), self.measure.worth
        before, cpu = worth(node.model, node.cpu_later, idle), node.cpu_later - request.cpu_milli
        if not request.count:
            return before - worth(node.model, cpu, idle), 0
        if whole:
            rest = idle[: len(idle) - request.count]
            return before - worth(node.model, cpu, (*(0,) * request.count, *rest)), 0
        return self._share(node, request, now, (before, cpu, idle)) if request.count == 1 else self._spread(node, request, now, before)

    def _share(self, node: Node, request: Request, now: bool, state: tuple[float, int, tuple[int, ...]]) -> tuple[float, int] | None:
        """Try a share on every device with room; those with equal room are alike."""
        before, cpu, idle = state
        amount, best, tried = node.share_of(request), None, set()
        for device, later in enumerate(node.dev_later):
            if later in tried or not devices.takes_share(node, device, amount, now):
                continue
            tried.add(later)
            mine = later * GPU // node.full
            rest = list(idle)
            rest[rest.index(mine)] = mine - request.milli
            rest.sort()
            loss = before - self.measure.worth(node.model, cpu, tuple(rest))
            if best is None or loss < best[0]:
                best = (loss, device)
        return best

    def _spread(self, node: Node, request: Request, now: bool, before: float) -> tuple[float, int] | None:
        """Shares of several devices: on those that are fullest and have room."""
        found = devices.shares(node, request, now, "pack")
        if found is None:
            return None
        taken = [later * GPU // node.full - (request.milli if d in found[0] else 0) for d, later in enumerate(node.dev_later)]
        return before - self.measure.worth(node.model, node.cpu_later - request.cpu_milli, tuple(sorted(taken))), 0


def idle_of(node: Node) -> tuple[int, ...]:
    """Return what will be idle of each device of a node, in thousandths, sorted."""
    if node.full == GPU:
        return tuple(sorted(node.dev_later))
    return tuple(sorted(later * GPU // node.full for later in node.dev_later))


def _place(node: Node, request: Request, device: int, now: bool) -> Place:
    if not request.count:
        return Place(node)
    if request.whole:
        if now:
            return Place(node, nearest_devices(node.now_mask, request.count, node.spec.links), GPU)
        found = devices.whole(node, request.count, now)
        assert found is not None, f"{node} was found to have {request.count} devices"
        return Place(node, found, GPU)
    if request.count == 1:
        return Place(node, (device,), request.milli)
    several = devices.shares(node, request, now, "pack")
    assert several is not None, f"{node} was found to have {request.count} devices for shares"
    return Place(node, several[0], request.milli)
