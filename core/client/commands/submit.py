"""submit: jobs from files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from gangline.core.client import exits
from gangline.core.client.api import Client, new_key
from gangline.core.client.fieldoptions import WHEN, as_options, field_options, put
from gangline.core.client.options import client_of, output_options, timeout_option
from gangline.core.client.output import Output, clean
from gangline.core.client.watch import label, reason, wait_for
from gangline.core.model.jobfile import MAX_BYTES, parse_json_spec, parse_yaml, to_json
from gangline.core.model.problems import BadJob
from gangline.core.model.spec import JobSpec

#: how long `submit` waits for the first decision about a job, to be able to say why it is queued
FIRST_DECISION_S = 1.0


@click.command(no_args_is_help=True)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--wait", is_flag=True, help="Wait until the jobs have ended; the exit code says how.")
@click.option("-d", "--detach", is_flag=True, help="Return at once, even with --wait in an alias.")
@click.option("--propagate", is_flag=True, help="With --wait: exit with the job's own exit code when it failed.")
@click.option("--workdir", default="", metavar="DIR", help="Working directory of jobs whose file names none.")
@field_options(WHEN)
@click.option("--hold", is_flag=True, help="Do not start the jobs before they are released.")
@click.option("--dry-run", is_flag=True, help="Check the files and print the jobs as they would be sent; send nothing.")
@click.option("--idempotency-key", default="", metavar="KEY", help="Submitting twice with one key makes one job.")
@timeout_option
@output_options
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    files: tuple[str, ...],
    wait: bool,
    detach: bool,
    propagate: bool,
    workdir: str,
    hold: bool,
    dry_run: bool,
    idempotency_key: str,
    timeout: float,
    out: Output,
    **given: Any,
) -> int:
    """Submit the jobs of FILEs (`-` is standard input). A file with several YAML documents holds several jobs."""
    specs = [_changed(spec, given, hold) for spec in read_files(files)]
    if workdir:
        where = str(Path(workdir).absolute())
        specs = [spec if spec.workdir else msgspec.structs.replace(spec, workdir=where) for spec in specs]
    if dry_run:
        return _print_specs(specs, out)
    client = client_of(ctx)
    accepted, code = send(client, specs, idempotency_key or new_key())
    announce(client, accepted, out)
    if not wait or detach or code:
        return code
    return wait_for(client, [row["job"] for row in accepted], timeout_s=timeout, propagate=propagate, quiet=out.quiet)


def _changed(spec: JobSpec, given: dict[str, Any], hold: bool) -> JobSpec:
    """Return the job as the options change it. Raises BadJob that names the options."""
    words: dict[str, Any] = {"hold": True} if hold else {}
    if not put(words, given, WHEN) and not hold:
        return spec
    try:
        return parse_json_spec({**to_json(spec), **words})
    except BadJob as bad:
        raise as_options(bad, WHEN) from None


def read_files(files: tuple[str, ...]) -> list[JobSpec]:
    """Return the jobs of all files. Says everything that is wrong with any of them and raises Exit when something is."""
    specs: list[JobSpec] = []
    bad = False
    for name in files:
        shown = "<standard input>" if name == "-" else name
        try:
            specs += _parse(_read(name), shown)
        except BadJob as error:
            bad = True
            click.echo("\n".join(clean(line) for line in BadJob(error.problems, shown).lines()), err=True)
        except OSError as error:
            bad = True
            click.echo(f"{clean(shown)}: {(error.strerror or str(error)).lower()} [GL-2011]", err=True)
    if bad:
        click.echo("gangline: nothing was submitted; `gangline explain CODE` says more about a code", err=True)
        raise exits.Exit(exits.USAGE)
    return specs


def send(client: Client, specs: list[JobSpec], key: str) -> tuple[list[dict[str, Any]], int]:
    """Submit jobs and return the answers of those that were accepted, and the exit code that the others mean."""
    if len(specs) == 1:
        return [client.submit(to_json(specs[0]), key).body], exits.DONE
    results = client.submit_batch([to_json(spec) for spec in specs], key).body["results"]
    code = exits.DONE
    for spec, result in zip(specs, results, strict=True):
        problem = result.get("problem")
        if problem:
            who = clean(spec.name or (spec.command[0] if spec.command else spec.roles[0].name))
            click.echo(f"gangline: {who}: {clean(str(problem.get('detail') or problem.get('title')))} [{problem.get('code')}]", err=True)
            code = code or exits.of_status(int(problem.get("status", 500)), str(problem.get("code", "")))
    return [result for result in results if not result.get("problem")], code


def announce(client: Client, accepted: list[dict[str, Any]], out: Output) -> None:
    """Print what became of a submission: id, state, why it waits, and what to do next."""
    if out.for_people and not out.fields:
        for row in accepted:
            job = first_decision(client, row["job"]) if len(accepted) <= 10 else {**row, "id": row["job"]}
            why = reason(job) if job["state"] in ("queued", "finished") else ""
            click.echo(f"{label(job)} {job['state']}{f': {why}' if why else ''}")
        if len(accepted) == 1 and sys.stderr.isatty():
            job_id = accepted[0]["job"]
            click.echo(
                f"  follow it:  gangline logs -f {job_id}\n  await it:   gangline wait {job_id}\n  stop it:    gangline stop {job_id}", err=True
            )
    elif len(accepted) == 1 and out.form != "jsonl":
        out.one(accepted[0], "job")
    else:
        out.rows(accepted, (), (), "jobs", "job")


def first_decision(client: Client, job_id: str) -> dict[str, Any]:
    """Return the job once it is placed or somebody has said why it is not; or as it is after a second."""
    import time

    deadline = time.monotonic() + FIRST_DECISION_S
    while True:
        job: dict[str, Any] = client.job(job_id).body
        if job["state"] != "queued" or job.get("deferred") or job.get("elements") or time.monotonic() > deadline:
            return job
        time.sleep(0.05)


def _read(name: str) -> bytes:
    """Return a file's bytes, never many more than a job may have."""
    if name == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    with open(name, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _parse(text: bytes, name: str) -> list[JobSpec]:
    return [parse_json_spec(text)] if name.endswith(".json") else parse_yaml(text, name)


def _print_specs(specs: list[JobSpec], out: Output) -> int:
    if len(specs) == 1:
        if not out.one(to_json(specs[0]), "name"):
            Output("yaml").one(to_json(specs[0]))
    else:
        Output("yaml" if out.form in ("table", "wide") else out.form, header=out.header).rows(
            [to_json(spec) for spec in specs], (), (), "jobs", "name"
        )
    return exits.DONE
