"""The `gangline` command: finds the command that was asked for, loads only its module, and turns what goes wrong into words and an exit code.

Start-up is a promise (docs/cli.md), so this module imports click, json and http.client and nothing else of weight; everything that only some
commands need is imported by their modules under `commands/`, and tests/unit/test_cli_startup.py counts what is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from gangline.core.client import exits
from gangline.core.client.api import ApiError, NotConfigured, Unreachable
from gangline.core.client.output import clean
from gangline.core.client.settings import Settings
from gangline.core.model.nearest import nearest

#: command → (module under `commands`, one line of help), in the sections of `gangline --help`
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Jobs": {
        "submit": ("submit", "Submit the jobs of files, or of standard input."),
        "plan": ("plan", "Say what would become of jobs if they were submitted now."),
        "run": ("run", "Describe a job by options, run it and follow it to its end."),
        "ps": ("read", "List jobs, newest first."),
        "show": ("read", "Show everything about a job."),
        "why": ("why", "Say why a job waits, or is where it is."),
        "when": ("why", "Estimate when a job starts, or ends."),
        "story": ("read", "Tell what happened to a job, from the log."),
        "logs": ("logs", "Print what the ranks of a job print."),
        "exec": ("execute", "Run a command beside a rank, inside its isolation."),
        "wait": ("wait", "Wait until jobs have ended, and say how."),
        "stop": ("wait", "Stop jobs."),
        "hold": ("hold", "Keep jobs from being started."),
        "release": ("hold", "Let jobs start that were held."),
    },
    "Cluster": {
        "nodes": ("nodes", "List nodes."),
        "queues": ("queues", "List queues with what they may have and what they have."),
        "apply": ("apply", "Declare the queues that a cluster file describes."),
        "events": ("events", "Print the events of the cluster's log."),
        "health": ("health", "Show what is not well, with the evidence, or say how it is."),
        "cordon": ("nodes", "Send no new ranks to nodes."),
        "uncordon": ("nodes", "Send new ranks to nodes again."),
        "drain": ("nodes", "Empty nodes, and say what is in the way."),
        "undrain": ("nodes", "End a drain."),
        "reservation": ("reservation", "Keep nodes or GPUs for somebody, or for maintenance."),
        "explain": ("explain", "Explain a code of an error or a reason."),
        "simulate": ("simulate", "Replay a trace in virtual time through the scheduling policy."),
        "scenario": ("scenario", "Check the scheduling policy against scenario files."),
    },
    "Run it yourself": {
        "up": ("local", "Start a cluster on this machine."),
        "down": ("local", "End the cluster on this machine."),
        "leader": ("gangline.leader", "Run a scheduler."),
        "agent": ("gangline.nodeagent", "Run the agent of a node."),
        "bench": ("gangline.benchmarks", "Measure."),
        "chaos": ("gangline.chaos", "Break things on purpose, and check that nothing was lost."),
        "completion": ("explain", "Print the completion script of a shell."),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class _Lazy(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, text = COMMANDS[cmd_name]
        if module.startswith("gangline."):
            return _pass_through(cmd_name, module, text)
        found = getattr(import_module(f"gangline.core.client.commands.{module}"), cmd_name)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one was probably meant."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = nearest(args[0], COMMANDS)
            hint = f"Did you mean `gangline {near}`?" if near else "`gangline --help` lists them."
            raise click.UsageError(f'There is no command "{clean(args[0])}". {hint}', ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, text) for name, (_, text) in commands.items()])


def _pass_through(name: str, module: str, text: str) -> click.Command:
    """Return a command that becomes `python -m MODULE` with all its arguments, --help too."""

    def become(args: tuple[str, ...]) -> NoReturn:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *args])

    return click.Command(
        name,
        callback=become,
        help=text,
        params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
        add_help_option=False,
    )


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"gangline {version('gangline')}")
        ctx.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]}, epilog="Environment, formats and exit codes: docs/cli.md.")
@click.option("--url", default="", metavar="URL[,URL...]", help="Addresses of schedulers [GANGLINE_URL, or the local cluster's].")
@click.option("--token-file", default="", metavar="FILE", help="File with the token [GANGLINE_TOKEN_FILE].")
@click.option("--debug", is_flag=True, help="Show the traceback of an internal error.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version.")
@click.pass_context
def cli(ctx: click.Context, url: str, token_file: str, debug: bool) -> None:
    """Run gangs of processes on a cluster of GPUs."""
    ctx.obj = Settings(url, token_file)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the console script."""
    given = list(sys.argv[1:] if args is None else args)
    code = _run(given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    sys.exit(code)


def _run(args: list[str]) -> int:
    try:
        result: Any = cli.main(args, prog_name="gangline", standalone_mode=False)
    except exits.Exit as end:
        return end.code
    except BrokenPipeError:
        _drop_stdout()
        return exits.DONE
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ngangline: interrupted", err=True)
        return exits.INTERRUPTED
    except Exception as error:  # the one place where everything ends in words
        code = _say(error)
        if code == exits.INTERNAL and _debug(args):
            raise
        return code
    return result if isinstance(result, int) else exits.DONE


def _debug(args: list[str]) -> bool:
    return "--debug" in args or bool(os.environ.get("GANGLINE_DEBUG"))


def _say(error: Exception) -> int:
    """Say what went wrong, and return the exit code for it."""
    if isinstance(error, click.ClickException):
        if isinstance(error, click.UsageError):
            error.show()
        else:
            click.echo(f"gangline: {error.format_message()}", err=True)
        return exits.USAGE
    if isinstance(error, ApiError):
        return _say_refusal(error)
    if isinstance(error, Unreachable):
        lines = ["gangline: no scheduler answers. [GL-2001]", *(f"  {url}: {why}" for url, why in error.tried)]
        click.echo("\n".join(lines), err=True)
        return exits.UNREACHABLE
    if isinstance(error, NotConfigured):
        click.echo(f"gangline: {error}. [GL-2002]", err=True)
        return exits.UNREACHABLE
    problems = getattr(error, "lines", None)
    if type(error).__name__ in ("BadJob", "BadTrace") and callable(problems):
        click.echo("\n".join(problems()), err=True)
        return exits.USAGE
    text = " ".join(str(error).split())
    click.echo(f"gangline: internal error, {type(error).__name__}: {text}. --debug shows where. [GL-2000]", err=True)
    return exits.INTERNAL


def _say_refusal(error: ApiError) -> int:
    code = error.code or f"http_{error.status}"
    text = clean(str(error)).rstrip(".")
    click.echo(f"gangline: {text}{'' if text.endswith('?') else '.'} [{clean(code)}]", err=True)
    for problem in error.problem.get("errors") or ():
        hint = f" Did you mean {problem['nearest']}?" if problem.get("nearest") else ""
        click.echo(clean(f"  {problem.get('pointer') or 'job'}: {problem.get('message')}{hint} [{problem.get('code')}]"), err=True)
    return exits.of_status(error.status, error.code)


def _drop_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader of our pipe has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    main()
