"""apply: the queues and topologies of a cluster file, compared with what is declared before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.options import client_of, output_options
from gangline.core.client.output import Output, cell, clean
from gangline.core.model.clusterfile import MAX_BYTES, parse_json, parse_yaml, to_words
from gangline.core.model.problems import BadJob
from gangline.core.model.strict_json import load_json

#: with --detailed-exitcode: there is a difference; what else would be 2 is 1 then
CHANGES = 2


@click.command(no_args_is_help=True)
@click.option("-f", "--file", "name", required=True, metavar="FILE", help="The cluster file; `-` is standard input.")
@click.option("--dry-run", is_flag=True, help="Show the difference and change nothing.")
@click.option("--reason", default="", help="Why; kept in the log and shown.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
@click.option("--detailed-exitcode", "detailed", is_flag=True, help="Exit with 2 when there is a difference, 0 when there is none.")
@output_options
@click.pass_context
def apply(ctx: click.Context, name: str, dry_run: bool, reason: str, yes: bool, detailed: bool, out: Output) -> int:
    """Make the queues and topologies those of FILE. Shows what that changes, and asks first when a person is there to answer."""
    words = _read(name, exits.INTERNAL if detailed else exits.USAGE)
    client = client_of(ctx)
    base = client.queues()["index"]
    planned = client.declare_queues(words, base, dry_run=True)
    lines = list(diff_lines(planned["diff"]))
    if out.for_people and not out.fields:
        click.echo("\n".join(lines) if lines else "nothing to change")
    for warning in planned["warnings"]:
        click.echo(f"gangline: warning: {clean(warning)}", err=True)
    applied = planned
    if lines and not dry_run:
        if not yes and _on_terminal():
            click.confirm(f"Change {_count(lines)}?", abort=True, err=True)
        applied = client.declare_queues({**words, "reason": reason}, base, dry_run=False)
    if not out.for_people or out.fields:
        out.one(applied, "index")
    elif lines:
        click.echo(f"{_count(lines)} {'would be changed' if dry_run else 'changed'}", err=dry_run)
    return CHANGES if detailed and lines else exits.DONE


def diff_lines(diff: dict[str, Any]) -> Iterator[str]:
    """Say a difference, a line for each queue that comes or goes, for each field that changes, and for each topology."""
    for queue in diff["removed"]:
        yield f"- {clean(queue)}"
    for added in diff["added"]:
        fields = ", ".join(f"{field} {cell(value)}" for field, value in _flat(added["fields"]))
        yield f"+ {clean(added['queue'])}{f': {fields}' if fields else ''}"
    for change in diff["changed"]:
        yield f"~ {clean(change['queue'])}: {clean(change['field'])} {_side(change, 'old')} → {_side(change, 'new')}"
    if diff["reordered"]:
        yield "~ the order of the queues"
    for topology in diff.get("topologies", ()):
        yield _topology_line(topology)


def _topology_line(change: dict[str, Any]) -> str:
    name, old, new = (clean(str(change["topology"])), change["old"], change["new"])
    if new is None:
        return f"- topology {name}"
    levels = " > ".join(clean(level) for level in new)
    return f"+ topology {name}: {levels}" if old is None else f"~ topology {name}: {' > '.join(clean(level) for level in old)} → {levels}"


def _flat(fields: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for field, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{field}.")
        else:
            yield f"{above}{field}", value


def _side(change: dict[str, Any], side: str) -> str:
    """Return the old or the new value of a change; what is not given by what that means."""
    field, value = str(change["field"]), change[side]
    if value is not None:
        return cell(value)
    if ".models." in field:
        return "(not given)"
    return "unlimited" if field.startswith(("quota.", "limit.")) else "as above"


def _count(lines: list[str]) -> str:
    return "1 thing" if len(lines) == 1 else f"{len(lines)} things"


def _read(name: str, code: int) -> dict[str, Any]:
    """Return the file's declaration in its own words, normalised. Says everything that is wrong with it and raises Exit when something is."""
    shown = "<standard input>" if name == "-" else name
    try:
        text = _text(name)
        return to_words(parse_json(load_json(text, MAX_BYTES)) if name.endswith(".json") else parse_yaml(text, shown))
    except BadJob as error:
        click.echo("\n".join(clean(line) for line in BadJob(error.problems, shown).lines()), err=True)
    except OSError as error:
        click.echo(f"{clean(shown)}: {(error.strerror or str(error)).lower()} [GL-2011]", err=True)
    click.echo("gangline: nothing was changed; `gangline explain CODE` says more about a code", err=True)
    raise exits.Exit(code)


def _text(name: str) -> bytes:
    """Return a file's bytes, never many more than a cluster file may have."""
    if name == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with open(name, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
