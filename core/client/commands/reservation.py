"""reservation: nodes, or GPUs, kept for some jobs or for maintenance in a window of time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click

from gangline.core.client.commands.read import clock
from gangline.core.client.options import Duration, client_of, output_options
from gangline.core.client.output import Column, Output, cell, clean
from gangline.core.model.units import parse_duration

Row = Mapping[str, Any]


class Moment(click.ParamType[tuple[str, float], str]):
    """A time, as 2026-08-01T06:00 (without a zone that of this machine), or a duration from now, as 2h."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Return ("in", seconds from now) or ("at", unix time in ms)."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        seconds = 0.0 if value == "now" else parse_duration(value)
        if seconds is not None:
            return ("in", seconds)
        try:
            return ("at", datetime.fromisoformat(value).astimezone().timestamp() * 1000)
        except ValueError:
            self.fail(f'"{value}" is neither a time as 2026-08-01T06:00 nor a duration from now as 2h.', param, ctx)


def _nodes(row: Row) -> str:
    parts = [cell(n["node"]) if n.get("gpus") is None else f"{cell(n['node'])} ({n['gpus']})" for n in row.get("nodes", ())]
    return ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")


def _whom(row: Row) -> str:
    if row.get("maintenance"):
        return "maintenance"
    return ", ".join([f"queue {cell(q)}" for q in row.get("queues", ())] + [f"user {cell(u)}" for u in row.get("users", ())])


COLUMNS: tuple[Column, ...] = (
    ("NAME", lambda r: cell(r["name"])),
    ("STATE", lambda r: cell(r["state"])),
    ("FOR", _whom),
    ("START", lambda r: clock(r.get("start_ms"))),
    ("END", lambda r: clock(r.get("end_ms"))),
    ("GPUS", lambda r: cell(r.get("gpus"))),
    ("NODES", _nodes),
    ("REASON", lambda r: cell(r.get("reason"))),
)
WIDE: tuple[Column, ...] = (
    ("BY", lambda r: cell(r.get("by"))),
    ("UNAVAILABLE", lambda r: ", ".join(cell(n) for n in r.get("unavailable", ())) or "-"),
)


@click.group()
def reservation() -> None:
    """Keep nodes or GPUs for somebody, or for maintenance, in a window of time."""


@reservation.command("list")
@output_options
@click.pass_context
def list_(ctx: click.Context, out: Output) -> None:
    """List reservations that are planned or in force."""
    rows = client_of(ctx).reservations()
    out.rows(rows, COLUMNS, WIDE, "reservations")
    if out.for_people and not rows:
        click.echo("nothing is reserved", err=True)


@reservation.command()
@click.argument("name")
@click.option("--nodes", metavar="A,B,...", default="", help="These nodes, all of each.")
@click.option("--gpus", type=click.IntRange(1), default=None, help="So many GPUs, on nodes that the scheduler chooses.")
@click.option("--start", type=Moment(), default="now", metavar="TIME", help="A time, or a duration from now.")
@click.option("--end", type=Moment(), default=None, metavar="TIME", help="A time, or a duration from now.")
@click.option("--length", type=Duration(), default=None, metavar="TIME", help="How long from the start, instead of --end.")
@click.option("--queue", "queues", multiple=True, metavar="QUEUE", help="For jobs of this queue and those below it; may be repeated.")
@click.option("--user", "users", multiple=True, metavar="USER", help="For jobs of this user; may be repeated.")
@click.option("--maintenance", is_flag=True, help="For nobody: the nodes are drained at the start, and given back at the end.")
@click.option("--deadline", type=Duration(), default=0.0, metavar="TIME", help="Also move what is not preemptible, so long after the start.")
@click.option("--reason", default="", help="Why; kept in the log and shown.")
@output_options
@click.pass_context
def create(
    ctx: click.Context, name: str, nodes: str, gpus: int | None, start: tuple[str, float], end: tuple[str, float] | None,
    length: float | None, queues: tuple[str, ...], users: tuple[str, ...], maintenance: bool, deadline: float, reason: str, out: Output,
) -> None:  # fmt: skip
    """Create the reservation NAME."""
    named = [node for node in nodes.split(",") if node]
    if bool(named) == bool(gpus):
        raise click.UsageError("give either --nodes or --gpus", ctx)
    if maintenance == bool(queues or users):
        raise click.UsageError("give either --maintenance, or --queue or --user", ctx)
    if (end is None) == (length is None):
        raise click.UsageError("give either --end or --length", ctx)
    body: dict[str, Any] = {
        "name": name, "nodes": named, "gpus": gpus or 0, "queues": list(queues), "users": list(users), "maintenance": maintenance,
        "deadline_s": deadline, "reason": reason, "start_in_s" if start[0] == "in" else "start_ms": _number(start),
    }  # fmt: skip
    if length is not None:
        body["length_s"] = length
    elif end is not None and end[0] == "at":
        body["end_ms"] = _number(end)
    elif end is not None and start[0] == "in":
        body["length_s"] = end[1] - start[1]
    else:
        raise click.UsageError("with a --start by the clock, --end is one by the clock too, or give --length", ctx)
    row = client_of(ctx).reserve(body)
    if out.for_people:
        click.echo(f"{clean(name)}: {_nodes(row)} for {_whom(row)}, {clock(row.get('start_ms'))} to {clock(row.get('end_ms'))}")
    else:
        out.rows([row], COLUMNS, WIDE, "reservations")


def _number(moment: tuple[str, float]) -> float | int:
    return int(moment[1]) if moment[0] == "at" else moment[1]


@reservation.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--reason", default="", help="Why; kept in the log and shown.")
@click.pass_context
def delete(ctx: click.Context, names: tuple[str, ...], reason: str) -> None:
    """Remove reservations; nodes that were drained for them take jobs again."""
    client = client_of(ctx)
    for name in names:
        client.unreserve(name, reason)
        click.echo(f"{clean(name)} is removed")
