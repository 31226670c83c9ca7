"""exec: a command beside a rank."""

from __future__ import annotations

import sys

import click

from gangline.core.client import exits
from gangline.core.client.options import client_of, job_argument, user_of
from gangline.core.client.watch import resolve
from gangline.core.model import execwire as wire


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@job_argument()
@click.argument("rank", type=click.IntRange(0))
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def execute(ctx: click.Context, job: str, rank: int, command: tuple[str, ...]) -> int:
    """Run COMMAND beside RANK of JOB, with that rank's user, environment, directory, mounts and limits, or in its container.

    Ends with the exit code of the command, and prints what it prints. It has no standard input. It ends when the rank does.

    \b
    gangline exec train 0 -- nvidia-smi
    gangline exec train 0 -- sh -c 'df -h $GANGLINE_CHECKPOINT_DIR'
    """
    client = client_of(ctx)
    frames, found = wire.Frames(), resolve(client, job, user_of(ctx))
    words = list(command[1:] if command[0] == "--" else command)
    if not words:
        raise click.UsageError("Name the command: gangline exec JOB RANK -- COMMAND...")
    for data in client.execute(found, rank, words):
        for kind, content in frames.take(data):
            if kind == wire.EXIT:
                code = int(content)
                return 128 - code if code < 0 else code
            if kind == wire.FAILED:
                click.echo(f"gangline: {content.decode('utf-8', 'replace')}", err=True)
                return exits.CONFLICT
            stream = sys.stderr if kind == wire.ERR else sys.stdout
            stream.buffer.write(content)
            stream.buffer.flush()
    click.echo("gangline: the connection has ended before the command; whether it goes on is not known", err=True)
    return exits.UNREACHABLE


#: by the name of the command
exec = execute
