"""Options that stand for fields of the job file: `run` describes a whole job by them, `submit` changes what its files say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

from gangline.core.model.problems import BadJob, Problem

#: option → (place in the job file, what kind of value it takes, help)
FieldOptions = Mapping[str, tuple[str, str, str]]

#: when a job takes part
WHEN: FieldOptions = {
    "array": ("/array", "text", "Indices: a job for each of them, e.g. 0-99%10 for at most ten at once."),
    "depends-on": ("/depends_on", "list", "[after_ok:|after_any:|after_not_ok:|after_start:]JOB that comes first; may be given again."),
    "begin": ("/begin", "duration", "Not before: a time as 2026-08-01T06:00:00Z, or a duration from now."),
    "deadline": ("/deadline", "duration", "Over by then, or not started at all: a time or a duration from now."),
}


def field_options(fields: FieldOptions) -> Callable[[Any], Any]:
    """Return the decorator that gives a command these options."""

    def decorate(command: Any) -> Any:
        for name, (_, kind, text) in reversed(list(fields.items())):
            command = click.option(f"--{name}", default=None, multiple=kind in ("list", "ints"), metavar="VALUE", help=text)(command)
        return command

    return decorate


def put(job: dict[str, Any], given: Mapping[str, Any], fields: FieldOptions) -> bool:
    """Put the options that were given into a job in the job file's words; return whether there were any."""
    found = False
    for name, (pointer, kind, _) in fields.items():
        value = given[name.replace("-", "_")]
        if value is None or value == ():
            continue
        at, found = job, True
        *parents, last = pointer[1:].split("/")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = [_typed(item, kind) for item in value] if isinstance(value, tuple) else _typed(value, kind)
    return found


def _typed(text: str, kind: str) -> Any:
    """Return an option's text as the type that the field takes, or as it is, to be refused with the field's own words."""
    if kind in ("int", "ints", "duration") and text.lstrip("-").isdecimal() and len(text) <= 18:
        return int(text)
    if kind == "number":
        try:
            return float(text)
        except ValueError:
            return text
    return text


def as_options(bad: BadJob, fields: FieldOptions) -> BadJob:
    """Return the problems with the options that they come from in the place of fields."""
    options = {pointer: f"--{name}" for name, (pointer, _, _) in fields.items()}

    def renamed(problem: Problem) -> Problem:
        name = options.get(problem.pointer) or options.get(problem.pointer.rpartition("/")[0])
        if name is None and problem.pointer.startswith("/env/"):
            name = f"--env {problem.pointer.removeprefix('/env/')}"
        return Problem(name or problem.pointer, problem.message, problem.code, problem.nearest)

    return BadJob([renamed(problem) for problem in bad.problems])
