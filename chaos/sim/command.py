"""`gangline chaos sim`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from gangline.chaos.sim.scenario import MIXES


@click.command("sim")
@click.option("--seeds", default=100, show_default=True, type=click.IntRange(1), help="How many seeds to play.")
@click.option("--start", default=0, show_default=True, type=click.IntRange(0), help="The first one.")
@click.option("--nodes", default=0, type=click.IntRange(0, 200), help="Nodes of the cluster [as the mix says].")
@click.option("--mix", default="mixed", show_default=True, type=click.Choice(["mixed", *MIXES]), help="What each run has; mixed: all in turn.")
@click.option("--only", default="", metavar="PARTS", help="Nothing but these parts of the plan, as a shrunk seed names them.")
@click.option("--planted", default="", metavar="MISTAKE", help="With a known mistake, to see that it is found; 'list' names them.")
@click.option("--decisions", is_flag=True, help="Take all decisions again, with the same and with other clocks (S14, S15): three times as long.")
@click.option("--processes", default=0, type=click.IntRange(0, 256), help="Processes to play in [one for each core].")
@click.option("--shrink/--no-shrink", default=True, show_default=True, help="Make the first failing seed small.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the story, log and trace of each failing seed.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def sim(
    seeds: int, start: int, nodes: int, mix: str, only: str, planted: str, decisions: bool, processes: int, shrink: bool, out: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Play a whole cluster on simulated time, with faults, and check S1 to S16.

    The same seed of the same code gives the same run, byte for byte: `trace` is a digest of every commit. Ends with status 1 when something
    was violated; the first such seed is made small, and printed with the command that repeats it.
    """
    from gangline.chaos.sim.many import Order, Total, carry_out_all
    from gangline.chaos.sim.planted import PLANTED

    if planted == "list":
        for name, bug in PLANTED.items():
            click.echo(f"{name:34} {bug.text}")
        return
    if planted and planted not in PLANTED:
        raise click.BadParameter(f"no such mistake: {planted}; --planted list names them", param_hint="--planted")
    parts = frozenset(only.split(",")) if only else None
    total, first = Total(), None
    for order, outcome in carry_out_all([Order(seed, mix, nodes, parts, planted, decisions) for seed in range(start, start + seeds)], processes):
        total.add(order, outcome)
        if outcome.violations:
            first = first or (order, outcome)
            click.echo(f"seed {order.seed}: {outcome.violations[0][:1000]}", err=as_json)
            if out is not None:
                _tell(order, out)
    if first is not None and shrink:
        _shrink(*first, as_json, out)
    result = total.to_json()
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        click.echo(
            f"{result['runs']} runs, {result['violations']} violations in {len(total.failed)} of them, {result['virtual_s']} simulated s, "
            f"{result['runs_per_s']} runs/s, trace {result['trace']}"
        )
    raise SystemExit(1 if total.failed else 0)


def _shrink(order: object, outcome: object, as_json: bool, out: Path | None) -> None:
    from gangline.chaos.sim.many import Order
    from gangline.chaos.sim.play import Outcome
    from gangline.chaos.sim.shrink import shrink

    assert isinstance(order, Order)
    assert isinstance(outcome, Outcome)
    small, found = shrink(order, outcome)
    click.echo(f"\nseed {order.seed}, made small:", err=as_json)
    for violation in found.violations[:5]:
        click.echo(f"  {violation[:1000]}", err=as_json)
    for line in found.story:
        click.echo(f"  {line[:200]}", err=as_json)
    click.echo(f"\nagain: {small.command()}\n", err=as_json)
    if out is not None:
        _tell(small, out)


def _tell(order: object, out: Path) -> None:
    """Play it once more, and write down everything."""
    from gangline.chaos.sim.many import Order, carry_out

    assert isinstance(order, Order)
    told = carry_out(order, level="info", trace=True)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(["\n".join(told.violations), "\n".join(told.story), told.journal, "\n".join(told.lines)])
    (out / f"seed-{order.seed}{'-small' if order.only is not None else ''}.txt").write_text(f"{order.command()}\n\n{text}\n")
