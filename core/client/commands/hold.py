"""hold and release: jobs that are not to be started yet."""

from __future__ import annotations

import click

from gangline.core.client import exits
from gangline.core.client.options import client_of, job_argument, user_of
from gangline.core.client.watch import label, resolve


@click.command()
@job_argument(many=True)
@click.option("--reason", default="", help="Why; kept in the log, and shown by why.")
@click.option("--requeue", is_flag=True, help="Ask jobs that run to checkpoint and leave; they wait until they are released.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@click.pass_context
def hold(ctx: click.Context, jobs: tuple[str, ...], reason: str, requeue: bool, quiet: bool) -> int:
    """Keep JOBs from being started until they are released. What runs goes on, unless --requeue is given."""
    client, user = client_of(ctx), user_of(ctx)
    for ref in jobs:
        job = client.hold(resolve(client, ref, user), reason, requeue=requeue).body
        if not quiet:
            runs = job["state"] not in ("queued", "finished")
            click.echo(f"{label(job)} is held" + ("" if not runs else "; asked to leave" if requeue else "; what runs of it goes on"))
    return exits.DONE


@click.command()
@job_argument(many=True)
@click.option("--reason", default="", help="Why; kept in the log.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@click.pass_context
def release(ctx: click.Context, jobs: tuple[str, ...], reason: str, quiet: bool) -> int:
    """Let JOBs be started that were held."""
    client, user = client_of(ctx), user_of(ctx)
    for ref in jobs:
        job = client.release(resolve(client, ref, user), reason).body
        if not quiet:
            click.echo(f"{label(job)} is released")
    return exits.DONE
