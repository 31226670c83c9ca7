"""ps, show, story: what is and what was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.options import client_of, job_argument, output_options, user_of
from gangline.core.client.output import Column, Output, cell, clean, gpu_time, table
from gangline.core.client.watch import end, ended, label, reason, resolve
from gangline.core.model.units import format_duration, format_size

Row = Mapping[str, Any]
#: states of jobs that are not over
ACTIVE = "queued,placed,preparing,running,restarting,preempting,resizing"


def ago(at_ms: int | None) -> str:
    """Return how long ago a time of the log was, roughly."""
    if not at_ms:
        return "-"
    seconds = max(0, round(time.time_ns() / 1e9 - at_ms / 1000))
    return rough(seconds)


def rough(seconds: int) -> str:
    """Return a duration by its largest unit or two: 45s, 12m, 3h20m, 2d4h."""
    if seconds < 600:
        return format_duration(seconds)
    step = 60 if seconds < 86_400 else 3600
    return format_duration(seconds // step * step)


def clock(at_ms: int | None) -> str:
    """Return a time of the log in the local zone, "-" for none."""
    if not at_ms:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))


def _nodes(row: Row) -> str:
    nodes = row.get("nodes") or []
    return cell(nodes) if len(nodes) <= 2 else f"{len(nodes)} nodes"


def _state(row: Row) -> str:
    return cell(row.get("outcome") or row["state"]) if row["state"] == "finished" else cell(row["state"])


def _since(row: Row) -> str:
    return ago(row.get("ended_at_ms") or row.get("started_at_ms") or row.get("submitted_at_ms"))


PS: tuple[Column, ...] = (
    ("ID", lambda r: cell(r["id"])),
    ("NAME", lambda r: cell(r.get("name"))),
    ("STATE", _state),
    ("RANKS", lambda r: cell(r.get("ranks"))),
    ("GPUS", lambda r: cell(r.get("gpus"))),
    ("NODES", _nodes),
    ("SINCE", _since),
    ("REASON", lambda r: cell(r.get("reason"))),
)
PS_WIDE: tuple[Column, ...] = (
    ("QUEUE", lambda r: cell(r.get("queue"))),
    ("USER", lambda r: cell(r.get("user"))),
    ("PRIORITY", lambda r: cell(r.get("priority"))),
    ("GENERATION", lambda r: cell(r.get("generation"))),
    ("SUBMITTED", lambda r: clock(r.get("submitted_at_ms"))),
)


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Jobs that have ended too.")
@click.option("--mine", is_flag=True, help="Jobs of mine only.")
@click.option("--state", default=None, metavar="STATE", help="Jobs in this state: queued, placed, preparing, running, restarting, ...")
@click.option("--queue", default=None, help="Jobs of this queue.")
@click.option("--user", default=None, help="Jobs of this user.")
@click.option("--name", default=None, help="Jobs of this name.")
@click.option("--elements", is_flag=True, help="Elements of arrays too: those that are live, and the last that have ended.")
@click.option("--array", default=None, metavar="JOB", help="Elements of this array.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Most rows to print.")
@output_options
@click.pass_context
def ps(
    ctx: click.Context,
    everything: bool,
    mine: bool,
    state: str | None,
    queue: str | None,
    user: str | None,
    name: str | None,
    elements: bool,
    array: str | None,
    limit: int,
    out: Output,
) -> None:
    """List jobs, newest first; without -a those that have not ended."""
    wanted = state or (None if everything or name or array else ACTIVE)
    client, shown = client_of(ctx), "1" if elements else None
    array = resolve(client, array, user_of(ctx)) if array else None
    rows, more = client.jobs(limit, state=wanted, queue=queue, user=user_of(ctx) if mine else user, name=name, array=array, elements=shown)
    out.rows(rows, PS, PS_WIDE, "jobs")
    if out.for_people and not rows:
        hint = "" if everything else "; `gangline ps -a` lists those that have ended"
        click.echo(f"no such jobs{hint}", err=True)
    if more:
        click.echo(f"gangline: there are more than {limit}; --limit N prints more", err=True)


@click.command()
@job_argument()
@output_options
@click.pass_context
def show(ctx: click.Context, job: str, out: Output) -> None:
    """Show everything about JOB: an id, the beginning of one, a name, or @last."""
    client = client_of(ctx)
    found: dict[str, Any] = client.job(resolve(client, job, user_of(ctx))).body
    if out.one(found):
        return
    for word, value in _facts(found):
        click.echo(f"{word:<12} {value}")
    if found.get("roles"):
        click.echo("")
        table(_ROLES, found["roles"], out.header)
    if found.get("placement"):
        click.echo("")
        table(_PLACEMENT, found["placement"], out.header)
    click.echo("\nspec")
    import yaml

    for line in yaml.safe_dump(found.get("spec"), sort_keys=False, allow_unicode=True, width=120).splitlines():
        click.echo(f"  {line}")


def _facts(job: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what is worth saying about a job, first what happens to it and why."""
    facts = [("job", label(job)), ("state", end(job) if ended(job) else cell(job["state"]))]
    if job["state"] == "queued" and reason(job):
        deferred = job.get("deferred") or {}
        facts.append(("waits", f"{reason(job)} [{cell(deferred.get('code'))}]"))
    if job.get("elements"):
        facts += [("elements", _counts(job["elements"])), ("indices", _indices(job["elements"]))]
    if job.get("array"):
        facts.append(("array", f"element {job['array_index']} of {cell(job['array'])}"))
    facts += [(cell(each["when"]), cell(each["job"])) for each in job.get("waits_for") or ()]
    if job.get("held"):
        facts.append(("held", f"by {cell(job.get('held_by'))}"))
    facts += [
        ("begin", clock(job.get("begin_at_ms"))),
        ("deadline", clock(job.get("deadline_ms"))),
        ("gang", f"{job.get('ranks')} ranks, {job.get('gpus')} GPUs, generation {job.get('generation')}, {job.get('restarts', 0)} restarts"),
        ("queue", f"{cell(job.get('queue'))}, priority {cell(job.get('priority'))}, user {cell(job.get('user'))}"),
        ("submitted", clock(job.get("submitted_at_ms"))),
        ("started", clock(job.get("started_at_ms"))),
        ("ended", clock(job.get("ended_at_ms"))),
    ]
    last = job.get("last_restart")
    if last:
        facts.append(("last restart", f"{cell(last.get('cause'))}: {cell(last.get('message'))}"))
    step, checkpoint = job.get("step"), job.get("checkpoint") or {}
    if step is not None and step >= 0:
        facts.append(("progress", f"step {step}, checkpoint at {checkpoint.get('step', '-')} {cell(checkpoint.get('path'))}"))
    if job.get("lost_gpu_s"):
        facts.append(("lost work", f"{gpu_time(job['lost_gpu_s'])} that were not saved when it was restarted or moved"))
    if job.get("cost_gpu_s"):
        facts.append(("cost others", f"{gpu_time(job['cost_gpu_s'])} that jobs had not saved which made room for it"))
    if job.get("master"):
        facts.append(("rendezvous", cell(job["master"])))
    return [(word, value) for word, value in facts if value != "-"]


def _counts(elements: Row) -> str:
    words = ("active", "queued", "to_come", "succeeded", "failed", "cancelled")
    counts = ", ".join(f"{elements[word]} {word.replace('_', ' ')}" for word in words if elements[word])
    limit = f"; at most {elements['at_most']} at once" if elements.get("at_most") else ""
    return f"{elements['total']}: {counts}{limit}"


def _indices(elements: Row) -> str:
    failed = f"; failed: {cell(elements['failed_indices'])}" if elements.get("failed_indices") else ""
    return f"{cell(elements['indices'])}{failed}"


def _ranks(part: Row) -> str:
    ranks = [rank["rank"] for rank in part.get("ranks", ())]
    return runs(ranks)


def _part_states(part: Row) -> str:
    states: dict[str, int] = {}
    for rank in part.get("ranks", ()):
        states[str(rank.get("state"))] = states.get(str(rank.get("state")), 0) + 1
    return ", ".join(state if len(states) == 1 else f"{count} {state}" for state, count in states.items())


def _of(row: Row, word: str) -> str:
    there, asked, fewest = row[word], row[f"asked_{word}"], row.get(f"min_{word}")
    least = f" (at least {fewest})" if fewest is not None and fewest != asked else ""
    return f"{there} of {asked}{least}"


_ROLES: tuple[Column, ...] = (
    ("ROLE", lambda r: cell(r["name"])),
    ("RANKS", lambda r: _of(r, "ranks")),
    ("REPLICAS", lambda r: _of(r, "replicas")),
    ("GPUS EACH", lambda r: cell(r["gpus"])),
    ("NODES", _nodes),
)
_PLACEMENT: tuple[Column, ...] = (
    ("NODE", lambda p: cell(p["node"])),
    ("RANKS", _ranks),
    ("STATE", _part_states),
    ("GPUS", lambda p: gpu_words([(rank.get("gpus", ()), rank.get("share")) for rank in p.get("ranks", ())])),
)


def gpu_words(given: Iterable[tuple[Iterable[int], Row | None]]) -> str:
    """Return GPUs with what ranks have of them where it is not the whole: 0-3, 4 (0.5), 5 (20GiB), 6 (1g.10gb)."""
    whole: list[int] = []
    parts: list[str] = []
    for gpus, share in given:
        if not share:
            whole += gpus
        elif share.get("mig"):
            parts += [f"{one['gpu']} ({clean(str(one['profile']))})" for one in share["mig"]]
        else:
            part = format_size(share["memory_mib"]) if share.get("memory_mib") else f"{share.get('part'):g}"
            parts += [f"{gpu} ({part})" for gpu in gpus]
    return ", ".join([*([runs(whole)] if whole or not parts else []), *parts])


def runs(numbers: list[int]) -> str:
    """Return numbers with their runs folded: 0-7,9."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "-"


@click.command()
@job_argument()
@output_options
@click.pass_context
def story(ctx: click.Context, job: str, out: Output) -> None:
    """Tell everything that the log says about JOB, in order."""
    client = client_of(ctx)
    body = client.get(f"/v1/jobs/{_segment(client, ctx, job)}/story").body
    out.rows(body["entries"], STORY, STORY_WIDE, "entries", "index")
    if not body["entries"]:
        raise exits.Exit(exits.NOT_FOUND)


def _segment(client: Any, ctx: click.Context, job: str) -> str:
    from gangline.core.client.api import segment

    return segment(resolve(client, job, user_of(ctx)))


STORY: tuple[Column, ...] = (
    ("INDEX", lambda e: cell(e["index"])),
    ("TIME", lambda e: clock(e["at_ms"])),
    ("EVENT", lambda e: cell(e["event"])),
    ("MESSAGE", lambda e: cell(e.get("message"))),
)
STORY_WIDE: tuple[Column, ...] = (
    ("EPOCH", lambda e: cell(e.get("epoch"))),
    ("BODY", lambda e: clean(json.dumps(e.get("body"), ensure_ascii=False))),
)
