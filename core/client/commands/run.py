"""run: a job from options, followed to its end."""

from __future__ import annotations

import sys
from typing import Any

import click

from gangline.core.client import exits
from gangline.core.client.api import new_key
from gangline.core.client.commands.submit import announce, send
from gangline.core.client.fieldoptions import WHEN, as_options, field_options, put
from gangline.core.client.options import client_of, output_options, timeout_option
from gangline.core.client.output import Output, clean, colours
from gangline.core.client.watch import follow_to_end
from gangline.core.model.jobfile import parse_json_spec, to_json
from gangline.core.model.problems import BadJob

#: option → (place in the job file, what kind of value it takes, help)
FIELDS: dict[str, tuple[str, str, str]] = {
    "name": ("/name", "text", "Name of the job."),
    "queue": ("/queue", "text", "Queue."),
    "priority": ("/priority", "int", "Priority; below 100 the job is preemptible unless said otherwise."),
    "ranks": ("/gang/ranks", "int", "Ranks of the gang."),
    "min-ranks": ("/gang/min_ranks", "int", "Fewest ranks that are worth starting."),
    "ranks-per-node": ("/gang/ranks_per_node", "int", "Ranks on each node."),
    "gpus": ("/resources/gpus", "int", "GPUs of each rank."),
    "gpu-share": ("/resources/gpu_share", "number", "Part of one GPU for each rank, e.g. 0.5."),
    "gpu-memory": ("/resources/gpu_memory", "text", "Memory of one GPU for each rank, e.g. 20GiB."),
    "mig": ("/resources/mig", "text", "MIG profile of which each rank gets an instance, e.g. 1g.10gb."),
    "mig-count": ("/resources/mig_count", "int", "MIG instances of each rank, if it needs several."),
    "gpu-model": ("/resources/gpu_model", "list", "Acceptable GPU model; may be given again, in order of preference."),
    "cpus": ("/resources/cpus", "number", "CPUs of each rank."),
    "memory": ("/resources/memory", "text", "Memory of each rank, e.g. 64GiB."),
    "topology-required": ("/topology/required", "text", "Level of the topology: all ranks in one domain of it, or the job waits."),
    "topology-preferred": ("/topology/preferred", "text", "Level in one domain of which the ranks are to be if possible."),
    "topology-balanced": ("/topology/balanced", "text", "Level over few domains of which the ranks are to be balanced."),
    "topology-spread": ("/topology/spread", "text", "Level over all domains of which the ranks are to be spread."),
    "max-skew": ("/topology/max_skew", "int", "How far the numbers of ranks in these domains may differ, or the job waits."),
    "topology-name": ("/topology/name", "text", "The topology, if it is not the one called default."),
    "time-limit": ("/time_limit", "duration", "Running time after which the job is stopped, e.g. 24h."),
    "workdir": ("/workdir", "text", "Working directory."),
    "checkpoint-path": ("/checkpoint/path", "text", "Where the job keeps its checkpoints."),
    "checkpoint-interval": ("/checkpoint/interval", "duration", "How often it writes one."),
    "on-rank-failure": ("/restart/on_rank_failure", "text", "gang, rank or never."),
    "on-node-failure": ("/restart/on_node_failure", "text", "reschedule or fail."),
    "max-restarts": ("/restart/max_restarts", "int", "Failures of the application that are restarted within the window."),
    "restart-window": ("/restart/window", "duration", "The window."),
    "backoff-initial": ("/restart/backoff/initial", "duration", "Delay before the second restart in a row."),
    "backoff-max": ("/restart/backoff/max", "duration", "Longest delay before a restart."),
    "hang-timeout": ("/restart/hang_timeout", "duration", "Time without reported progress that counts as a failure."),
    "fail-exit-code": ("/restart/exit_codes/fail", "ints", "Exit code that ends the job at once; may be given again."),
    "fail-signal": ("/restart/signals/fail", "list", "Signal that ends the job at once; may be given again."),
    "preemption-signal": ("/preemption/signal", "text", "Signal that asks ranks to stop."),
    "grace": ("/preemption/grace", "duration", "Time they are given."),
    "on-disconnect": ("/on_disconnect", "text", "stop or keep."),
    **WHEN,
}


@click.command(no_args_is_help=True, context_settings={"allow_interspersed_args": False})
@field_options(FIELDS)
@click.option("--preemptible/--not-preemptible", default=None, help="Whether the job may be asked to make room.")
@click.option("--hold", is_flag=True, default=None, help="Do not start the job before it is released.")
@click.option("-e", "--env", multiple=True, metavar="NAME[=VALUE]", help="Variable for the ranks; without a value it is taken from here.")
@click.option("-d", "--detach", is_flag=True, help="Submit and return at once.")
@click.option("--propagate", is_flag=True, help="Exit with the job's own exit code when it failed.")
@click.option("--dry-run", is_flag=True, help="Print the job file that these options mean; send nothing.")
@click.option("--idempotency-key", default="", metavar="KEY", help="Running twice with one key makes one job.")
@timeout_option
@output_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True, metavar="-- COMMAND [ARG]...")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    command: tuple[str, ...],
    preemptible: bool | None,
    hold: bool | None,
    env: tuple[str, ...],
    detach: bool,
    propagate: bool,
    dry_run: bool,
    idempotency_key: str,
    timeout: float,
    out: Output,
    **given: Any,
) -> int:
    """Run COMMAND as a gang, print what its ranks print, and end as it ends. Ctrl-C detaches; the job goes on."""
    words = {"command": list(command), "preemptible": preemptible, "hold": hold, "env": dict(_variable(item) for item in env)}
    put(words, given, FIELDS)
    try:
        spec = parse_json_spec(words)
    except BadJob as bad:
        raise as_options(bad, FIELDS) from None
    if dry_run:
        if not out.one(to_json(spec), "name"):
            Output("yaml").one(to_json(spec))
        return exits.DONE
    client = client_of(ctx)
    accepted, _ = send(client, [spec], idempotency_key or new_key())
    if detach:
        announce(client, accepted, out)
        return exits.DONE
    if not out.quiet:
        click.echo(f"gangline: {accepted[0]['job']} submitted", err=True)
    return follow_to_end(client, accepted[0]["job"], timeout_s=timeout, propagate=propagate, colour=colours(sys.stdout))


def _variable(item: str) -> tuple[str, str]:
    import os

    name, found, value = item.partition("=")
    if found:
        return name, value
    if name not in os.environ:
        raise click.UsageError(f"--env {clean(name)}: there is no such variable here; write --env {clean(name)}=VALUE.")
    return name, os.environ[name]
