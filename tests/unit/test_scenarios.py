"""Every scenario passes at the level that was reached; those that do not are listed in docs/scenarios.md, and leave the list when they do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gangline.core.client.commands.scenario import find_files, judge_files, scenario
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
    for name, one in SCENARIOS.items():
        turned = one | {part: one[part][::-1] for part in ("nodes", "queues", "jobs")}
        assert judge(turned) == judge(one), name


def test_report_of_the_command() -> None:
    report = judge_files(FILES, "safety")
    assert report["total"] == 258
    assert [f["id"] for f in report["failed"]] == [n for n, level in misses().items() if level == "safety"]
    assert report["by_topic"]["deletion"] == {"total": 2, "passed": 2}


def run(*args: str) -> tuple[int, str, str]:
    ran = CliRunner().invoke(scenario, ["run", *args], standalone_mode=False)
    code = ran.return_value if ran.exception is None else 2
    return int(code), ran.stdout, str(ran.exception or "")


def test_the_command(tmp_path: Path) -> None:
    file = ROOT / "tests" / "scenarios" / "deletion.json"
    assert run(str(file), "--level", "strict") == (0, "deletion                            2 of 2\n2 of 2 pass at level strict\n", "")
    code, out, _ = run(str(file), str(file.parent / "numa.json"), "--json")
    assert (code, json.loads(out)["total"], json.loads(out)["failed"]) == (0, 10, [])
    one = json.loads(file.read_text())["scenarios"][0]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "one.json").write_text(json.dumps(one))
    (tmp_path / "two.json").write_text(json.dumps([one, one | {"oops": 1}]))
    code, out, _ = run(str(tmp_path), "--json")
    report = json.loads(out)
    assert (code, report["total"], report["passed"]) == (3, 3, 2)
    assert report["failed"] == [{"id": one["id"], "why": f"scenario {one['id']}: unknown field 'oops'"}]
    assert report["by_topic"] == {"one": {"total": 1, "passed": 1}, "two": {"total": 2, "passed": 1}}


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("7", "neither a scenario nor a list"), (None, "there is no .json file")])
def test_files_that_are_none(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    code, _, error = run(str(tmp_path))
    assert code == 2
    assert says in error


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
