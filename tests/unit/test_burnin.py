"""The test of withdrawn devices: what is well passes, and what computes or remembers wrongly does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gangline.core.model.documents import DesiredGang, HealthNotice
from gangline.nodeagent import burnin, jobevents


def test_the_golden_results_are_those_of_exact_integers() -> None:
    assert burnin.golden(burnin.CPU_ORDER) == burnin.GOLDEN[burnin.CPU_ORDER]
    # The product repeats with 17, so the large one is checked by its rows without computing all of it.
    row = burnin.product(burnin.CUDA_ORDER)[5]
    assert row[100] == sum(burnin.left(5, k) * burnin.right(k, 100) for k in range(burnin.CUDA_ORDER))
    assert max(abs(v) for v in row) < 1 << 24, "exact in 32-bit floats, in any order of summation"


def test_this_machine_passes() -> None:
    done = subprocess.run([sys.executable, "-m", "gangline.nodeagent.burnin"], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no problems" in done.stdout


def test_a_processor_that_computes_wrongly_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    right = burnin.right
    monkeypatch.setattr(burnin, "right", lambda i, j: right(i, j) + (i == 3 and j == 5))
    problems = list(burnin.check_cpu(rounds=1, memory_bytes=1024))
    assert len(problems) == 1
    assert "product 0" in problems[0]


def test_ranks_are_told_what_is_not_well() -> None:
    gang = DesiredGang("j", 2, "run", (), 1, 0, 1, health=(HealthNotice(3, "suspect", "hot"), HealthNotice(-1, "unhealthy", "smells")))
    event = jobevents.health_event(gang, 2, 7)
    assert event["event"] == "health"
    assert event["devices"] == [
        {"gpu": 3, "state": "suspect", "message": "hot"}, {"gpu": None, "state": "unhealthy", "message": "smells"},
    ]  # fmt: skip
