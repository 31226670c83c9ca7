"""simulate: replay a trace in virtual time through the policy that schedules the cluster. Needs no cluster."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.progress import Progress

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(no_args_is_help=True)
@click.option("--tasks", multiple=True, required=True, type=_FILE, metavar="FILE", help="The trace: what arrives. May be compressed with gzip.")
@click.option("--nodes", type=_FILE, metavar="FILE", help="The list of nodes.")
@click.option("--protocol", default="fgd", show_default=True, help="How the trace is replayed; see docs/simulate.md.")
@click.option("--policy", default="", metavar="NAME", help="What decides; the policy of production, unless another is named for comparison.")
@click.option("--seed", default=42, show_default=True, type=click.IntRange(0), help="Of everything that is drawn by chance.")
@click.option("--cluster", default="", metavar="NODESxGPUS", help="Nodes of the protocol jobs, as 8x8, or 2x4+6x8.")
@click.option(
    "--durations", default=None, type=click.Choice(["unknown", "asked", "known"]),
    help="What the scheduler knows of how long jobs run  [default: what users asked for, where the trace has it].",
)
@click.option("--by-queue", is_flag=True, help="Queues of the trace are queues, with quotas by what their jobs ask for in all.")
@click.option("--half-life", default=0.0, type=click.FloatRange(0), metavar="SECONDS", help="With --by-queue, half-life of past usage.")
@click.option("--overhead", default=30.0, show_default=True, type=click.FloatRange(0), metavar="SECONDS", help="Until ranks work.")
@click.option("--failures", default="", metavar="RATE", help="Nodes fail: llama3, rsc1, rsc2, young, or a number per 1,000 nodes and day.")
@click.option("--checkpoint", default=0.0, type=click.FloatRange(0), metavar="SECONDS", help="Interval of checkpoints; 0: the best one.")
@click.option("--write", default=60.0, show_default=True, type=click.FloatRange(0), metavar="SECONDS", help="Standstill for a checkpoint.")
@click.option("--report", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE.html", help="Write a report with plots.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def simulate(
    tasks: tuple[Path, ...], nodes: Path | None, protocol: str, policy: str, seed: int, as_json: bool, quiet: bool, report: Path | None,
    **options: Any,
) -> int:
    """Replay a trace in virtual time through the policy that schedules the cluster."""
    from gangline.core.simulate import protocols

    if protocol not in protocols.PROTOCOLS:
        known = "\n".join(f"  {name:<8} {text}" for name, (_, text) in protocols.PROTOCOLS.items())
        raise click.UsageError(f'There is no protocol "{protocol}". There are:\n{known}')
    module = protocols.protocol(protocol)
    chosen = policy.split(",") if getattr(module, "COMPARES", False) else [policy]
    unknown = [name for name in chosen if policy and name not in module.POLICIES]
    if unknown:
        known = "\n".join(f"  {name:<12} {text}" for name, text in module.POLICIES.items())
        raise click.UsageError(f'There is no policy "{unknown[0]}" for the protocol {protocol}. There are:\n{known}')
    seconds = {f"{name}_s": options.pop(name) for name in ("half_life", "overhead", "checkpoint", "write")}
    given = {"report": report is not None, **seconds, **options}
    bar = _Bar(quiet)
    try:
        result = module.run(protocols.Asked(tasks, nodes, seed, policy, given), bar.tick)
    except protocols.Unusable as error:
        raise click.UsageError(str(error)) from error
    finally:
        bar.clear()
    if report is not None and result.report:
        report.write_text(result.report, encoding="utf-8")
    click.echo(json.dumps(result.figures) if as_json else "\n".join(result.lines))
    return exits.DONE


class _Bar:
    """A progress bar with an estimate, on standard error."""

    WIDTH = 24

    def __init__(self, quiet: bool) -> None:
        self._progress = Progress(quiet=quiet)
        #: a line for each of so many per cent; a terminal's is redrawn instead
        self._step = 1 if sys.stderr.isatty() else 25
        self._began = time.monotonic()
        self._percent = -1

    def tick(self, done: int, total: int) -> None:
        """Show how much is done."""
        percent = 100 * done // max(total, 1) // self._step * self._step
        if percent == self._percent:
            return
        self._percent = percent
        full = self.WIDTH * percent // 100
        text = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {percent:>3} %"
        if 0 < done < total:
            left = (time.monotonic() - self._began) * (total - done) / done
            text += f", about {round(left)} s left"
        self._progress.update(text)

    def clear(self) -> None:
        """Take it away."""
        self._progress.clear()
