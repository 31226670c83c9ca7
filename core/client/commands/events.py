"""events: the log as it is written."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.api import Client, Unreachable
from gangline.core.client.commands.read import STORY, STORY_WIDE, clock
from gangline.core.client.options import client_of, output_options, user_of
from gangline.core.client.output import Output, cell
from gangline.core.client.watch import resolve

RECONNECT_S = 1.0
#: how long nobody answering is waited out once the stream has begun
PATIENCE_S = 60.0


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until interrupted.")
@click.option("--from", "first", type=click.IntRange(1), default=None, metavar="INDEX", help="Begin with this log entry.")
@click.option("--job", default=None, help="Events of this job only.")
@click.option("--node", default=None, help="Events of this node only.")
@output_options
@click.pass_context
def events(ctx: click.Context, follow: bool, first: int | None, job: str | None, node: str | None, out: Output) -> int:
    """Print the events of the cluster's log; with -f new ones as they come, each one once, whatever the connection does."""
    client = client_of(ctx)
    if job:
        job = str(client.job(resolve(client, job, user_of(ctx))).body["id"])
    query: dict[str, str | int | None] = {"from": first, "job": job, "node": node}
    if not follow:
        out.rows([json.loads(line) for line in client.stream("/v1/events", query) if line.strip()], STORY, STORY_WIDE, "events", "index")
        return exits.DONE
    try:
        _follow(client, query, out)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    return exits.DONE


def _follow(client: Client, query: dict[str, str | int | None], out: Output) -> None:
    """Print events for ever; after a break go on behind the last one that was printed (a log entry may hold several)."""
    lost_at: float | None = None
    index = printed = 0
    while True:
        skip = printed
        try:
            for line in client.stream("/v1/events", {**query, "follow": 1}):
                lost_at = None
                if not line.strip():
                    continue
                event = json.loads(line)
                if event["index"] == index and skip:
                    skip -= 1
                    continue
                skip = 0
                printed = printed + 1 if event["index"] == index else 1
                query["from"] = index = int(event["index"])
                _print(event, out)
        except Unreachable:
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > PATIENCE_S:
                raise
        time.sleep(RECONNECT_S)


def _print(event: dict[str, Any], out: Output) -> None:
    if out.form in ("table", "wide"):
        click.echo(f"{event['index']:>8}  {clock(event['at_ms'])}  {cell(event['event']):<20}  {cell(event.get('message'))}")
    else:
        Output("jsonl" if out.form == "json" else out.form, ",".join(out.fields), header=False).one(event, "index")
