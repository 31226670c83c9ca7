"""The measurement of decisions measures decisions: its figures are there, and everything that it relies on is asserted in it."""

from __future__ import annotations

import pytest

from gangline.benchmarks import decide


def test_the_figures_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_IDLE_ROUNDS": 2, "_GANG_ROUNDS": 2, "_PROOF_ROUNDS": 1, "_FREE": 4, "_RANKS": 16, "_SHAPES": 3}.items():
        monkeypatch.setattr(decide, name, value)
    monkeypatch.setattr(decide, "calm_garbage_collector", lambda: None)
    figures = decide.run(nodes=12, gpus=8, jobs=6, profile="unschedulable_proof_ms")
    assert set(figures) >= {"idle_cycle_ms", "gang512_p99_ms", "placements_per_s", "unschedulable_proof_ms", "profile"}
    assert (figures["gpus"], figures["running"], figures["pending"]) == (96, 64, 6)
    assert all(value > 0 for name, value in figures.items() if name.endswith(("_ms", "_per_s")))


def test_a_curve_has_a_row_for_each_length_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_CURVE_ROUNDS": 2, "_FREE": 2, "_SHAPES": 3}.items():
        monkeypatch.setattr(decide, name, value)
    monkeypatch.setattr(decide, "calm_garbage_collector", lambda: None)
    rows = decide.curve(nodes=4, gpus=8, pending=(5, 12))
    assert [row["pending"] for row in rows] == [5, 12]
    assert all(row[step] > 0 for row in rows for step in ("idle_ms", "submission_ms", "placement_ms"))
