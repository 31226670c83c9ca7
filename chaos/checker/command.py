"""`gangline chaos check`: the checker on a cluster, an archive, or a file of frames."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from gangline.chaos.checker.evidence import Entry
from gangline.chaos.checker.sources import Evidence, NoLog, gather
from gangline.chaos.checker.walk import examine
from gangline.core.client import exits
from gangline.core.client.settings import Settings
from gangline.core.store.api import StoreError
from gangline.core.store.endpoints import TlsFiles

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("place", default="")
@click.option("--cluster", default="local", metavar="NAME", help="Name of the cluster, for endpoints of etcd.  [default: local]")
@click.option("--etcd-ca", type=_FILE, help="CA certificate for TLS to etcd.")
@click.option("--etcd-cert", type=_FILE, help="Client certificate.")
@click.option("--etcd-key", type=_FILE, help="Key of the client certificate.")
@click.option(
    "--agent", "agents", multiple=True, metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="State directory of an agent, or a copy: its own records are checked, too. May be given many times.",
)  # fmt: skip
@click.option("--history", type=_FILE, help="What clients were told (chaos/checker/history.py).")
@click.option("--at-rest", type=click.FloatRange(0), metavar="SECONDS", help="Faults ended so long ago: nothing may be on its way since (S16).")
@click.option("--decisions/--no-decisions", default=True, help="Take all decisions again (S14, S15).  [default: decisions]")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def main(
    place: str, cluster: str, etcd_ca: Path | None, etcd_cert: Path | None, etcd_key: Path | None, agents: tuple[Path, ...],
    history: Path | None, at_rest: float | None, decisions: bool, as_json: bool,
) -> None:  # fmt: skip
    """Check what a cluster has done against S1 to S16 (docs/chaos.md), by its log and whatever else there is.

    PLACE is the state directory of a local cluster [GANGLINE_STATE, or .gangline], endpoints of etcd (host:port,host:port), a directory with
    archived segments, or one whose folders have an archive each, or a file of frames. Exit status: 0 no violation, 3 violations, 2 there is no
    log to check, 9 the store cannot be reached.
    """
    tls = TlsFiles(ca=etcd_ca, cert=etcd_cert, key=etcd_key) if etcd_ca else None
    try:
        found = gather(place or Settings().state_dir(), cluster=cluster, tls=tls, agents=agents, history=history)
        ok = _check(found, at_rest, decisions, as_json)
    except (NoLog, OSError, struct.error) as e:
        click.echo(f"Error: {e}", err=True)
        sys.exit(exits.USAGE)
    except StoreError as e:
        click.echo(f"Error: {e}; if the cluster is down, give the directory that has its archives", err=True)
        sys.exit(exits.UNREACHABLE)
    sys.exit(exits.DONE if ok else exits.JOB_FAILED)


def _check(found: Evidence, at_rest: float | None, decisions: bool, as_json: bool) -> bool:
    """Print the report and return whether nothing is violated."""
    begun = time.monotonic()
    by_ms, entries = None, found.entries
    if at_rest is not None:
        # A live cluster is looked at now. A log ends with its last entry.
        live = found.replicas is not None
        entries, last_ms = (entries, time.time_ns() // 1_000_000) if live else _with_end(entries)
        by_ms = int(last_ms - at_rest * 1000)
    report = examine(
        entries, found.agent_records, found.client_history, found.nodes, by_ms,
        snapshots=found.snapshots, replicas=found.replicas, base=found.base, decisions=decisions,
    )  # fmt: skip
    took_s = time.monotonic() - begun
    if as_json:
        click.echo(json.dumps({**report.to_json(), "took_s": round(took_s, 3)}, indent=1))
    else:
        for line in report.lines():
            click.echo(line)
    return report.ok


def _with_end(entries: Iterable[Entry]) -> tuple[Iterator[Entry], int]:
    """Return the entries, and the time of the last one."""
    kept = list(entries)
    return iter(kept), max((e.frame.at_ms for e in kept if e.frame is not None), default=0)
