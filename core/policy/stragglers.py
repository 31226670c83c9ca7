"""Ranks that are slower than their gang, by a robust measure. Pure.

Of the times that ranks take for a step, the median m and the median absolute deviation MAD = median(|x - m|) are taken. Both ignore up to
half of the ranks being off, so the slow ones do not hide themselves, as they would in a mean and a standard deviation. A rank is slow when

    (x - m) / (1.4826 · MAD) > SCORE    and    x > SLOWER · m

1.4826 · MAD estimates the standard deviation of normal times (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", JASA
88, 1993); that a point more than 3.5 of these away is an outlier is the rule of Iglewicz and Hoaglin (1993), and `SCORE` asks for more. In
gangs whose ranks are all alike MAD is near 0, so it counts as `SPREAD` of the median at least. It has to last: a rank is reported when it
was slow in every report of `LASTS_MS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from gangline.core.model import events as ev
from gangline.core.model.documents import Observed
from gangline.core.model.state import State

SCORE = 5.0
SLOWER = 1.2
SPREAD = 0.02
LASTS_MS = 30_000
#: fewer ranks have no measure
FEWEST = 4
_NORMAL = 1.4826


class Slow(NamedTuple):
    """A rank that is slow: its time for a step and the median's, in ms, and by how many deviations it is off."""

    rank: int
    pace_ms: int
    median_ms: int
    score: float


def slow_ranks(paces: Mapping[int, int]) -> list[Slow]:
    """Return the ranks that are slower than the others, by rank. `paces` are ms for a step by rank."""
    if len(paces) < FEWEST:
        return []
    middle = median(paces.values())
    spread = max(median(abs(x - middle) for x in paces.values()) * _NORMAL, SPREAD * middle)
    if spread <= 0:
        return []
    scores = ((rank, pace, (pace - middle) / spread) for rank, pace in sorted(paces.items()))
    return [Slow(rank, pace, round(middle), score) for rank, pace, score in scores if score > SCORE and pace > SLOWER * middle]


class Paces:
    """What ranks of running gangs have said of their pace, in memory of the leader only: another leader hears it again.

    Bounded by the ranks that run: what belongs to another generation is dropped at once, and gangs that are over from time to time.
    """

    def __init__(self) -> None:
        #: job → generation, paces by rank, and since when each slow rank has been slow
        self._gangs: dict[str, tuple[int, dict[int, int], dict[int, int]]] = {}

    def take(self, state: State, doc: Observed, now_ms: int) -> list[ev.LogEvent]:
        """Take in what a node says, and return which ranks have been slow for long enough and are not known to be."""
        out: list[ev.LogEvent] = []
        for gang in doc.gangs:
            job = state.jobs.get(gang.job)
            if not gang.paces or job is None or job.state != "running" or job.generation != gang.generation:
                continue
            if job.spec.health.stragglers == "ignore":
                continue
            generation, paces, since = self._gangs.get(gang.job, (gang.generation, {}, {}))
            if generation != gang.generation:
                paces, since = {}, {}
            self._gangs[gang.job] = (gang.generation, paces, since)
            paces.update(gang.paces)
            slow = slow_ranks(paces)
            for rank in since.keys() - {s.rank for s in slow}:
                del since[rank]
            for s in slow:
                node = next((n for n, part in job.parts.items() if s.rank in part.ranks), "")
                if now_ms - since.setdefault(s.rank, now_ms) >= LASTS_MS and s.rank not in job.slow and node:
                    out.append(ev.RankSlow(
                        job=job.id, generation=job.generation, rank=s.rank, node=node, pace_ms=s.pace_ms, median_ms=s.median_ms,
                        score_tenths=min(9_999, round(s.score * 10)),
                    ))  # fmt: skip
        return out

    def forget(self, state: State) -> None:
        """Drop gangs that do not run any more, when they are many."""
        if len(self._gangs) <= 2 * len(state.running) + 16:
            return
        for job in [j for j in self._gangs if j not in state.running]:
            del self._gangs[job]
