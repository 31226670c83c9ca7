"""What a scheduler sets for its whole process."""

from __future__ import annotations

import gc

#: the state is large, lives long and has no reference cycles, so looking through it for garbage again and again finds nothing
_ALLOCATIONS = 100_000
_GENERATIONS = 50


def calm_garbage_collector() -> None:
    """Collect cycles rarely, and never among what is loaded already. Everything that is not a cycle is freed at once as ever."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, _GENERATIONS, _GENERATIONS)
