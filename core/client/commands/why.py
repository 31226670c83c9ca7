"""why, when: what the log says about where a job is, who holds what it waits for, and what follows from time limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from gangline.core.client.api import segment
from gangline.core.client.options import client_of, job_argument, output_options, user_of
from gangline.core.client.output import Column, Output, cell, table
from gangline.core.client.watch import label, resolve

Answer = Mapping[str, Any]
#: queues that are named in one line
_SHOWN = 6


@click.command()
@job_argument()
@output_options
@click.pass_context
def why(ctx: click.Context, job: str, out: Output) -> None:
    """Say why JOB waits, or is where it is: the reason as it was recorded, who holds what it needs, and what would change it."""
    client = client_of(ctx)
    found: dict[str, Any] = client.get(f"/v1/jobs/{segment(resolve(client, job, user_of(ctx)))}/why").body
    if out.one(found, "job"):
        return
    click.echo(f"{label({**found, 'id': found['job']})} is {cell(found['state'])}: {cell(found['message'])}")
    facts = [*_waiting(found), *_history(found)]
    for word, value in facts:
        click.echo(f"  {word:<13} {value}")
    largest = (found.get("holders") or {}).get("largest")
    if largest:
        click.echo("")
        table(HOLDERS, largest, out.header)


@click.command()
@job_argument()
@output_options
@click.pass_context
def when(ctx: click.Context, job: str, out: Output) -> None:
    """Estimate when JOB starts if it waits, else when it ends, and say what the estimate is based on."""
    client = client_of(ctx)
    found: dict[str, Any] = client.get(f"/v1/jobs/{segment(resolve(client, job, user_of(ctx)))}/when").body
    if out.one(found, "job"):
        return
    click.echo(f"{label({**found, 'id': found['job']})} is {cell(found['state'])}; {found['of']}: {_time(found)}")
    click.echo(f"  {'basis':<13} {cell(found['basis'])}")
    for word, value in _place(found.get("order")):
        click.echo(f"  {word:<13} {value}")


def _time(found: Answer) -> str:
    from gangline.core.client.commands.read import clock, rough

    if found.get("at_ms") is None:
        return "cannot be told"
    if found["state"] == "finished":
        return clock(found["at_ms"])
    within = rough(round(found.get("in_s") or 0))
    return f"about {clock(found['at_ms'])}, in {within}" if found["of"] == "start" else f"{clock(found['at_ms'])} at the latest, in {within}"


def _place(order: Answer | None) -> Iterator[tuple[str, str]]:
    if order:
        place = f"{ordinal(order['position'])} of {order['waiting']} in {cell(order['queue'])}"
        yield "in its queue", f"{place}, {order['gpus_ahead']} GPUs ahead of it"


def _waiting(found: Answer) -> Iterator[tuple[str, str]]:
    """Say what concerns a job that waits."""
    from gangline.core.client.commands.read import ago, clock

    witness, order, holders = found.get("witness") or {}, found.get("order"), found.get("holders")
    if witness:
        when = f", {clock(witness['at_ms'])}, {ago(witness['at_ms'])} ago" if witness.get("at_ms") else ""
        yield "recorded", f"entry {witness['index']}{when} [{cell(witness['code'])}]"
        if witness.get("need"):
            yield "needs", cell(witness["need"])
        if witness.get("have"):
            yield "has", cell(witness["have"])
    yield from _place(order)
    if holders:
        yield "held by", _held(holders)
    if found.get("impossible"):
        yield "never", cell(found["impossible"])
    for sentence in found.get("would_change") or ():
        yield "would change", cell(sentence)
    remedy = _remedy(str(witness.get("code", "")))
    if remedy:
        yield "remedy", remedy


def _held(holders: Answer) -> str:
    queues = [f"{cell(row['queue'])} {row['gpus']}" for row in holders["queues"][:_SHOWN]]
    more = len(holders["queues"]) - len(queues)
    names = f": {', '.join(queues)}{f' and {more} more queues' if more > 0 else ''}" if queues else ""
    within = f" of {cell(holders['queue'])} and the queues that share its bounds" if holders.get("queue") else ""
    return f"{holders['jobs']} jobs{within} with {holders['gpus']} GPUs{names}"


def _history(found: Answer) -> Iterator[tuple[str, str]]:
    """Say what made the state of a job, each with its entry."""
    from gangline.core.client.commands.read import clock

    last, notice = found.get("last_restart"), found.get("notice")
    if last:
        yield "last restart", f"{cell(last.get('cause'))}: {cell(last.get('message'))}"
    if notice:
        yield "notice", f"{cell(notice.get('cause'))}: {cell(notice.get('message'))}; until {clock(notice.get('deadline_ms'))}"
    if found.get("outcome"):
        yield "outcome", f"{cell(found['outcome'])} [{cell(found.get('cause'))}]"
    for entry in found.get("records") or ():
        yield f"entry {entry['index']}", f"{clock(entry['at_ms'])}  {cell(entry['event'])}: {cell(entry['message'])}"


def _remedy(code: str) -> str:
    from gangline.core.client.codes import CODES

    return CODES[code][2] if code in CODES else ""


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, 11th, ..."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _ago(row: Answer) -> str:
    from gangline.core.client.commands.read import ago

    return ago(row.get("since_ms"))


def _ends(row: Answer) -> str:
    from gangline.core.client.commands.read import clock

    return clock(row.get("ends_at_ms")) if row.get("ends_at_ms") else "no limit"


HOLDERS: tuple[Column, ...] = (
    ("JOB", lambda r: cell(r["job"])),
    ("NAME", lambda r: cell(r.get("name"))),
    ("USER", lambda r: cell(r.get("user"))),
    ("QUEUE", lambda r: cell(r.get("queue"))),
    ("GPUS", lambda r: cell(r.get("gpus"))),
    ("SINCE", _ago),
    ("ENDS", _ends),
)
