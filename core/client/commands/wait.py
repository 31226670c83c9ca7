"""wait and stop: the ends of jobs."""

from __future__ import annotations

import click

from gangline.core.client import exits
from gangline.core.client.options import client_of, job_argument, timeout_option, user_of
from gangline.core.client.progress import Progress
from gangline.core.client.watch import Waiter, detached, ended, exit_code, fate, label, resolve, wait_for


@click.command()
@job_argument(many=True)
@click.option("--until", type=click.Choice(["finished", "running"]), default="finished", show_default=True, help="What to wait for.")
@click.option("--propagate", is_flag=True, help="Exit with the job's own exit code when it failed.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@timeout_option
@click.pass_context
def wait(ctx: click.Context, jobs: tuple[str, ...], until: str, propagate: bool, quiet: bool, timeout: float) -> int:
    """Wait until all JOBs have ended. Exit codes: 0 all succeeded, 3 one did not, 4 it can never run, 5 or 124 --timeout ended."""
    client, user = client_of(ctx), user_of(ctx)
    ids = [str(client.job(resolve(client, job, user)).body["id"]) for job in jobs]
    if until == "finished":
        return wait_for(client, ids, timeout_s=timeout, propagate=propagate, quiet=quiet)
    code = exits.DONE
    try:
        for job_id in ids:
            job = Waiter(client, job_id, until=until, timeout_s=timeout, progress=Progress(quiet=quiet)).wait()
            if not quiet:
                click.echo(fate(job), err=True)
            if ended(job):
                code = code or exit_code(job, propagate=propagate)
    except KeyboardInterrupt:
        raise detached(ids) from None
    return code


@click.command()
@job_argument(many=True)
@click.option("--reason", default="", help="Why; kept in the log.")
@click.option("--wait", "until_ended", is_flag=True, help="Wait until they have ended.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
@timeout_option
@click.pass_context
def stop(ctx: click.Context, jobs: tuple[str, ...], reason: str, until_ended: bool, quiet: bool, yes: bool, timeout: float) -> int:
    """Stop JOBs: their ranks are asked to end, and killed after the grace of each job."""
    client, user = client_of(ctx), user_of(ctx)
    found = [client.job(resolve(client, job, user)).body for job in jobs]
    running = [job for job in found if not ended(job)]
    if len(running) > 1 and not yes and _on_terminal():
        gpus = sum(int(job.get("gpus") or 0) for job in running)
        click.confirm(f"Stop {len(running)} jobs that hold or want {gpus} GPUs?", abort=True, err=True)
    for job in found:
        answer = client.stop(str(job["id"]), reason)
        if not quiet:
            click.echo(f"{label(job)} {'had already ended' if answer.status == 200 and ended(job) else 'is stopping'}")
    if until_ended:
        for job in found:
            Waiter(client, str(job["id"]), timeout_s=timeout, progress=Progress(quiet=quiet)).wait()
    return exits.DONE


def _on_terminal() -> bool:
    import sys

    return sys.stdin.isatty() and sys.stderr.isatty()
