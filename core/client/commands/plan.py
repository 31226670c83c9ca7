"""plan: what would become of jobs that are not submitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.commands.read import gpu_words, runs
from gangline.core.client.commands.submit import read_files
from gangline.core.client.options import client_of, output_options
from gangline.core.client.output import Column, Output, cell, table
from gangline.core.model.jobfile import to_json

Answer = Mapping[str, Any]


@click.command(no_args_is_help=True)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@output_options
@click.pass_context
def plan(ctx: click.Context, files: tuple[str, ...], out: Output) -> int:
    """Say what would become of the jobs of FILEs if each were submitted now, by itself; nothing is submitted."""
    client = client_of(ctx)
    found = [client.request("POST", "/v1/jobs:plan", body=to_json(spec), repeat=True).body for spec in read_files(files)]
    if not (out.for_people and not out.fields):
        if len(found) != 1 or not out.one(found[0], "name"):
            out.rows(found, (), (), "plans", "name")
    else:
        for answer in found:
            _tell(answer, out)
    return exits.IMPOSSIBLE if any(answer.get("impossible") for answer in found) else exits.DONE


def _tell(answer: Answer, out: Output) -> None:
    why = answer.get("reason") or {}
    code = f" [{cell(why.get('code'))}]" if why else ""
    name = f"{cell(answer['name'])}: " if answer.get("name") else ""
    click.echo(f"{name}{cell(answer['message'])}{code}")
    for word in ("need", "have"):
        if why.get(word):
            click.echo(f"  {word:<13} {cell(why[word])}")
    if why.get("holders"):
        click.echo(f"  held by       {cell(why['holders'])}")
    if answer.get("placement"):
        table(PLACEMENT, answer["placement"], out.header)
    if answer.get("evicted"):
        click.echo("would leave:")
        table(EVICTED, answer["evicted"], out.header)


PLACEMENT: tuple[Column, ...] = (
    ("NODE", lambda p: cell(p["node"])),
    ("RANKS", lambda p: runs(p["ranks"])),
    ("GPUS", lambda p: gpu_words(zip(p["gpus"], p.get("shares") or [None] * len(p["gpus"]), strict=True))),
)
EVICTED: tuple[Column, ...] = (
    ("JOB", lambda r: cell(r["job"])),
    ("NAME", lambda r: cell(r.get("name"))),
    ("USER", lambda r: cell(r.get("user"))),
    ("QUEUE", lambda r: cell(r.get("queue"))),
    ("GPUS", lambda r: cell(r.get("gpus"))),
    ("BY", lambda r: cell(r.get("by"))),
)
