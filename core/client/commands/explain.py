"""explain and completion: what needs no cluster."""

from __future__ import annotations

import click

from gangline.core.client import exits
from gangline.core.model.nearest import nearest


@click.command()
@click.argument("code", required=False, default="")
def explain(code: str) -> int:
    """Explain the CODE of an error or of a reason for waiting; without one, list all."""
    from gangline.core.client.codes import CODES

    if not code:
        for known, (title, _, _) in CODES.items():
            click.echo(f"{known:<24} {title}")
        return exits.DONE
    found = {known.lower(): known for known in CODES}.get(code.strip("[]").lower())
    if found is None:
        near = nearest(code, CODES)
        click.echo(f'gangline: there is no code "{code}". {f"Did you mean {near}?" if near else "`gangline explain` lists them."}', err=True)
        return exits.NOT_FOUND
    title, meaning, remedy = CODES[found]
    click.echo(f"{found}: {title}\n\n{meaning}\n\nWhat to do: {remedy}")
    return exits.DONE


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; for bash: eval "$(gangline completion bash)"."""
    from click.shell_completion import get_completion_class

    from gangline.core.client.cli import cli

    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(cli, {}, "gangline", "_GANGLINE_COMPLETE").source())
