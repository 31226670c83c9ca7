"""`gangline chaos`: faults by hand on a local cluster, the demo, and the simulation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from gangline.chaos.checker.command import main as check
from gangline.chaos.demo import main as demo
from gangline.chaos.faults import FAULTS, Fault
from gangline.chaos.gpufaults import GPU_FAULTS
from gangline.chaos.injector import Injection, InjectionFailed, Injector
from gangline.chaos.local import OnLocalCluster
from gangline.chaos.sim.command import sim
from gangline.chaos.targets import NoTarget
from gangline.core.client.api import ApiError, Unreachable
from gangline.core.client.localcluster import ClusterError, LocalCluster
from gangline.core.client.settings import Settings

#: field of a fault → help of its option
_OPTIONS = {
    "job": "Job, by id or name.",
    "rank": "Number of the rank.",
    "node": "Name of the node.",
    "scheduler": "Name of the scheduler, s1 and so on.",
    "member": "Name of the etcd member, e1 and so on.",
    "gpu": "Index of the GPU on its node.",
    "xid": "Number of the error, an Xid, as in the driver's catalogue.",
    "process": "Name of the process: e1, s1, n1 and so on.",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Break things on purpose, and check that nothing was lost."""


@main.group()
def inject() -> None:
    """Do one fault to the cluster on this machine, and say what was hit."""


def _command(fault: type[Fault]) -> click.Command:
    fields = dataclasses.fields(fault)

    def run(state_dir: Path | None, heal_after: float | None, as_json: bool, **values: Any) -> None:
        _inject(fault, state_dir, heal_after, as_json, values)

    options: list[click.Parameter] = [
        click.Option([f"--{x.name}"], required=True, type=int if x.type == "int" else str, help=_OPTIONS[x.name]) for x in fields
    ]
    options += [
        click.Option(["--state-dir"], type=click.Path(path_type=Path), help="Where the cluster keeps all [GANGLINE_STATE, or .gangline]."),
        click.Option(["--heal-after"], type=click.FloatRange(0, 86_400), metavar="SECONDS", help="Undo it after so long, and end then."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print what was hit as JSON."),
    ]
    text = " ".join((fault.__doc__ or "").split())
    return click.Command(fault.NAME, callback=run, params=options, help=text)


def _inject(fault: type[Fault], state_dir: Path | None, heal_after: float | None, as_json: bool, values: dict[str, Any]) -> None:
    cluster = LocalCluster(state_dir or Settings().state_dir())
    injector = Injector(OnLocalCluster(cluster))
    try:
        if "job" in values:
            values["job"] = cluster.client().job(values["job"]).body["id"]
        injection = injector.inject(fault(**values))
        _say(injection, as_json)
        if heal_after is not None:
            _wait(heal_after)
            for line in injector.heal(injection):
                click.echo(line, err=as_json)
    except (NoTarget, InjectionFailed, ClusterError, ApiError, Unreachable) as e:
        raise click.ClickException(str(e)) from None


def _say(injection: Injection, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(injection.to_json(), indent=1))
        return
    click.echo(str(injection.fault))
    for target in injection.targets:
        click.echo(f"  {target.what}, pid {target.process.pid}")


def _wait(seconds: float) -> None:
    import time

    click.echo(f"healing in {seconds:g} s", err=True)
    time.sleep(seconds)


for _fault in (FAULTS | GPU_FAULTS).values():
    inject.add_command(_command(_fault))
main.add_command(demo, "demo")
main.add_command(check, "check")
main.add_command(sim, "sim")

if __name__ == "__main__":
    main(prog_name="gangline chaos")
