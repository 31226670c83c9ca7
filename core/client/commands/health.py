"""health: how well nodes and their GPUs are, with the evidence; and an operator's word about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.api import Client, segment
from gangline.core.client.commands.read import clock
from gangline.core.client.options import client_of, output_options
from gangline.core.client.output import Column, Output, cell, clean

Row = Mapping[str, Any]
#: word of the option → state of health
_STATES = {"--quarantine": "quarantined", "--repair": "repair", "--repaired": "burn_in", "--healthy": "healthy"}

COLUMNS: tuple[Column, ...] = (
    ("NODE", lambda r: cell(r["node"])),
    ("GPU", lambda r: cell(r.get("index")) if r.get("gpu") else "all of it"),
    ("STATE", lambda r: cell(r["state"])),
    ("NEEDS", lambda r: cell(r.get("action"))),
    ("STRIKES", lambda r: cell(r.get("strikes"))),
    ("SINCE", lambda r: clock(r.get("since_ms"))),
    ("WHY", lambda r: cell(r.get("message"))),
)
WIDE: tuple[Column, ...] = (
    ("UUID", lambda r: cell(r.get("gpu"))),
    ("NOT BEFORE", lambda r: clock(r.get("until_ms"))),
    ("TIMES", lambda r: cell(r.get("withdrawn"))),
    ("TEST", lambda r: cell(r.get("burn_in"))),
    ("BY", lambda r: cell(r.get("by"))),
)


@click.command()
@click.argument("names", metavar="[NODE]...", nargs=-1)
@click.option("--gpu", default="", metavar="GPU", help="Only this GPU of the node, by index or UUID; without it the node as a whole.")
@click.option("--quarantine", "word", flag_value="--quarantine", help="Take it out: its gangs move, and nobody new gets it.")
@click.option("--repair", "word", flag_value="--repair", help="Somebody works on it.")
@click.option("--repaired", "word", flag_value="--repaired", help="It is mended: it is tested, and used again if it passes.")
@click.option("--healthy", "word", flag_value="--healthy", help="Nothing is wrong with it: use it again, untested.")
@click.option("--reason", default="", help="Why; kept in the log and shown.")
@output_options
@click.pass_context
def health(ctx: click.Context, names: tuple[str, ...], gpu: str, word: str | None, reason: str, out: Output) -> int:
    """Show nodes and GPUs that are, or were, not well, with the evidence for the NODEs given; or say how they are."""
    client = client_of(ctx)
    if word is not None:
        return _say(client, names, gpu, _STATES[word], reason)
    if gpu or reason:
        raise click.UsageError("--gpu and --reason go with --quarantine, --repair, --repaired or --healthy.")
    wanted = names or tuple(str(n["id"]) for n in client.nodes() if n.get("health", "healthy") != "healthy")
    found = [client.get(f"/v1/nodes/{segment(name)}/health").body for name in wanted]
    if not out.for_people:
        out.rows(found, COLUMNS, WIDE, "nodes")
        return exits.DONE
    rows = [{"node": row["node"], **ailment} for row in found for ailment in row["ailments"] if names or ailment["state"] != "healthy"]
    if rows:
        out.rows(rows, COLUMNS, WIDE, "ailments")
    else:
        click.echo("nothing is known against them" if names else "all nodes and GPUs are healthy", err=True)
    for row in found if names else ():
        _evidence(row)
    return exits.DONE


def _evidence(row: Row) -> None:
    for ailment in row["ailments"]:
        what = f"GPU {cell(ailment['index'])}" if ailment["gpu"] else "the node"
        for s in ailment["symptoms"]:
            needs = f"; needs {s['action']}" if s["action"] else ""
            past = ", past" if s["past"] else ""
            click.echo(f"  {clock(s['at_ms'])} {clean(row['node'])} {what}: {clean(s['message'])} ({s['strikes']:g} strikes{needs}{past})")
    for d in row["deaths"]:
        itself = f"; it died on {d['blamed_itself']} nodes, so it is to blame itself" if d["blamed_itself"] else ""
        on = f" with {', '.join(clean(g) for g in d['gpus'])}" if d["gpus"] else ""
        died = f"job {clean(d['job'])} died here{on}, {d['times']} times: {clean(d['message'])}{itself}"
        click.echo(f"  {clock(d['at_ms'])} {clean(row['node'])}: {died}")


def _say(client: Client, names: tuple[str, ...], gpu: str, state: str, reason: str) -> int:
    if not names:
        raise click.UsageError("Name the NODE.")
    if gpu and len(names) > 1:
        raise click.UsageError("--gpu goes with one NODE.")
    for name in names:
        body = {"state": state, "gpu": gpu, "reason": reason}
        row = client.request("POST", f"/v1/nodes/{segment(name)}/health", body=body, repeat=True).body
        ailment = next((a for a in row["ailments"] if (gpu in (str(a["index"]), a["gpu"]) if gpu else a["gpu"] is None)), None)
        click.echo(f"{clean(name)}{f' GPU {clean(gpu)}' if gpu else ''} is {ailment['state'].replace('_', ' ') if ailment else 'healthy'}")
    return exits.DONE
