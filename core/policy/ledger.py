"""Who was evicted for whom, so that evictions do not go round in a circle (potential.py)."""

from __future__ import annotations

from dataclasses import dataclass

from gangline.core.model.state import State

#: who was evicted for whom is held against an eviction the other way for so long
LEDGER_MS = 600_000
#: links of a chain of evictions that are followed
_LINKS = 16


@dataclass(frozen=True)
class Ledger:
    """Who was evicted for whom lately."""

    state: State
    now_ms: int

    def returns(self, beneficiary: str, victim: str) -> bool:
        """Whether the beneficiary lost its place for the victim's sake a short while ago, directly or over others."""
        at = beneficiary
        for _ in range(_LINKS):
            job = self.state.jobs.get(at)
            if job is None or not job.evicted_for or self.now_ms - job.evicted_at_ms >= LEDGER_MS:
                return False
            at = job.evicted_for
            if at == victim:
                return True
        return False
