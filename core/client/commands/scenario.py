"""scenario: run scenario files with the policy that schedules the cluster, and judge what comes out. Needs no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from gangline.core.client import exits

LEVELS = ("strict", "policy", "safety")


@click.group()
def scenario() -> None:
    """Check the scheduling policy against scenario files (docs/scenarios.md)."""


@scenario.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="PATH...")
@click.option("--level", type=click.Choice(LEVELS), default="policy", show_default=True, help="How much of what is expected must come out.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def run(paths: tuple[Path, ...], level: str, as_json: bool) -> int:
    """Run the scenarios of files, or of all .json files below folders; exit with 3 if one fails."""
    report = judge_files(find_files(paths), level)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        _print(report, level)
    return exits.DONE if report["passed"] == report["total"] else exits.JOB_FAILED


def find_files(paths: tuple[Path, ...]) -> list[Path]:
    """Return the files themselves and all .json files below the folders, in order, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            found[file] = None
    if not found:
        raise click.UsageError("there is no .json file in " + ", ".join(str(p) for p in paths))
    return list(found)


def judge_files(files: list[Path], level: str) -> dict[str, Any]:
    """Return `total`, `passed`, `failed` (id and why of each) and `by_topic` (total and passed of each topic)."""
    from gangline.core.policy.scenario import judge
    from gangline.core.policy.scenario_format import BadScenario

    failed: list[dict[str, str]] = []
    topics: dict[str, dict[str, int]] = {}
    for file in files:
        topic, scenarios = read_file(file)
        counts = topics.setdefault(topic, {"total": 0, "passed": 0})
        for one in scenarios:
            counts["total"] += 1
            try:
                why = judge(one).why(level)  # type: ignore[arg-type]
            except BadScenario as error:
                why = [str(error)]
            if why:
                failed.append({"id": str(one.get("id", "?")) if isinstance(one, dict) else "?", "why": "; ".join(why)})
            else:
                counts["passed"] += 1
    total = sum(c["total"] for c in topics.values())
    return {"total": total, "passed": total - len(failed), "failed": failed, "by_topic": topics}


def read_file(file: Path) -> tuple[str, list[Any]]:
    """Return the topic of a file and its scenarios: one, a list of them, or an object with `topic` and `scenarios`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{file}: cannot be read: {error}") from error
    except ValueError as error:
        raise click.UsageError(f"{file}: is not JSON: {error}") from error
    topic = file.stem
    if isinstance(found, dict) and "scenarios" in found:
        topic = str(found.get("topic", topic))
        found = found["scenarios"]
    elif isinstance(found, dict):
        found = [found]
    if not isinstance(found, list):
        raise click.UsageError(f"{file}: holds neither a scenario nor a list of them")
    return topic, found


def _print(report: dict[str, Any], level: str) -> None:
    for topic, counts in report["by_topic"].items():
        click.echo(f"{topic:<32} {counts['passed']:>4} of {counts['total']}")
    for one in report["failed"]:
        click.echo(f"{one['id']}: {one['why']}")
    click.echo(f"{report['passed']} of {report['total']} pass at level {level}")
