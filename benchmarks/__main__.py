"""`gangline bench`: what Gangline does, measured on this machine, with everything included that a real run includes."""

from __future__ import annotations

import json
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """Measure. Figures of one run on one machine compare with each other, not with those of another run."""


def _show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result))
        return
    width = max(map(len, result))
    for key, value in result.items():
        click.echo(f"{key:<{width}}  {value:,.4g}" if isinstance(value, float) else f"{key:<{width}}  {value}")


@main.command()
@click.option("--events", default=400_000, help="Events to write.")
@click.option("--frame-events", default=1_000, help="Events in one log entry.")
@JSON
def log(events: int, frame_events: int, as_json: bool) -> None:
    """The log alone: encode, check by fold, fenced append, and a standby process that folds it too; beside bare frames of the same size."""
    from gangline.benchmarks.log import run

    _show(run(events, frame_events), as_json)


@main.command()
@click.option("--jobs", default=1_000, help="Jobs to run.")
@click.option("--nodes", default=16)
@click.option("--gpus", default=8, help="Simulated GPUs of each node.")
@JSON
def jobs(jobs: int, nodes: int, gpus: int, as_json: bool) -> None:
    """Short jobs end to end: real schedulers, agents and processes, one rank each that runs `true`."""
    from gangline.benchmarks.jobs import run

    _show(run(jobs, nodes, gpus), as_json)


@main.command()
@click.option("--rounds", default=5, help="Medians are of so many rounds.")
@click.option("--only", multiple=True, help="Measure only this figure; may be given several times.")
@JSON
def recovery(rounds: int, only: tuple[str, ...], as_json: bool) -> None:
    """How long it takes to start, and to recover from everything that dies."""
    from gangline.benchmarks.recovery import run

    _show(run(rounds, only), as_json)


@main.command()
@click.option("--events", default=1_000_000, help="Events in the log.")
@click.option("--jobs", default=10_000, help="Jobs that the scheduler holds.")
@JSON
def takeover(events: int, jobs: int, as_json: bool) -> None:
    """A scheduler that starts on a long log: time from snapshot and tail to the state, and its memory."""
    from gangline.benchmarks.takeover import run

    _show(run(events, jobs), as_json)


@main.command()
@click.option("--nodes", default=5_000)
@click.option("--gpus", default=8, help="GPUs of each node.")
@click.option("--jobs", default=10_000, help="Gangs that wait.")
@click.option("--profile", default="", metavar="FIGURE", help="Show where the time of one figure goes; it is slower by that.")
@click.option("--curve", is_flag=True, help="Show what single steps cost while ever more gangs wait: 1,000, 10,000 and 100,000.")
@JSON
def decide(nodes: int, gpus: int, jobs: int, profile: str, curve: bool, as_json: bool) -> None:
    """Decisions alone, in process: a full cluster of one-GPU jobs with many gangs waiting."""
    from gangline.benchmarks.decide import curve as rows_of
    from gangline.benchmarks.decide import run

    if curve:
        rows = rows_of(nodes, gpus)
        if as_json:
            click.echo(json.dumps({"nodes": nodes, "gpus": nodes * gpus, "curve": rows}))
            return
        click.echo("  ".join(f"{name:>13}" for name in rows[0]))
        for row in rows:
            click.echo("  ".join(f"{value:>13,.2f}" if isinstance(value, float) else f"{value:>13,}" for value in row.values()))
        return
    _show(run(nodes, gpus, jobs, profile), as_json)


@main.command()
@click.argument("name", type=click.Choice(["baseline", "topology", "large_scale", "kai_scale"]))
@click.option("--cohorts", default=0, help="Run only so many cohorts of the workload; 0: all.")
@click.option("--case", "cases", multiple=True, metavar="CASE", help="kai_scale: only this case; may be given several times.")
@click.option("--nodes", default=0, help="kai_scale: so many nodes instead of 500 or 512; what runs on them shrinks with them.")
@JSON
def workloads(name: str, cohorts: int, cases: tuple[str, ...], nodes: int, as_json: bool) -> None:
    """Published throughput workloads end to end: a real etcd and scheduler, simulated agents; beside what others published."""
    if name == "kai_scale":
        from gangline.benchmarks.kaiscale import run as run_cases

        _show(run_cases(cases, nodes), as_json)
        return
    from gangline.benchmarks.workloads import run

    _show(run(name, cohorts), as_json)


if __name__ == "__main__":
    main(prog_name="gangline bench")
