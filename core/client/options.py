"""Options and arguments that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gangline.core.client.api import Client
from gangline.core.client.output import FORMATS, Output
from gangline.core.client.settings import Settings
from gangline.core.model.units import parse_duration

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.ParamType[float, str]):
    """Seconds, written as "90s", "1h30m" or a plain number."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the seconds."""
        if isinstance(value, int | float):
            return float(value)
        seconds = float(value) if value.isdecimal() and len(value) < 10 else parse_duration(value)
        if seconds is None:
            self.fail(f'"{value}" is not a duration; one looks like 90s, 10m or 1h30m.', param, ctx)
        return seconds


def output_options(command: F) -> F:
    """Add -o, --json, --fields, --no-header and -q; the command gets them together as `out`."""

    def gather(*args: Any, **values: Any) -> Any:
        form = "json" if values.pop("as_json") else values.pop("form", "table")
        values.pop("form", None)
        out = Output(form, values.pop("fields"), not values.pop("no_header"), values.pop("quiet"))
        return command(*args, out=out, **values)

    gather.__name__, gather.__doc__ = command.__name__, command.__doc__
    gather.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="Print names only."),
        click.option("--no-header", is_flag=True, help="Print no headings."),
        click.option("--fields", default="", metavar="A,B", help="Print these fields of the API only."),
        click.option("--json", "as_json", is_flag=True, help="Short for -o json."),
        click.option("-o", "--output", "form", type=click.Choice(FORMATS), default="table", help="Format of the result."),
    ):
        gather = option(gather)
    return gather  # type: ignore[return-value]


def timeout_option(command: F) -> F:
    """Add --timeout, for commands that wait."""
    return click.option("--timeout", type=Duration(), default=0.0, metavar="TIME", help="Give up waiting after this time, e.g. 10m.")(command)


def job_argument(many: bool = False) -> Callable[[F], F]:
    """Add JOB: an id, the beginning of one, a name, or @last; with completion."""
    if many:
        return click.argument("jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=_complete_jobs)
    return click.argument("job", metavar="JOB", shell_complete=_complete_jobs)


def nodes_argument(command: F) -> F:
    """Add NODE...; with completion."""
    return click.argument("nodes", metavar="NODE...", nargs=-1, required=True, shell_complete=_complete_nodes)(command)


def client_of(ctx: click.Context) -> Client:
    """Return the client for the addresses that the user named; it says so when it has to wait."""
    settings: Settings = ctx.find_object(Settings) or Settings()
    return settings.client(lambda why: click.echo(f"gangline: {why}; trying again", err=True))


def user_of(ctx: click.Context) -> str:
    """Return the user's name."""
    return (ctx.find_object(Settings) or Settings()).user()


def _complete_jobs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    words = ["@last"]
    for row in _listing(lambda client: client.jobs(100)[0]):
        words += [row["id"], row.get("name") or row["id"]]
    return sorted({word for word in words if word.startswith(incomplete)})


def _complete_nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return sorted(row["id"] for row in _listing(lambda client: client.nodes()) if row["id"].startswith(incomplete))


def _listing(ask: Callable[[Client], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Ask for rows; a completion that fails completes nothing, and is not the place to say why."""
    from gangline.core.client.api import ApiError, NotConfigured, Unreachable

    try:
        return ask(Settings().client())
    except (ApiError, NotConfigured, Unreachable, KeyError, ValueError):
        return []
