"""logs: what ranks print."""

from __future__ import annotations

import sys

import click

from gangline.core.client import exits
from gangline.core.client.api import Client
from gangline.core.client.options import client_of, job_argument, user_of
from gangline.core.client.output import colours
from gangline.core.client.progress import Progress
from gangline.core.client.watch import MAX_FOLLOWED, ArrayReader, Job, LogReader, Waiter, detached, drain, fate, follow_elements, resolve


@click.command()
@job_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the job has ended.")
@click.option("--rank", "chosen", default="", metavar="N,A-B", help="These ranks only, e.g. 0 or 0,4-7.")
@click.option("--generation", type=click.IntRange(1), default=None, help="Of this incarnation of the gang; without it, of the newest.")
@click.option("--tail", type=click.IntRange(0), default=0, metavar="LINES", help="Only the last LINES of each rank.")
@click.option("--prefix/--no-prefix", default=None, help="Put the rank in front of each line [on a terminal, when there are several].")
@click.pass_context
def logs(ctx: click.Context, job: str, follow: bool, chosen: str, generation: int | None, tail: int, prefix: bool | None) -> int:
    """Print what the ranks of JOB print: merged while following, one rank after the other without -f."""
    client = client_of(ctx)
    found = client.job(resolve(client, job, user_of(ctx))).body
    if found.get("elements"):
        return _array_logs(client, found, follow, tail, bool(chosen or generation))
    ranks = parse_ranks(chosen, int(found["ranks"])) if chosen else list(range(int(found["ranks"])))
    if follow and len(ranks) > MAX_FOLLOWED:
        click.echo(f"gangline: following ranks 0 to {MAX_FOLLOWED - 1} of {found['ranks']}; --rank chooses others", err=True)
        ranks = ranks[:MAX_FOLLOWED]
    shown = prefix if prefix is not None else len(ranks) > 1 and sys.stdout.isatty()
    reader = LogReader(client, found["id"], ranks, prefix=shown, colour=colours(sys.stdout), tail=tail)
    if generation is not None or not follow:
        if not reader.read(generation) and not found.get("generation"):
            click.echo(f"gangline: nothing is printed yet: {fate(found)}", err=True)
        reader.finish()
        return exits.DONE
    progress = Progress()

    def meanwhile(now: dict[str, object]) -> bool:
        progress.clear()
        return bool(now.get("generation")) and now["state"] != "queued" and reader.read(int(str(now["generation"])))

    try:
        over = Waiter(client, found["id"], progress=progress).wait(meanwhile)
        drain(reader, over)
    except KeyboardInterrupt:
        raise detached([found["id"]]) from None
    click.echo(f"gangline: {fate(over)}", err=True)
    return exits.DONE


def _array_logs(client: Client, found: Job, follow: bool, tail: int, chosen: bool) -> int:
    """Print what the elements of an array print."""
    if chosen:
        raise click.UsageError(f"{found['id']} is an array: --rank and --generation choose from one element, as {found['id']}.INDEX.")
    reader = ArrayReader(client, found["id"], colour=colours(sys.stdout), tail=tail)
    if not follow:
        if not reader.read(newest=True):
            click.echo(f"gangline: nothing is printed yet: {fate(found)}", err=True)
        return exits.DONE
    progress = Progress()
    try:
        over = follow_elements(reader, Waiter(client, found["id"], progress=progress), progress)
    except KeyboardInterrupt:
        raise detached([found["id"]]) from None
    click.echo(f"gangline: {fate(over)}", err=True)
    return exits.DONE


def parse_ranks(text: str, ranks: int) -> list[int]:
    """Return the ranks of "0,4-7"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.UsageError(f"--rank {text}: write numbers and ranges, as 0,4-7.")
        low, high = int(first), int(last or first)
        if low > high or high >= ranks:
            raise click.UsageError(f"--rank {text}: this job has ranks 0 to {ranks - 1}.")
        found += range(low, high + 1)
    return sorted(set(found))
