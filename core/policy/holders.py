"""Who holds what a waiting job is short of."""

from __future__ import annotations

from gangline.core.policy.refusals import Refusal
from gangline.core.policy.requests import RESOURCES
from gangline.core.policy.world import World


def holders(world: World, refusal: Refusal, most: int = 3) -> tuple[str, ...]:
    """Return what the refusal names as holders, else the leaf queues that are allocated most of what is short, the largest first.

    What is short is the first resource of which less is there than needed; if there is enough in all, the first that is needed.
    """
    if refusal.holders:
        return refusal.holders
    asked = [r for r, name in enumerate(RESOURCES) if refusal.need.get(name)]
    if not asked:
        return ()
    short = next((r for r in asked if refusal.have.get(RESOURCES[r], 0) < refusal.need[RESOURCES[r]]), asked[0])
    leaves = [q for q in world.queues.values() if not q.children and q.allocated[short] > 0]
    return tuple(q.name for q in sorted(leaves, key=lambda q: (-q.allocated[short], q.name))[:most])
