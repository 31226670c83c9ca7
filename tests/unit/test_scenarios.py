"""Every scenario passes at the level that was reached; those that do not are listed in docs/scenarios.md, and leave the list when they do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gangline.core.client.commands.scenario import find_files, judge_files
from gangline.core.policy.scenario import judge
from gangline.core.policy.scenario_format import BadScenario

ROOT = Path(__file__).parents[2]
FILES = find_files((ROOT / "tests" / "scenarios",))
SCENARIOS: dict[str, Any] = {s["id"]: s for file in FILES for s in json.loads(file.read_text())["scenarios"]}
#: rows of the table "What does not pass": | `id` | level | reason |
_ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (strict|policy|safety) \|", re.MULTILINE)
#: a miss at a level is one at all that ask for more
_WORSE = {"strict": ("strict",), "policy": ("strict", "policy"), "safety": ("strict", "policy", "safety")}


def misses() -> dict[str, str]:
    return dict(_ROW.findall((ROOT / "docs" / "scenarios.md").read_text()))


def test_there_are_all() -> None:
    assert len(SCENARIOS) == 258
    assert set(misses()) <= set(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    verdict = judge(SCENARIOS[name])
    failing = {level: verdict.why(level) for level in ("strict", "policy", "safety") if verdict.why(level)}  # type: ignore[arg-type]
    assert set(failing) == set(_WORSE.get(misses().get(name, ""), ())), failing


def test_the_order_of_the_input_does_not_matter() -> None:
    """Queues, jobs and nodes the other way round: the same outcome."""
    for name, scenario in SCENARIOS.items():
        turned = scenario | {part: scenario[part][::-1] for part in ("nodes", "queues", "jobs")}
        assert judge(turned) == judge(scenario), name


def test_report_of_the_command() -> None:
    report = judge_files(FILES, "safety")
    assert report["total"] == 258
    assert [f["id"] for f in report["failed"]] == [n for n, level in misses().items() if level == "safety"]
    assert report["by_topic"]["deletion"] == {"total": 2, "passed": 2}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s | {"surprise": 1}, "unknown field 'surprise'"),
        (lambda s: {k: v for k, v in s.items() if k != "jobs"}, "the field 'jobs' is missing"),
        (lambda s: s | {"actions": ["dance"]}, "there is no action 'dance'"),
        (lambda s: s | {"jobs": [s["jobs"][0] | {"queue": "nowhere"}]}, "there is no queue 'nowhere'"),
        (lambda s: s | {"nodes": {}}, "nodes must be a list"),
        (lambda s: s | {"jobs": [s["jobs"][0] | {"priority": "high"}]}, "cannot be run"),
        (lambda _s: 7, "must be an object"),
    ],
)
def test_what_cannot_be_run_says_so(change: Any, says: str) -> None:
    with pytest.raises(BadScenario, match=re.escape(says)):
        judge(change(SCENARIOS["allocate-002"]))
