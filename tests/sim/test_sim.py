"""A few seeds of the simulated cluster; `python tests/sim/many.py 0 1000` plays many."""

from __future__ import annotations

from pathlib import Path

import pytest
from simworld import Run, Scenario, Violation, check_runs, play

from gangline.core.telemetry import Telemetry, setup


@pytest.fixture(scope="module")
def telemetry() -> Telemetry:
    return setup("sim")


@pytest.mark.parametrize("seed", range(16))
def test_faults_break_nothing_and_after_them_everything_ends(seed: int, tmp_path: Path, telemetry: Telemetry) -> None:
    world = play(seed, tmp_path, telemetry=telemetry)
    assert len(world.submitted) == world.scenario.jobs
    assert sum(len(n.runs) for n in world.nodes.values()) >= world.scenario.jobs / 2


@pytest.mark.parametrize("seed", range(4))
def test_many_nodes_few_faults(seed: int, tmp_path: Path, telemetry: Telemetry) -> None:
    play(seed, tmp_path, Scenario(schedulers=2, nodes=12, jobs=60, pace_s=12.0, ambiguous=0.01, watch_trouble=0.0), telemetry=telemetry)


def test_the_same_seed_is_the_same_story(tmp_path: Path, telemetry: Telemetry) -> None:
    first, second = (play(7, tmp_path / name, telemetry=telemetry) for name in "ab")
    assert first.story == second.story
    assert [n.runs for n in first.nodes.values()] == [n.runs for n in second.nodes.values()]


def test_the_checker_sees_two_at_once() -> None:
    one = Run("j", 0, 1, "n1", (0,), True, 1.0, 5.0)
    check_runs([one, Run("j", 0, 2, "n2", (0,), True, 5.0, 6.0)])
    with pytest.raises(Violation, match="at once"):
        check_runs([one, Run("j", 0, 2, "n2", (0,), True, 4.9, 6.0)])
    with pytest.raises(Violation, match="at once"):
        check_runs([one, Run("k", 0, 1, "n1", (0,), True, 4.9, 6.0)])
