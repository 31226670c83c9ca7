"""nodes, cordon, uncordon, drain, undrain."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.api import ApiError, Client
from gangline.core.client.options import Duration, client_of, nodes_argument, output_options, timeout_option
from gangline.core.client.output import Column, Output, cell, clean
from gangline.core.client.progress import Progress
from gangline.core.client.watch import label
from gangline.core.model.units import format_size

Row = Mapping[str, Any]
DRAIN_POLL_S = 0.5


def _state(node: Row) -> str:
    if node["state"] != "up":
        return cell(node["state"])
    if node.get("draining") or node.get("cordoned"):
        return "draining" if node.get("draining") else "cordoned"
    return cell(node["health"]) if node.get("health", "healthy") not in ("healthy", "suspect") and not node.get("schedulable", True) else "up"


def _of(node: Row, free: str, total: str) -> str:
    return f"{cell(node.get(free))}/{cell(node.get(total))}"


def _memory(node: Row) -> str:
    free, total = node.get("memory_free_mib"), node.get("memory_total_mib")
    return "-" if free is None or total is None else f"{_rounded(free)}/{_rounded(total)}"


def _rounded(mib: int) -> str:
    return format_size(mib // 1024 * 1024) if mib >= 1024 else format_size(mib)


def parted_words(parted: Sequence[Row]) -> str:
    """Return GPUs that are shared or partitioned, with what is free of the first and what is on the others: 0: 0.5 free, 1: 3g.40gb 1g.10gb."""
    words = (
        f"{gpu['gpu']}: " + (" ".join(cell(one["profile"]) for one in gpu["mig"]) if gpu.get("mig") else f"{cell(gpu.get('free'))} free")
        for gpu in parted
    )
    return ", ".join(words) or "-"


def job_ids(node: Row) -> list[str]:
    """Return the ids of the jobs on a node."""
    jobs = node.get("jobs") or []
    return [str(job["id"] if isinstance(job, dict) else job) for job in jobs] if isinstance(jobs, list) else []


def _jobs(node: Row) -> str:
    jobs = node.get("jobs")
    return str(len(jobs)) if isinstance(jobs, list) else cell(jobs)


NODES: tuple[Column, ...] = (
    ("NODE", lambda n: cell(n["id"])),
    ("STATE", _state),
    ("GPUS FREE", lambda n: _of(n, "gpus_free", "gpus_total")),
    ("MODEL", lambda n: cell(n.get("gpu_model"))),
    ("CPUS FREE", lambda n: _of(n, "cpus_free", "cpus_total")),
    ("MEMORY FREE", _memory),
    ("JOBS", _jobs),
    ("REASON", lambda n: cell(n.get("reason"))),
)
NODES_WIDE: tuple[Column, ...] = (
    ("PARTS OF GPUS", lambda n: parted_words(n.get("gpus_parted") or [])),
    ("HEALTH", lambda n: cell(n.get("health"))),
    ("ADDRESS", lambda n: cell(n.get("address"))),
    ("AGENT", lambda n: cell(n.get("agent_version"))),
    ("LABELS", lambda n: cell(n.get("labels"))),
)


@click.command()
@click.argument("names", metavar="[NODE]...", nargs=-1)
@click.option("--state", type=click.Choice(["up", "lost", "draining", "cordoned"]), default=None, help="Nodes in this state.")
@output_options
@click.pass_context
def nodes(ctx: click.Context, names: tuple[str, ...], state: str | None, out: Output) -> int:
    """List nodes, or the NODEs given."""
    client = client_of(ctx)
    rows = [client.get(f"/v1/nodes/{_segment(name)}").body for name in names] if names else client.nodes()
    rows = [row for row in rows if state is None or _state(row) == state]
    out.rows(rows, NODES, NODES_WIDE, "nodes")
    if out.for_people and not rows:
        click.echo("no such nodes" if state else "no node has joined; `gangline agent` runs the agent of one", err=True)
    return exits.DONE


def _segment(name: str) -> str:
    from gangline.core.client.api import segment

    return segment(name)


@click.command()
@nodes_argument
@click.option("--reason", default="", help="Why; kept in the log and shown.")
@click.pass_context
def cordon(ctx: click.Context, nodes: tuple[str, ...], reason: str) -> None:
    """Send no new ranks to NODEs; what runs there goes on."""
    _administer(client_of(ctx), nodes, "cordon", reason, "takes no new ranks")


@click.command()
@nodes_argument
@click.pass_context
def uncordon(ctx: click.Context, nodes: tuple[str, ...]) -> None:
    """Send new ranks to NODEs again."""
    _administer(client_of(ctx), nodes, "uncordon", "", "takes ranks again")


@click.command()
@nodes_argument
@click.pass_context
def undrain(ctx: click.Context, nodes: tuple[str, ...]) -> None:
    """End the drain of NODEs."""
    _administer(client_of(ctx), nodes, "undrain", "", "is no longer draining")


def _administer(client: Client, nodes: tuple[str, ...], action: str, reason: str, done: str) -> None:
    for node in nodes:
        client.administer(node, action, reason)
        click.echo(f"{clean(node)} {done}")


@click.command()
@nodes_argument
@click.option("--reason", default="", help="Why; kept in the log and shown.")
@click.option("--deadline", type=Duration(), default=0.0, metavar="TIME", help="Time after which gangs that are not preemptible are moved too.")
@click.option("-d", "--detach", is_flag=True, help="Begin the drain and return at once.")
@timeout_option
@click.pass_context
def drain(ctx: click.Context, nodes: tuple[str, ...], reason: str, deadline: float, detach: bool, timeout: float) -> int:
    """Empty NODEs: no new ranks, and their gangs move. Shows what remains and why, and ends when nothing does."""
    client = client_of(ctx)
    for node in nodes:
        client.administer(node, "drain", reason, deadline)
        click.echo(f"{clean(node)} is draining")
    if detach:
        return exits.DONE
    try:
        return _until_empty(client, nodes, deadline, timeout)
    except KeyboardInterrupt:
        click.echo(
            f"\ngangline: detached, the drain goes on; to look on: gangline drain {' '.join(nodes)}; to end it: gangline undrain", err=True
        )
        return exits.INTERRUPTED


def _until_empty(client: Client, nodes: tuple[str, ...], deadline_s: float, timeout_s: float) -> int:
    began = time.monotonic()
    progress = Progress()
    said: dict[str, str] = {}
    waiting = list(nodes)
    while True:
        remains: list[str] = []
        for node in list(waiting):
            row = client.get(f"/v1/nodes/{_segment(node)}").body
            left = job_ids(row)
            count = len(left) or (0 if isinstance(row.get("jobs"), list) else int(row.get("jobs") or 0))
            if not count:
                waiting.remove(node)
                progress.clear()
                click.echo(f"{clean(node)} is empty")
            elif not row.get("draining"):
                progress.clear()
                click.echo(f"gangline: the drain of {clean(node)} was ended by somebody", err=True)
                return exits.CONFLICT
            remains += left or [f"{count} jobs"]
        if not waiting:
            return exits.DONE
        _say_remains(client, remains, said, progress, deadline_s)
        progress.update(f"{', '.join(waiting)}: {len(remains)} left: {', '.join(remains[:3])}")
        if timeout_s and time.monotonic() - began >= timeout_s:
            progress.clear()
            click.echo(f"gangline: --timeout ended, the drain goes on; left: {', '.join(remains)}", err=True)
            return exits.TIMED_OUT
        time.sleep(DRAIN_POLL_S)


def _say_remains(client: Client, jobs: list[str], said: dict[str, str], progress: Progress, deadline_s: float) -> None:
    """Say for each job that is still there why, whenever that changes."""
    for job_id in jobs[:20]:
        try:
            why = _why(client.job(job_id).body, deadline_s)
        except ApiError as error:
            if error.status != 404:
                raise
            continue
        if said.get(job_id) != why:
            said[job_id] = why
            progress.clear()
            click.echo(f"  {why}", err=True)


def _why(job: dict[str, Any], deadline_s: float) -> str:
    spec = job.get("spec") or {}
    who = f"{label(job)} {job['state']}"
    if job["state"] in ("preempting", "restarting"):
        return f"{who}: it is leaving, its grace is {spec.get('preemption', {}).get('grace', '30s')}"
    if spec.get("preemptible", True):
        return f"{who}: it will be asked to leave"
    if deadline_s:
        return f"{who}: it is not preemptible and stays until its end or the deadline"
    limit = spec.get("time_limit")
    if limit:
        return f"{who}: it is not preemptible and stays until its end, {limit} after its start at the latest; --deadline moves it sooner"
    return f"{who}: it is not preemptible and has no time limit, so it may stay for ever; --deadline moves it, gangline stop {job['id']} ends it"
