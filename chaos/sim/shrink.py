"""Make a failing run small: leave out faults, jobs and noise for as long as it still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from gangline.chaos.sim.many import Order, carry_out
from gangline.chaos.sim.play import Outcome, plan_of
from gangline.chaos.sim.scenario import scenario_of

#: what is tried at most in this time is enough for a person to begin with
LIMIT_S = 60.0


def shrink(order: Order, outcome: Outcome, *, limit_s: float = LIMIT_S, play: Callable[[Order], Outcome] = carry_out) -> tuple[Order, Outcome]:
    """Return a run with fewer parts that violates the same as `outcome`, and what comes of it. Delta debugging, Zeller 2002: ddmin."""
    kind = _kind(outcome)
    until = time.perf_counter() + limit_s
    kept = plan_of(order.seed, scenario_of(order.mix, order.seed, order.nodes)).only(order.only).ids()

    def attempt(ids: list[str]) -> bool:
        nonlocal order, outcome, kept
        smaller = msgspec.structs.replace(order, only=frozenset(ids))
        found = play(smaller)
        if not found.violations or _kind(found) != kind:
            return False
        order, outcome, kept = smaller, found, ids
        return True

    pieces = 2
    while len(kept) > 1 and time.perf_counter() < until:
        size = max(1, len(kept) // pieces)
        smaller = False
        at = 0
        while at < len(kept) and time.perf_counter() < until:
            if attempt(kept[:at] + kept[at + size :]):
                smaller = True  # what followed stands at the same place now
            else:
                at += size
        if size == 1 and not smaller:
            break
        pieces = 2 if smaller and size > 1 and len(kept) < pieces else pieces * 2 if size > 1 else pieces
    return order, outcome


def _kind(outcome: Outcome) -> str:
    """Return what is violated first: the name of an assertion, or the beginning of a sentence."""
    first = outcome.violations[0]
    return " ".join(first.split()[:1] if first.startswith("S") else first.split()[:3])
