"""The throughput workloads run end to end on a real etcd and a real scheduler, and what they print follows from the log."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from gangline.benchmarks import kaiscale, workloads

pytestmark = [pytest.mark.process, pytest.mark.etcd, pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd binary")]


def test_a_workload_ends_and_its_figures_follow_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = workloads.published("topology")
    nodes = {"blocks": 1, "racks_per_block": 2, "nodes_per_rack": 2, "node_capacity_units": 96}
    facts |= {"cohorts": 1, "queues_per_cohort": 2, "topology": nodes}
    for workload in facts["workloads"]:
        workload |= {"count": 2, "creation_interval_ms": 10}

    def given(name: str) -> dict[str, Any]:
        return facts

    monkeypatch.setattr(workloads, "published", given)
    monkeypatch.setattr(workloads, "calm_garbage_collector", lambda: None)
    figures = workloads.run("topology", cohorts=1)
    assert (figures["jobs"], figures["queues"], figures["nodes"]) == (36, 2, 4)
    assert figures["ratio"] == pytest.approx(figures["wall_s"] / figures["floor_s"], rel=0.01)
    assert figures["wall_s"] >= figures["floor_s"], "no more than the quotas is used"
    assert set(figures["mean_time_to_admission_s"]) == {"small", "medium", "large"}
    assert figures["cpu_s"]["scheduler"] > 0


def test_a_scale_case_reclaims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kaiscale, "_SAMPLES", 3)
    monkeypatch.setattr(kaiscale, "calm_garbage_collector", lambda: None)
    figures = kaiscale.run(["reclaim-one"], nodes=2)["reclaim-one"]
    assert figures["evictions"] == 3
    assert figures["seconds"] > 0
    assert "published_s" not in figures, "it is another size"
