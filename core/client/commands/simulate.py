"""simulate: replay a trace in virtual time through the policy that schedules the cluster. Needs no cluster."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
def simulate(tasks: tuple[Path, ...], nodes: Path | None, protocol: str, policy: str, seed: int, as_json: bool, quiet: bool) -> int:
    """Replay a trace in virtual time through the policy that schedules the cluster."""
    from gangline.core.simulate import protocols

    if protocol not in protocols.PROTOCOLS:
        known = "\n".join(f"  {name:<8} {text}" for name, (_, text) in protocols.PROTOCOLS.items())
        raise click.UsageError(f'There is no protocol "{protocol}". There are:\n{known}')
    module = protocols.protocol(protocol)
    if policy and policy not in module.POLICIES:
        known = "\n".join(f"  {name:<12} {text}" for name, text in module.POLICIES.items())
        raise click.UsageError(f'There is no policy "{policy}" for the protocol {protocol}. There are:\n{known}')
    bar = _Bar(quiet)
    try:
        result = module.run(protocols.Asked(tasks, nodes, seed, policy), bar.tick)
    except protocols.Unusable as error:
        raise click.UsageError(str(error)) from error
    finally:
        bar.clear()
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
