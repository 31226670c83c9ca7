"""Known mistakes, each of which the simulation must find within a stated number of seeds (docs/chaos.md has the table)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gangline.chaos.sim.many import Order, carry_out
from gangline.chaos.sim.planted import PLANTED
from gangline.core.store import log

#: mistake → mix, seeds from 1 on within which it is found, assertions of which one sees it
WITHIN = {
    "index-plus-one": ("small", 5, ("S1", "S3")),
    "resume-from-header": ("small", 10, ("run:",)),
    "answered-before-commit": ("small", 15, ("S7",)),
    "projected-before-commit": ("small", 5, ("S13",)),
    "key-forgotten": ("small", 5, ("S3", "S7")),
    "timers-lost": ("small", 20, ("run:",)),
    "snapshot-without-field": ("small", 15, ("S3",)),
    "restarts-not-counted": ("small", 5, ("S10",)),
    "partial-gang": ("small", 5, ("S5",)),
    "quota-counted-twice": ("tenants", 5, ("S3", "S9")),
    "terminal-state-lost": ("small", 5, ("S8",)),
    "fence-too-late": ("cuts", 30, ("S6",)),
    "double-start": ("small", 5, ("S6",)),
    "gone-before-dead": ("small", 10, ("S6",)),
    "no-barrier": ("small", 5, ("S13",)),
    "pid-reuse": ("cuts", 20, ("run:",)),
}
_ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)  # processor time of up to 15 s, on a machine that may be busy
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
