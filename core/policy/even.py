"""Equal numbers of units in the domains of one level of a topology. A unit is a rank, or a replica of several ranks that is placed whole.

    spread     each next unit goes to the domain with the fewest of them that has room: as many domains as possible
    balanced   the fewest domains that can have numbers which differ by at most one; of these the ones with the least room that will do,
               so that large holes stay whole. Where no such split exists, the fewest domains that hold all, filled as equally as they allow

A bound on the skew (the most units in a domain less the fewest) makes either a demand. For `spread` every domain counts that has a node which
takes ranks and could run one, a full one too; for `balanced` the domains that are used.

Balanced placement is Kueue's (KEP-2724, BalancedPlacement), with numbers that differ by one instead of "at least so many in each"; spread is
the topology spread constraint of Kubernetes, with maxSkew and whenUnsatisfiable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Generic, TypeVar

from gangline.core.policy import refusals
from gangline.core.policy.gangs import Constraint
from gangline.core.policy.refusals import Refusal

U = TypeVar("U")

#: splits that are tried for one gang: a split may fail because room was counted that is in pieces
_TRIES = 8


class Evenly(Generic[U]):
    """Places units in domains, by a function that places one of them in the domain of a position or says that it has no room there."""

    def __init__(self, constraint: Constraint, have: list[int], attempt: Callable[[U, int], bool]) -> None:
        """`have` is how many units each domain has already."""
        self._skew = constraint.max_skew
        self._level = constraint.spread or constraint.balanced
        self._have = have
        self._attempt = attempt
        #: why the units were not placed: there when the bound on the skew is to blame
        self.refusal: Refusal | None = None

    def spread(self, units: list[U]) -> bool:
        """Place all units, or return False with some of them placed: the caller rolls back."""
        waiting = [(count, d) for d, count in enumerate(self._have)]
        heapify(waiting)
        fewest_full = len(units) + sum(self._have)  # of the domains without room: more than any has
        for unit in units:
            while waiting:
                count, d = waiting[0]
                if self._skew and count + 1 - min(count, fewest_full) > self._skew:
                    self.refusal = refusals.skew_too_large(len(units), self._level, self._skew, len(self._have))
                    return False
                if self._attempt(unit, d):
                    heapreplace(waiting, (count + 1, d))
                    break
                heappop(waiting)  # units are alike: the next one has no room there either
                fewest_full = min(fewest_full, count)
            else:
                return False
        return True

    def balanced(self, units: list[U], rooms: list[int], begin: Callable[[], None]) -> bool:
        """Place all units, or return False. `rooms` is for how many units each domain has room; `begin` takes back what was placed."""
        for split in islice(splits(rooms, self._have, len(units), self._skew), _TRIES):
            begin()
            domain_of = (d for d, share in enumerate(split) for _ in range(share))
            if all(self._attempt(unit, d) for unit, d in zip(units, domain_of, strict=True)):
                return True
        begin()
        if self._skew and sum(rooms) >= len(units):
            self.refusal = refusals.skew_too_large(len(units), self._level, self._skew, len(rooms))
        return False


def splits(rooms: list[int], have: list[int], units: int, max_skew: int = 0) -> Iterator[list[int]]:
    """Yield how many of the units to put into each domain, the best split first; nothing where the bound on the skew allows none.

    A domain that has units already is used by every split. Without a bound (0) the last split is one that may be uneven.
    """
    used = [d for d, count in enumerate(have) if count]
    extras = sorted((d for d, room in enumerate(rooms) if room and not have[d]), key=lambda d: (rooms[d], d))
    total = units + sum(have)
    most = min(len(used) + len(extras), len(used) + units)
    for k in range(max(1, len(used)), most + 1):
        chosen = _even(rooms, have, used, extras, k, total)
        if chosen is not None:
            yield _fill(rooms, have, chosen, units)
    if max_skew == 1:
        return
    for k in range(max(1, len(used)), most + 1):
        chosen = used + extras[len(extras) - (k - len(used)) :] if k > len(used) else used
        fewest = min(rooms[d] + have[d] for d in chosen)
        if sum(rooms[d] for d in chosen) < units or (max_skew and -(-total // k) - fewest > max_skew):
            continue
        found = _fill(rooms, have, sorted(chosen), units)
        counts = [found[d] + have[d] for d in chosen]
        if not max_skew or max(counts) - min(counts) <= max_skew:
            yield found
            return


def _even(rooms: list[int], have: list[int], used: list[int], extras: list[int], k: int, total: int) -> list[int] | None:
    """Return k domains that can have the total in numbers that differ by at most one, with the least room among those not used yet."""
    each, more = divmod(total, k)
    if any(have[d] > each + 1 or have[d] + rooms[d] < each for d in used) or sum(have[d] > each for d in used) > more:
        return None
    first, big = bisect_left(extras, each, key=rooms.__getitem__), bisect_left(extras, each + 1, key=rooms.__getitem__)
    large = max(0, more - sum(have[d] + rooms[d] > each for d in used))
    small = min(big - first, k - len(used) - large)
    large = k - len(used) - small
    if small < 0 or each == 0 or big + large > len(extras):
        return None
    return sorted([*used, *extras[first : first + small], *extras[big : big + large]])


def _fill(rooms: list[int], have: list[int], chosen: list[int], units: int) -> list[int]:
    """Return shares of the units in the chosen domains that raise the lowest numbers first, as far as there is room."""
    shares = [0] * len(rooms)
    low, high = 0, max((have[d] + rooms[d] for d in chosen), default=0)
    while low < high:  # the highest level that all can be raised to, as far as they have room
        level = (low + high + 1) // 2
        if sum(max(0, min(level, have[d] + rooms[d]) - have[d]) for d in chosen) <= units:
            low = level
        else:
            high = level - 1
    for d in chosen:
        shares[d] = max(0, min(low, have[d] + rooms[d]) - have[d])
    left = units - sum(shares)
    for d in sorted(chosen):
        if left and shares[d] + have[d] == low and shares[d] < rooms[d]:
            shares[d] += 1
            left -= 1
    return shares
