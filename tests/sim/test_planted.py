"""Known mistakes, each of which the simulation must find within a stated number of seeds (docs/chaos.md has the table)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gangline.chaos.sim.many import Order, carry_out
from gangline.chaos.sim.planted import PLANTED
from gangline.core.store import log

#: mistake → mix, seeds from 1 on within which it is found, assertions of which one sees it. What a seed plays changes with the rules that it
#: plays by, so the bounds leave room: several times the seeds that were needed when they were set
WITHIN = {
    "index-plus-one": ("small", 20, ("S1", "S3")),
    "resume-from-header": ("small", 30, ("run:",)),
    "answered-before-commit": ("small", 40, ("S7",)),
    "projected-before-commit": ("small", 20, ("S13",)),
    "key-forgotten": ("small", 20, ("S3", "S7")),
    "timers-lost": ("small", 50, ("run:",)),
    "snapshot-without-field": ("small", 40, ("S3",)),
    "restarts-not-counted": ("small", 20, ("S10",)),
    "partial-gang": ("small", 20, ("S5",)),
    "quota-counted-twice": ("tenants", 20, ("S3", "S9")),
    "terminal-state-lost": ("small", 20, ("S8",)),
    "fence-too-late": ("cuts", 60, ("S6",)),
    "double-start": ("small", 20, ("S6",)),
    "gone-before-dead": ("small", 30, ("S6",)),
    "no-barrier": ("small", 20, ("S13",)),
    "pid-reuse": ("cuts", 50, ("run:",)),
}
_ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)  # processor time of up to a minute where the last seed finds it, on a machine that may be busy
@pytest.mark.parametrize("name", WITHIN)
def test_a_planted_mistake_is_found(name: str) -> None:
    mix, seeds, assertions = WITHIN[name]
    for seed in range(1, seeds + 1):
        violations = carry_out(Order(seed, mix, planted=name)).violations
        if any(v.startswith(assertions) for v in violations):
            return
    pytest.fail(f"{name} is not found within {seeds} seeds of {mix}")


def test_the_mistake_is_gone_after_its_block() -> None:
    guard = log.guard
    with PLANTED["append-without-fence"].make():
        assert log.guard is not guard
    assert log.guard is guard


def test_no_production_code_knows_of_the_mistakes() -> None:
    """Nothing outside chaos/sim imports the module, so that no process but a simulation can have a mistake."""
    for folder in ("core", "leader", "nodeagent", "benchmarks", "chaos"):
        for path in (_ROOT / folder).rglob("*.py"):
            if path.is_relative_to(_ROOT / "chaos" / "sim"):
                continue
            for each in ast.walk(ast.parse(path.read_text())):
                named = [a.name for a in each.names] if isinstance(each, ast.Import) else []
                named += [f"{each.module}.{a.name}" for a in each.names] if isinstance(each, ast.ImportFrom) else []
                assert not [n for n in named if "sim.planted" in n], path
