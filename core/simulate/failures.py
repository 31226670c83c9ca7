"""Failures in a simulation: how often, of what kind, and for how long a node is away; and what a formula says of the useful time that is left.

Shares of the kinds are counts of Meta's table of 419 unexpected interruptions in 54 days on 16,384 H100 ("The Llama 3 Herd of Models",
arXiv 2407.21783, table 5), grouped by what they hit. Rates of the presets, per 1,000 nodes of 8 GPUs and day, are from there and from Kokolis
et al., "Revisiting reliability in large-scale machine learning research clusters", HPCA 2025 (arXiv 2410.21680). Times of repair are
judgement, not measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

_DAY_S = 86_400.0
#: preset → failures per 1,000 nodes of 8 GPUs and day
PRESETS = {"rsc2": 2.34, "llama3": 3.789, "rsc1": 6.5, "young": 20.0}
#: (kind, count of 419, whether its node goes, seconds until it is noticed, hours of repair)
_KINDS: tuple[tuple[str, int, bool, tuple[float, float], tuple[float, float]], ...] = (
    ("gpu", 171, True, (1, 30), (0.1, 24)),
    ("gpu_memory", 91, True, (1, 10), (0.1, 24)),
    ("silent_corruption", 6, True, (3_600, 86_400), (24, 336)),
    ("software", 56, False, (1, 60), (0, 0)),
    ("network", 35, True, (1, 600), (0.02, 8)),
    ("maintenance", 32, True, (0, 120), (1, 12)),
    ("nic", 7, True, (1, 600), (4, 72)),
    ("host", 14, True, (10, 120), (4, 168)),
    ("hang", 7, False, (600, 1_800), (0, 0)),
)


@dataclass(frozen=True)
class Failures:
    """How a cluster fails. `lemons` is the share of nodes that have half of all failures; 0: all nodes are alike."""

    per_1000_node_days: float
    seed: int = 42
    lemons: float = 0.0

    def drawn(self, nodes: int) -> Iterator[Failure]:
        """Yield failures without end, in order of time: a Poisson process."""
        rng = random.Random(self.seed)
        rate = nodes * self.per_1000_node_days / 1000 / _DAY_S
        weights = [count for _, count, *_ in _KINDS]
        bad = max(1, round(nodes * self.lemons)) if self.lemons else 0
        at_s = 0.0
        while rate > 0:
            at_s += rng.expovariate(rate)
            kind, _, away, seen, repair = rng.choices(_KINDS, weights)[0]
            node = rng.randrange(bad) if bad and rng.random() < 0.5 else rng.randrange(nodes)
            yield Failure(at_s, kind, node, away, rng.uniform(*seen), rng.uniform(*repair) * 3_600)


@dataclass(frozen=True)
class Failure:
    """One failure: when, on which node (by number), whether the node goes, and how long until it is noticed and repaired."""

    at_s: float
    kind: str
    node: int
    away: bool
    seen_s: float
    repair_s: float


def best_interval_s(write_s: float, mean_s: float) -> float:
    """Return the checkpoint interval that wastes least: sqrt(2 w M) − w (Young 1974; Daly 2006, first correction), of at least w."""
    return max(write_s, sqrt(2 * write_s * mean_s) - write_s)


def expected_ettr(interval_s: float, write_s: float, mean_s: float, restart_s: float) -> float:
    """Return useful time over wall time of a job whose mean time to failure is `mean_s`, with blocking writes.

    1 / (1 + w/t) × 1 / (1 + (u + t/2) / M), as Kokolis et al. have it; u is all time from a failure until work goes on.
    """
    writes = write_s / interval_s if interval_s else 0.0
    return 1 / (1 + writes) / (1 + (restart_s + interval_s / 2) / mean_s)
