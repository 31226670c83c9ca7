"""NUMA zones of a node: which zones a rank gets its CPU, memory and devices from.

Only nodes that declare zones take part, and only ranks with a guaranteed quality of service are bound by CPU and memory; devices bind every
rank, where the zones name them. Two policies bind: `single-numa-node` wants everything from one zone; `restricted` wants the smallest set of
zones that could ever hold the rank (by what the zones have in all), and waits until such a set has room. Among equal sets the one with the
lowest zone numbers is taken. As elsewhere, what leaves may be reserved: each zone counts what is idle and what will be.
"""

from __future__ import annotations

from itertools import combinations

from gangline.core.policy.requests import GPU, Request, Vector

#: what a rank takes from which zone: (zone, vector)
ZoneUse = tuple[tuple[int, Vector], ...]


class Zone:
    """One zone: what it has in all, what is idle, and what will be when everything that leaves has left. None: does not bind."""

    __slots__ = ("allocatable", "idle", "later")

    def __init__(self, allocatable: tuple[int | None, int | None, int | None], idle: tuple[int | None, int | None, int | None]) -> None:
        self.allocatable = allocatable
        self.idle = list(idle)
        self.later = list(idle)


def zones_for(zones: list[Zone], policy: str, request: Request, now: bool) -> ZoneUse | None:
    """Return which zones the rank would use, () if it is not bound, None if there is no room (now, or after what leaves has left)."""
    need = _need(request)
    if policy not in ("single-numa-node", "restricted") or not any(need):
        return ()
    largest = 1 if policy == "single-numa-node" else len(zones)
    for size in range(1, largest + 1):
        sets = [c for c in combinations(range(len(zones)), size) if _split(zones, c, need, "allocatable") is not None]
        if not sets:
            continue
        for chosen in sets:
            use = _split(zones, chosen, need, "now" if now else "later")
            if use is not None:
                return use
        return None
    return None


def have_room(zones: list[Zone], use: ZoneUse) -> bool:
    """Whether the zones will have room for this use again, when what is leaving has left."""
    for z, amounts in use:
        for r in range(3):
            later = zones[z].later[r]
            if later is not None and later < amounts[r]:
                return False
    return True


def _need(request: Request) -> Vector:
    gpus = request.count * GPU if request.whole else 0
    return (gpus, request.cpu_milli, request.memory_bytes) if request.zone_bound else (gpus, 0, 0)


def _split(zones: list[Zone], chosen: tuple[int, ...], need: Vector, what: str) -> ZoneUse | None:
    left = list(need)
    taken = [[0, 0, 0] for _ in chosen]
    for r in range(3):
        if all(zones[z].allocatable[r] is None for z in chosen):
            left[r] = 0
            continue
        for at, z in enumerate(chosen):
            amount = min(left[r], max(0, _room(zones[z], r, what)))
            taken[at][r] = amount
            left[r] -= amount
    if any(left):
        return None
    return tuple((z, (t[0], t[1], t[2])) for z, t in zip(chosen, taken, strict=True) if any(t))


def _room(zone: Zone, r: int, what: str) -> int:
    if what == "allocatable":
        return zone.allocatable[r] or 0
    idle, later = zone.idle[r], zone.later[r]
    if idle is None or later is None:
        return 0
    return min(idle, later) if what == "now" else later


def take(zones: list[Zone], use: ZoneUse, idle: int, later: int) -> None:
    """Change what is idle and what will be by `idle` and `later` times the use (-1, 0 or 1)."""
    for z, amounts in use:
        zone = zones[z]
        for r in range(3):
            was_idle, was_later = zone.idle[r], zone.later[r]
            if was_idle is not None and was_later is not None:
                zone.idle[r] = was_idle + idle * amounts[r]
                zone.later[r] = was_later + later * amounts[r]
