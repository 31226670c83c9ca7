"""up and down: a cluster on this machine."""

from __future__ import annotations

import click

from gangline.core.client.settings import Settings

_STATE_HELP = "Where the cluster keeps everything [GANGLINE_STATE, or .gangline]."


@click.command()
@click.option("--nodes", type=click.IntRange(1, 256), default=4, show_default=True, help="Nodes (agents).")
@click.option("--gpus", type=click.IntRange(0, 64), default=8, show_default=True, help="Simulated GPUs of each node.")
@click.option("--gpu-model", default="h100", show_default=True, help="Their model.")
@click.option("--schedulers", type=click.IntRange(1, 9), default=2, show_default=True, help="Schedulers; one of them leads.")
@click.option("--state-dir", default="", metavar="DIR", help=_STATE_HELP)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def up(ctx: click.Context, nodes: int, gpus: int, gpu_model: str, schedulers: int, state_dir: str, quiet: bool) -> int:
    """Start a cluster on this machine, or what is missing of it: etcd, schedulers and nodes with simulated GPUs."""
    from pathlib import Path

    from gangline.core.client.localcluster import command

    where = Path(state_dir or _state_dir(ctx))
    return command.up(nodes=nodes, gpus=gpus, schedulers=schedulers, state_dir=where, gpu_model=gpu_model, quiet=quiet)


@click.command()
@click.option("--state-dir", default="", metavar="DIR", help=_STATE_HELP)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def down(ctx: click.Context, state_dir: str, quiet: bool) -> int:
    """End the cluster on this machine, its jobs too; what it knows stays for the next `up`."""
    from pathlib import Path

    from gangline.core.client.localcluster import command

    return command.down(state_dir=Path(state_dir or _state_dir(ctx)), quiet=quiet)


def _state_dir(ctx: click.Context) -> str:
    return (ctx.find_object(Settings) or Settings()).state_dir()
