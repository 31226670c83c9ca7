"""How long a step takes a rank, from what it reports. Pure."""

from __future__ import annotations

from gangline.nodeagent.local import LocalRank

#: weight of the newest step in the mean: about the last seven steps count
_NEWEST = 0.25


def after(rank: LocalRank, step: int, busy_ms: object, now: float) -> dict[str, float | int]:
    """Return what changes of a rank that reports a step at the monotonic second `now`; `busy_ms` is its own work in it, if it says so."""
    known = {"progress_at": now, "step": max(step, rank.step)}
    if step <= rank.step or (rank.step < 0 and not isinstance(busy_ms, int)):
        return known
    took_ms = float(busy_ms) if isinstance(busy_ms, int) else (now - rank.progress_at) * 1000 / (step - rank.step)
    return known | {"pace_ms": took_ms if not rank.pace_ms else rank.pace_ms + _NEWEST * (took_ms - rank.pace_ms)}
