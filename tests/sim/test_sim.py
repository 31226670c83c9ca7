"""A few seeds of the simulated cluster; `python tests/sim/many.py 0 1000` plays many."""

from __future__ import annotations

from pathlib import Path

import pytest
from simworld import Run, Scenario, Violation, check_runs, play

from gangline.core.model.gpushares import GpuShare, MigSlice
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


@pytest.mark.parametrize("seed", range(6))
def test_arrays_dependencies_holds_and_deadlines_among_faults(seed: int, tmp_path: Path, telemetry: Telemetry) -> None:
    world = play(seed, tmp_path, Scenario(jobs=16, conditional=0.7), telemetry=telemetry)
    assert any("." in run.job for node in world.nodes.values() for run in node.runs), "elements of arrays have run"


@pytest.mark.parametrize("seed", range(8))
def test_declared_queues_among_faults(seed: int, tmp_path: Path, telemetry: Telemetry) -> None:
    world = play(seed, tmp_path, Scenario(jobs=20, queues=True), telemetry=telemetry)
    assert sum("declared" in line for line in world.story) >= 2


def test_the_same_seed_is_the_same_story(tmp_path: Path, telemetry: Telemetry) -> None:
    first, second = (play(7, tmp_path / name, telemetry=telemetry) for name in "ab")
    assert first.story == second.story
    assert [n.runs for n in first.nodes.values()] == [n.runs for n in second.nodes.values()]


def test_the_checker_sees_two_at_once() -> None:
    one = Run("j", 0, 1, "n1", (0,), True, 1.0, 5.0)
    check_runs([one, Run("j", 0, 2, "n2", (0,), True, 5.0, 6.0)])
    with pytest.raises(Violation, match="at once"):
        check_runs([one, Run("j", 0, 2, "n2", (0,), True, 4.9, 6.0)])
    with pytest.raises(Violation, match="beyond what it has"):
        check_runs([one, Run("k", 0, 1, "n1", (0,), True, 4.9, 6.0)])


def test_the_checker_knows_parts_of_gpus() -> None:
    def run(job: str, share: GpuShare | None) -> Run:
        return Run(job, 0, 1, "n1", (0,), True, 1.0, 5.0, share=share)

    large, small = (GpuShare(0, 0, (MigSlice(0, start, size, profile),)) for start, size, profile in ((0, 4, "4g.40gb"), (4, 1, "1g.10gb")))
    check_runs([run("a", GpuShare(500)), run("b", GpuShare(500, 40_000))])
    check_runs([run("a", large), run("b", small)])
    inside = GpuShare(0, 0, (MigSlice(0, 3, 1, "1g.10gb"),))
    for a, b in ((GpuShare(500), GpuShare(501)), (GpuShare(500), small), (None, small), (large, inside)):
        with pytest.raises(Violation, match="beyond what it has"):
            check_runs([run("a", a), run("b", b)])


def test_parts_of_gpus_are_used(tmp_path: Path, telemetry: Telemetry) -> None:
    world = play(3, tmp_path, telemetry=telemetry)
    shares = [r.share for n in world.nodes.values() for r in n.runs if r.share is not None]
    assert {bool(s.mig) for s in shares} == {True, False}
