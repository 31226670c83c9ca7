"""Which devices of a node a rank gets.

Whole devices: those that are free now, near each other where the node says how they are linked (linkaffinity.py), else lowest first; for a
reservation those that are leaving come first, so that idle ones stay idle. A rank that is put back on its own node gets its own devices again if
it can.

Shares: `pack` takes the fullest device that has room, an untouched one last; `spread` takes an untouched one first, then the emptiest. A
device that is only reserved for shares cannot be started on yet: whoever joins it waits as well.
"""

from __future__ import annotations

from gangline.core.policy.linkaffinity import nearest_devices
from gangline.core.policy.nodes import Node, Place
from gangline.core.policy.requests import Request


def whole(node: Node, count: int, now: bool, own: Place | None = None) -> tuple[int, ...] | None:
    """Return `count` devices that are free now, or later; None if there are not as many."""
    if own is not None and own.node is node and all(node.later_mask >> d & 1 for d in own.devices):
        return own.devices
    if now:
        return nearest_devices(node.now_mask, count, node.spec.links) if node.now_mask.bit_count() >= count else None
    mask = node.later_mask
    if mask.bit_count() < count:
        return None
    first: tuple[int, ...] = ()
    if own is not None and own.node is node:
        first = tuple(d for d in own.devices if mask >> d & 1)[:count]
        for d in first:
            mask &= ~(1 << d)
    leaving = mask & ~node.now_mask
    taken = min(count - len(first), leaving.bit_count())
    rest = nearest_devices(mask & node.now_mask, count - len(first) - taken, node.spec.links)
    return tuple(sorted((*first, *nearest_devices(leaving, taken, node.spec.links), *rest)))


def takes_share(node: Node, device: int, amount: int, now: bool) -> bool:
    """Whether the device can take a share of this size (Node.share_of), now or later."""
    later = node.dev_later[device]
    if later < amount:
        return False
    if not now:
        return True
    idle = node.dev_idle[device]
    return idle >= amount and (idle < node.full or later == node.full)


def shared_fits(node: Node, request: Request) -> bool:
    """Whether a device that already carries a share can take this one, now or later."""
    amount = node.share_of(request)
    return any(node.dev_later[d] >= amount for d in node.sharing)


def shares(node: Node, request: Request, now: bool, strategy: str) -> tuple[tuple[int, ...], bool] | None:
    """Return the devices for the shares and whether one of them has to be waited for; None if there are not enough."""
    amount = node.share_of(request)
    if amount > node.full:
        return None
    if request.stacked:
        return _stacked(node, request, amount, now, strategy)
    fitting = [d for d in _candidates(node) if takes_share(node, d, amount, now=False)]
    if len(fitting) < request.count:
        return None
    if now:
        ready = sum(1 for d in fitting if takes_share(node, d, amount, now=True))
        if ready < request.count:
            return None
    fitting.sort(key=lambda d: _share_key(node, d, strategy))
    chosen = fitting[: request.count]
    return tuple(sorted(chosen)), not all(takes_share(node, d, amount, now=True) for d in chosen)


def _stacked(node: Node, request: Request, amount: int, now: bool, strategy: str) -> tuple[tuple[int, ...], bool] | None:
    """Place the shares one after another, each on the first device in the order that still has room beside those before it."""
    chosen: list[int] = []
    waits = False
    for device in sorted(_candidates(node), key=lambda d: _share_key(node, d, strategy)):
        ready = takes_share(node, device, amount, now=True)
        if now and not ready:
            continue
        room = min(node.dev_later[device], node.dev_idle[device]) if ready else node.dev_later[device]
        fits = min(room // amount, request.count - len(chosen)) if amount else request.count - len(chosen)
        chosen += [device] * max(0, fits)
        waits = waits or (fits > 0 and not ready)
    return (tuple(sorted(chosen)), waits) if len(chosen) == request.count else None


def _candidates(node: Node) -> list[int]:
    mask = node.later_mask
    whole_later = [d for d in range(node.gpus) if mask >> d & 1 and d not in node.sharing]
    return [*node.sharing, *whole_later]


def _share_key(node: Node, device: int, strategy: str) -> tuple[int, int, int, int]:
    touched = device in node.sharing
    used = node.full - node.dev_later[device]
    waits = 0 if node.now_mask >> device & 1 or touched else 1
    if strategy == "spread":
        return (1 if touched else 0, waits, used, device)
    if strategy == "pack":
        return (0 if touched else 1, waits, -used, device)
    return (0, waits, 0, device)
