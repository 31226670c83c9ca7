"""The observed document: what the leader is told about this node. Pure."""

from __future__ import annotations

from typing import Literal

from gangline.core.model.documents import Desired, DesiredGang, ObservedGang, ObservedRank
from gangline.nodeagent.local import LocalGang, LocalRank
from gangline.nodeagent.reconcile import unwanted


def barriers(desired: Desired | None) -> set[str]:
    """Return the jobs that are released when all their nodes have prepared them."""
    return {g.job for g in desired.gangs if g.phase == "prepare"} if desired is not None else set()


def observed_gang(have: LocalGang, gang: DesiredGang | None) -> ObservedGang:
    """Return one gang as it is, given the desired one that was last acted on (None: it is not desired)."""
    ranks = _relevant(have)
    return ObservedGang(
        job=have.job,
        generation=have.generation,
        phase=_phase(have, gang),
        ranks=tuple(_observed_rank(r) for r in ranks),
        address=have.address,
        port=have.port,
        message=have.message,
        step=have.step,
        checkpoint_step=have.checkpoint_step,
        checkpoint_path=have.checkpoint_path,
        paces=tuple((r.rank, two_digits(r.pace_ms)) for r in ranks if r.live and r.pace_ms),
        acknowledged=have.notice is not None and all(not r.live or r.rank in have.acknowledged for r in ranks),
    )


def two_digits(value: float) -> int:
    """Return a number to two digits, so that what changes a little is no news."""
    return int(float(f"{value:.2g}"))


def _relevant(have: LocalGang) -> list[LocalRank]:
    """Return the newest incarnation of each rank, but an older one while it lives: it holds the devices."""
    by_rank: dict[int, LocalRank] = {}
    for r in sorted(have.ranks, key=lambda r: (r.rank, r.live, r.generation)):
        by_rank[r.rank] = r
    return list(by_rank.values())


def _phase(have: LocalGang, gang: DesiredGang | None) -> Literal["preparing", "prepared", "prepare_failed", "running", "stopping"]:
    if unwanted(gang, have):
        return "stopping"
    if have.phase == "prepared":
        return "running" if have.ranks else "prepared"
    if have.phase == "prepare_failed":
        return "prepare_failed"
    return "preparing" if have.live or gang is not None else "stopping"


def _observed_rank(r: LocalRank) -> ObservedRank:
    return ObservedRank(
        rank=r.rank, generation=r.generation, state=r.state, pid=r.pid, exit_code=r.exit_code, cause=r.cause, message=r.message,
        started_at_ms=r.started_at_ms, exited_at_ms=r.exited_at_ms,
    )  # fmt: skip
